"""Experts on two nodes with a slow network between them, exact and with their rows compressed, in whole steps.

Called by `two_nodes.py --lsh`. The model of bench_experts.py under `ep4` and under `ep4+lsh(0.2)`, on the same tokens;
both take turns. Paced, each kernel waits until a device that is SLOWER times as slow as a core would be done with it,
so that what two cores give four ranks does not decide; what ranks send each other travels in either case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import model as plain
import torch
import torch.distributed as dist
from bench_experts import make_model, of_fxpar, program_of
from emulated import RANKS_PER_NODE, WORLD, sent_bytes
from torch import fx

from fxpar.cost.calls import NodeCost, node_costs
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.ir.exec_graph import Part
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.runtime.bound import BoundGraph

WAYS = {"exact": "ep4", "compressed": "ep4+lsh(0.2)"}
SIZES = plain.Sizes(dim=128, heads=4, layers=2, vocab=512, seq=1024, batch=WORLD)
TINY = plain.Sizes(dim=16, heads=2, layers=1, vocab=64, seq=96, batch=WORLD)
SLOWER = 10
TARGET, TARGET_ERROR = 1.3, 0.15


def cluster_of(mbit: float, paced: bool) -> ClusterSpec:
    """Two nodes of this machine's kind, or of slower devices, with links of `mbit` Mbit/s between them."""
    speed = mbit / 8e3
    usual = usual_cluster(WORLD, RANKS_PER_NODE, "cpu")
    core, slower = usual.sustained, SLOWER if paced else 1
    device = replace(
        core,
        tflops=core.tflops / slower,  # type: ignore[operator]
        memory_gb_per_s=core.memory_gb_per_s / slower,
        launch_us=core.launch_us * slower,
    )
    return replace(usual, intra_gb_per_s=1.0, inter_gb_per_s=speed, node_gb_per_s=speed, latency_us=200, device=device)


class _Paced(BoundGraph):
    """Kernels take the seconds that are given by part and node, or longer if they do."""

    def __init__(self, program: Any, rank: int, groups: Mapping[str, str], seconds: Mapping[tuple[str, str], float]):
        self._seconds, self._due = seconds, 0.0
        super().__init__(program, rank, groups)

    def prepare(self, *given: Any) -> None:
        self._arrived()  # a step starts now
        super().prepare(*given)

    def finish_graph(self, graph: fx.Graph, part: Part) -> None:
        super().finish_graph(graph, part)
        name = next(name for name, one in self.program.parts.items() if one is part)
        for node in list(graph.nodes):
            seconds = self._seconds.get((name, node.name), 0.0)
            waited = node.target == torch.ops._c10d_functional.wait_tensor.default
            if seconds or waited:
                with graph.inserting_after(node):
                    graph.call_function(self._arrived if waited else self._work, () if waited else (seconds,))

    def _arrived(self) -> None:
        """Kernels behind a transfer start when it has ended."""
        self._due = max(self._due, time.perf_counter())

    def _work(self, seconds: float) -> None:
        self._due += seconds
        left = self._due - time.perf_counter()
        if left > 1e-3:
            time.sleep(left)


def priced(program: TrainGraph, mbit: float, paced: bool, tokens: int) -> list[tuple[NodeCost, float]]:
    """The calls of a step and their seconds; `tokens` are those of all ranks."""
    parts = dict(program.parts)
    costs = node_costs(program, cluster_of(mbit, paced), parts=parts)
    return [(cost, float(cost.seconds.at(tokens))) for cost in costs]


@dataclass(frozen=True)
class Way:
    """A step of one way on this rank, and what it is predicted to take."""

    run: Any
    predicted_s: float


def ways_of(mbit: float, paced: bool, tiny: bool, names: tuple[str, ...]) -> dict[str, Way]:
    sizes = TINY if tiny else SIZES
    model = make_model(sizes)
    tokens = torch.randint(0, sizes.vocab, (WORLD, sizes.seq + 1), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in names:
        program = program_of(model, tokens, WAYS[name])
        costs = priced(program, mbit, paced, WORLD * sizes.seq)
        kernels = {(cost.part, cost.name): seconds for cost, seconds in costs if not cost.axis}
        bound = partial(_Paced, seconds=kernels) if paced else BoundGraph
        found[name] = Way(of_fxpar(program, model, tokens, bound), sum(seconds for _, seconds in costs))
    return found


def probe(paced: bool, tiny: bool = False) -> dict[str, float]:
    """Wall seconds of an exact step on a fast network, and the bytes that this node sends in it."""
    torch.manual_seed(0)
    way = ways_of(1e5, paced, tiny, ("exact",))["exact"]
    way.run()
    before, begun = sent_bytes(), time.perf_counter()
    way.run()
    return {"wall_s": time.perf_counter() - begun, "bytes": sent_bytes() - before}


def measure(mbit: float, steps: int, paced: bool, tiny: bool = False) -> dict[str, dict[str, float]]:
    """On one rank: median wall seconds of a step, and those predicted, by way."""
    torch.manual_seed(0)  # the same weights on all ranks
    ways, taken = ways_of(mbit, paced, tiny, tuple(WAYS)), {name: list[float]() for name in WAYS}
    for turn in range(steps + 1):
        for name, way in ways.items():
            dist.barrier()
            begun = time.perf_counter()
            way.run()
            dist.barrier()
            if turn:
                taken[name].append(time.perf_counter() - begun)
    return {
        name: {"measured_s": statistics.median(taken[name]), "predicted_s": way.predicted_s}
        for name, way in ways.items()
    }


def show(found: Mapping[str, Mapping[str, float]], mbit: float, share: float) -> bool:
    """Print a line per way; are all targets met?"""
    print(f"2 nodes x 2 gloo ranks, {mbit:.0f} Mbit/s between the nodes: {share:.0%} of the exact step is sending")
    for name, one in found.items():
        print(f"{name:12}{WAYS[name]:16}{one['measured_s']:8.3f} s measured{one['predicted_s']:8.3f} s predicted")
    gain, expected = (found["exact"][key] / found["compressed"][key] for key in ("measured_s", "predicted_s"))
    error = expected / gain - 1
    print(f"{gain:.2f} times as fast (target >= {TARGET}), predicted {expected:.2f}")
    print(f"that is {error:+.1%} (target within {TARGET_ERROR:.0%})")
    return gain >= TARGET and abs(error) <= TARGET_ERROR
