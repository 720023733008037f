"""Parameters that no loss touches have no gradient, so that weight decay passes over them, as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint import load_checkpoint, save_checkpoint
from fxpar.losses import cross_entropy_sum, next_token_labels
from fxpar.runtime.compiling import compile_strategies
from fxpar.runtime.forked import run_forked
from fxpar.runtime.task import CompiledModel
from tests.runtime.hot import adamw, largest_error, sequences

CASES: tuple[tuple[dict[int, str], str], ...] = (
    ({8: "tp2", 64: "dp2+zero3"}, "home"),
    ({8: "dp2+zero2", 64: "tp2"}, "chain"),
    ({64: "pp2"}, "home"),
)
UNTOUCHED = {"aside.weight", "aside.bias", "layers.0.idle", "looked_at"}


class Aside(nn.Module):
    """Next to what the loss reads: a second head, a parameter that nothing reads, one behind `detach`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[0].idle = nn.Parameter(torch.randn(5))
        self.layers[1].frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.looked_at, self.aside = nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.looked_at.detach()
        return self.head(x), self.aside(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy_sum(model(batch["input_ids"])[0], batch["labels"])


def make() -> nn.Module:
    return Aside().double()


@functools.cache
def of_all_cases() -> CompiledModel:
    row = torch.zeros(1, 13, dtype=torch.int64)
    names = dict.fromkeys(name for strategies, _ in CASES for name in strategies.values())
    return compile_strategies(make(), dict(enumerate(names, 1)), loss, {"input_ids": row, "labels": row})


def compiled(case: int) -> CompiledModel:
    whole = of_all_cases()
    return replace(whole, programs={name: whole.programs[name] for name in CASES[case][0].values()})


def batch(step: int) -> list[Tensor]:
    return sequences(step, (5, 20, 3, 7, 11), vocab=31)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, weight_decay=0.5)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """One optimizer step; the parameters without a gradient."""
    without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return without


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def aside(model: nn.Module) -> None:
    """A loss of the user's own that touches the second head."""
    model(torch.arange(6)[None])[1].square().mean().backward()


def one_device() -> list[dict[str, Tensor]]:
    """Three steps; one with a gradient that was there before; one with a gradient that comes after. The weights."""
    model, found = make(), []
    optimizer = optimizer_of(model)
    for step in range(5):
        if step == 3:
            aside(model)
        count = sum(len(ids) - 1 for ids in batch(step))
        for ids in batch(step):
            (loss(model, {"input_ids": ids[None], "labels": next_token_labels(ids[None])}) / count).backward()
        if step == 4:
            aside(model)
        update(model, optimizer)
        optimizer.zero_grad()
        found.append(whole(model))
    return [found[2], found[3], found[4]]


def run(case: int, folder: str) -> tuple[list[dict[str, Tensor]], list[set[str]], int]:
    """The same with fxpar, through a checkpoint after the third step."""
    strategies, mode = CASES[case]
    options: dict[str, Any] = {"loss": loss, "gradients": mode, "monitor": False, "merge": False}
    model: Any = fxpar.parallelize(make(), strategies=strategies, compiled=compiled(case), **options)
    optimizer, found, without = optimizer_of(model), [], []
    for step in range(3):
        model.train_step(batch(step))
        without.append(update(model, optimizer))
        optimizer.zero_grad()
    found.append(whole(model))
    path = save_checkpoint(folder, 3, model, optimizer, {})
    again: Any = fxpar.parallelize(make(), strategies=strategies, compiled=compiled(case), **options)
    optimizer = optimizer_of(again)
    load_checkpoint(path, again, optimizer)
    plain = "pp" not in strategies[64]  # stages run no plain calls
    for step in range(3, 5):
        if step == 3 and plain:
            aside(again)
            assert again.head.weight.grad is None
        again.train_step(batch(step))
        if step == 4 and plain:
            aside(again)
        without.append(update(again, optimizer))
        optimizer.zero_grad()
        found.append(whole(again))
    return found, without, len(optimizer.state)


def test_like_one_device(tmp_path):
    for case in range(len(CASES)):
        assert {out.fqn for out in compiled(case).logical.outputs if out.kind == "grad"}.isdisjoint(UNTOUCHED)
    results = run_forked(2, lambda rank: [run(case, str(tmp_path / str(case))) for case in range(len(CASES))], 240.0)
    want, trained = one_device(), 7
    for case, (found, without, states) in enumerate(results[0]):
        plain = "pp" not in CASES[case][0][64]
        assert largest_error(found[0], want[0]) <= 1e-10, CASES[case]
        assert without[:3] == [UNTOUCHED] * 3
        if plain:
            assert max(largest_error(a, b) for a, b in zip(found, want, strict=True)) <= 1e-10, CASES[case]
            assert without[3:] == [UNTOUCHED - {"aside.weight", "aside.bias"}] * 2
        assert states == trained + 2 * plain
    untouched = {name: value for name, value in make().named_parameters() if name in UNTOUCHED}
    assert all(torch.equal(results[0][0][0][0][name], value) for name, value in untouched.items())
