"""Hot steps whose ranks and streams drift apart at random, with all borders overlapped, against one device.

`python -m tests.runtime.delays 20` trains twenty settings drawn at random on four forked gloo ranks, twenty steps each
in float64, prints a row for each and ends with status 1 unless every loss, gradient and weight agrees to 1e-10.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpar import losses
from fxpar.cost.cluster import ClusterSpec
from fxpar.runtime.forked import run_forked
from fxpar.runtime.pipeline import BoundPipeline
from tests.runtime.hot import largest_error, loss_error, make_llama, parallel, precompile, sequences

RANKS, STEPS, LIMIT = 4, 20, 1e-10
SETS = (
    {16: "dp4", 64: "dp2.tp2+sp", 512: "cp2.tp2"},
    {16: "dp4+zero3", 64: "dp2.tp2+sp", 512: "cp4"},
    {16: "dp2.tp2", 512: "tp4"},
    {16: "dp2.pp2", 64: "pp4", 512: "tp2.cp2"},
    {16: "dp2.pp2+zb_h1", 64: "pp2.tp2+interleaved_1f1b(2)", 512: "pp4+gpipe"},
)
PAUSES_S = (0, 0, 0, 1e-3, 5e-3, 2e-2)
SLOW_NETWORK = ClusterSpec(2, 2, intra_gb_per_s=200, inter_gb_per_s=0.01, latency_us=0)


@dataclass(frozen=True)
class Setting:
    """One run; `options` are those of `parallelize`."""

    seed: int
    options: dict[str, Any]

    def __str__(self) -> str:
        told = {"order": " > ".join(self.options["order"]), "gradients": self.options["gradients"]}
        told |= {"resident": "none"} if "resident" in self.options else {}
        told |= {"cluster": "slow network"} if "cluster" in self.options else {}
        return f"seed {self.seed}: " + ", ".join(f"{key} {value}" for key, value in told.items())


def drawn(seed: int) -> Setting:
    """A set of strategies in some order, with layouts in memory or in turns, gradients that go home or on."""
    draw = random.Random(seed)
    strategies = draw.choice(SETS)
    options: dict[str, Any] = {"strategies": strategies, "gradients": draw.choice(("home", "chain"))}
    options["order"] = draw.sample(list(strategies.values()), len(strategies))
    if draw.random() < 0.4:
        options["resident"] = []
    if draw.random() < 0.4:
        options["cluster"] = SLOW_NETWORK  # gradients are added up inside of a node first
    return Setting(seed, options)


def make() -> nn.Module:
    return make_llama(layers="4", dim="32", heads="4", kv_heads="2", ffn="48")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam, which turns the rounding of a gradient near zero into a whole step."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def batches(seed: int, steps: int) -> list[list[Tensor]]:
    draw = random.Random(seed)
    return [
        sequences(seed * 1000 + step, [draw.choice((2, 5, 9, 14, 30, 60, 130, 300)) for _ in range(draw.randint(1, 8))])
        for step in range(steps)
    ]


def alone(mini_batches: list[list[Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the gradients of all steps with the weights at last, by plain torch, sequence after sequence."""
    model, found, seen = make(), [], {}
    optimizer = optimizer_of(model)
    for step, batch in enumerate(mini_batches):
        count = sum(len(ids) - 1 for ids in batch)
        terms = []
        for ids in batch:
            row = {"input_ids": ids[None], "position_ids": torch.arange(len(ids))[None]}
            loss = losses.causal_lm(model, row | {"labels": losses.next_token_labels(ids[None])}) / count
            loss.backward()
            terms.append(loss.item())
        found.append(sum(terms))
        seen[f"gradients of step {step}"] = torch.cat([p.grad.flatten() for p in model.parameters()])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found, seen | {name: p.detach() for name, p in model.named_parameters()}


def delay(owner: Any, names: tuple[str, ...], draw: random.Random) -> None:
    """Sleep before each call of these methods of an object, for as long as is drawn."""

    def slow(method: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.choice(PAUSES_S))
            return method(*args, **kwargs)

        return wait

    for name in names:
        setattr(owner, name, slow(getattr(owner, name)))


def drifting(rank: int, setting: Setting, mini_batches: list[list[Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """The same on this rank, with every switch, run and reduction late by a time of its own."""
    model = parallel(make, overlap=True, **setting.options)
    engine, draw = model._session().engine, random.Random(setting.seed * RANKS + rank)
    assert engine.options.overlap
    delay(engine.switching, ("to",), draw)
    delay(engine.gradients, ("add",), draw)
    for bound in engine.bound.values():
        delay(bound, ("run_all",), draw)
        for stage in bound.stages.values() if isinstance(bound, BoundPipeline) else ():
            delay(stage, ("forward", "backward"), draw)
    optimizer, found, seen = optimizer_of(model), [], {}
    for step, batch in enumerate(mini_batches):
        found.append(model.train_step(batch).loss)
        seen[f"gradients of step {step}"] = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found, seen | {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def error_of(setting: Setting, steps: int = STEPS) -> float:
    """The largest relative difference of a loss, gradient or weight from one device, over all ranks."""
    mini_batches = batches(setting.seed, steps)
    want_losses, want = alone(mini_batches)
    precompile(make, setting.options["strategies"])
    found = run_forked(RANKS, lambda rank: drifting(rank, setting, mini_batches), timeout_s=300)
    return max(max(loss_error(have, want_losses), largest_error(params, want)) for have, params in found)


def main(runs: int, first: int = 0) -> int:
    worst = 0.0
    for seed in range(first, first + runs):
        begun, setting = time.perf_counter(), drawn(seed)
        error = error_of(setting)
        worst = max(worst, error)
        print(f"{error:8.1e}  {time.perf_counter() - begun:5.1f} s  {setting}", flush=True)
    print(f"{runs} runs of {STEPS} steps, largest difference {worst:.1e} (limit {LIMIT:.0e})")
    return int(not worst <= LIMIT)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
