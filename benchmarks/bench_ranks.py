"""One rank of thousands: what opening a session and planning its first step take, on torch's fake backend.

    python benchmarks/bench_ranks.py [--world 4096] [--layers 80] [--switches] [--profile FILE] [--tiny] [--json OUT]

A model of 70B's widths on the meta device, four strategies over all ranks, nodes of 8. No other rank is there: the fake
backend answers every collective at once with this rank's own values. Prints CPU seconds and peak resident memory after
each part, and the process groups that the rank made. Weights of the strategies are pages that nobody has touched
yet, so of the rank's own weights the peak has the home pieces only.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: TID251 - registers the backend "fake"
from torch import nn

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.models import load

WIDTHS = {"dim": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256}
TINY = {"dim": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "vocab": 256}
OPEN, PLAN = "open the session", "plan the first step, its switches included"
STRATEGIES = {4096: "dp{a}.pp4.tp8", 16384: "dp{b}.tp8+sp", 65536: "dp{a}.cp4.tp8+sp", 131072: "dp{c}.cp8.tp8+sp"}


@dataclass(frozen=True)
class Sizes:
    """What is opened; `rank` is the one that is there."""

    world: int
    layers: int
    widths: dict[str, int]
    planner: str = "auto"
    rank: int = 0

    def strategies(self) -> dict[int, str]:
        """Longest sequence -> strategy."""
        replicas = {"a": self.world // 32, "b": self.world // 8, "c": self.world // 64}
        return {limit: text.format(**replicas) for limit, text in STRATEGIES.items()}


class Parts:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.cpu_s[name] = time.process_time() - begun
        print(f"{name:45} {self.cpu_s[name]:8.2f} CPU s   peak {peak_gb():6.2f} GB", flush=True)


def peak_gb() -> float:
    """The most memory that was ever resident, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def initialize(module: nn.Module) -> None:
    """Fill what a module has itself, on a stand-in that keeps this rank's slices."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=0.02)
    for frequencies in module.buffers(recurse=False):
        exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
        frequencies.copy_(10_000.0**-exponents)


def measure(sizes: Sizes, parts: Parts, compile_switches: bool) -> dict[str, object]:
    """Open a session as one rank of `sizes.world`, and plan a step that needs all strategies."""
    store = torch.testing._internal.distributed.fake_pg.FakeStore()  # noqa: TID251
    dist.init_process_group("fake", rank=sizes.rank, world_size=sizes.world, store=store)
    options = {name: str(value) for name, value in {**sizes.widths, "layers": sizes.layers}.items()}
    strategies = sizes.strategies()
    cluster = ClusterSpec(sizes.world // 8, 8, intra_gb_per_s=200, inter_gb_per_s=25, latency_us=10)
    with parts.part("model on meta"):
        loaded = load("llama", options=options, dtype=torch.bfloat16, device="meta")
    with parts.part("capture and lower, the same for all ranks"):
        compiled = fxpar.compile_strategies(loaded.model, strategies, loaded.loss_fn, loaded.example_batch)
    with parts.part(OPEN):
        model = fxpar.parallelize(
            loaded.model,
            strategies=strategies,
            loss=loaded.loss_fn,
            compiled=compiled,
            cluster=cluster,
            monitor=False,
            initializer=initialize,
            staging_bytes=1 << 30,
            merge=False,
            planner=sizes.planner,
        )
    session = model.fxpar_session
    lengths = [limit // 2 + 1 for limit in strategies for _ in range(sizes.world // 8)]
    with parts.part(PLAN):
        plan = model.plan([torch.zeros(length, dtype=torch.int64) for length in lengths])
    engine = session.engine
    names = [engine.names[group.group] for group in plan.groups]
    order = [name for name in engine.switching.schedule.order(names) if name in names]
    moved = {name: engine.switching.schedule.plan(name, order[:i]).total_bytes for i, name in enumerate(order)}
    first = engine.switching.schedule.plan(order[0], ())
    by_turns = sum(len(cls.members) * leg.transfers for cls, leg in first.classes)
    if compile_switches:
        for i, name in enumerate(order):
            with parts.part(f"prepare the messages of the switch to {name}"):
                engine.switching.compiled(name, order[:i])
    home = sum(tensor.nbytes for tensor in session.store.home_tensors.values())
    return {
        "order": order,
        "transfers_of_all_ranks": by_turns,
        "moved_gb": {name: round(size / 1e9, 1) for name, size in moved.items()},
        "process_groups": engine.switching.options.process_groups.count,
        "peak_gb": round(peak_gb(), 2),
        "home_gb": round(home / 1e9, 3),
        "weights_gb": round(session.memory.resident_bytes / 1e9, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--switches", action="store_true", help="prepare this rank's messages of all switches, too")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--tiny", action="store_true", help="64 ranks, four narrow layers, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes = Sizes(64, 4, TINY, "turns") if args.tiny else Sizes(args.world, args.layers, WIDTHS)
    parts = Parts()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    found = measure(sizes, parts, args.switches)
    profile.disable()
    if args.profile:
        profile.dump_stats(args.profile)
    opening, everything = parts.cpu_s[OPEN] + parts.cpu_s[PLAN], sum(parts.cpu_s.values())
    print(f"opened and planned: {opening:.1f} CPU s; with what all ranks make alike: {everything:.1f} CPU s")
    print(", ".join(f"{name}: {value}" for name, value in found.items()))
    if args.json:
        args.json.write_text(json.dumps({"sizes": asdict(sizes), "cpu_s": parts.cpu_s, **found}, indent=1))


if __name__ == "__main__":
    main()
