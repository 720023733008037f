"""Towers, tasks and plans drawn at random: what ranks find is one device's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar.runtime.forked import run_forked

WORLD, ROWS, WIDTH = 4, 8, 8


class Many(nn.Module):
    """Towers of unlike depth on vectors of unlike size, by number."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(len(sizes))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(size, WIDTH), *itertools.chain(*((nn.GELU(), nn.Linear(WIDTH, WIDTH)),) * depth))
            for size, depth in sizes
        )


@dataclass(frozen=True)
class Contrast:
    """Every row of one tower against every row of the other; a sum over rows."""

    one: int
    other: int

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        a, b = (F.normalize(model.towers[i](batch[f"x{i}"]), dim=-1) for i in (self.one, self.other))
        scores, right = 3 * a @ b.T, torch.arange(a.shape[0])
        return F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.T, right, reduction="sum")


def drawn(seed: int) -> tuple[list[tuple[int, int]], dict[str, fxpar.Task], dict[str, list[Any]]]:
    """Two to six towers; four to ten tasks of two of them, each with ranks and a strategy; and a mini-batch."""
    random = Random(seed)
    towers = random.randint(2, 6)
    sizes = [(random.randint(3, 6), random.randint(0, 2)) for _ in range(towers)]
    tasks, batches = {}, {}
    for number in range(random.randint(4, 10)):
        one, other = sorted(random.sample(range(towers), 2))

        def batch(item: int, one: int = one, other: int = other) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(item)
            return {
                f"x{i}": torch.randn(ROWS, sizes[i][0], generator=generator, dtype=torch.float64) for i in (one, other)
            }

        count = random.choice((1, 2, 2, 4))
        first = random.randrange(WORLD - count + 1)
        flat = [f"{role}{count}" for role in ("dp", "cp", "tp")]
        staged = f"tp{count // 2}+{random.choice(('zb_h1', '1f1b'))}+cut(towers.{other}) > cp{count // 2}"
        strategy = random.choice([*flat, staged, staged] if count > 1 else flat[:1])
        dims = {f"x{i}": {0: "B"} for i in (one, other)}
        tasks[f"task{number}"] = fxpar.Task(
            Contrast(one, other),
            batch(0),
            weight=random.choice((0.5, 1.0, 2.0)),
            strategies={ROWS: strategy},
            ranks=tuple(range(first, first + count)),
            dynamic=dims,
        )
        batches[f"task{number}"] = [batch(100 * number + i) for i in range(1, random.randint(1, 3) + 1)]
    # One task on all ranks: its strategy is that of plain calls.
    name = random.choice(list(tasks))
    tasks[name] = replace(tasks[name], strategies={ROWS: f"dp{WORLD}"}, ranks=None)
    return sizes, tasks, batches


def one_device(model: nn.Module, tasks: Mapping[str, fxpar.Task], batches: Mapping[str, list[Any]]) -> float:
    """The weighted sum of the means; gradients are left in the model."""
    whole = torch.zeros((), dtype=torch.float64)
    for name, task in tasks.items():
        whole = whole + task.weight * sum(task.loss(model, one) for one in batches[name]) / (ROWS * len(batches[name]))
    whole.backward()
    return whole.item()


def step(
    sizes: Sequence[tuple[int, int]], tasks: Mapping[str, fxpar.Task], batches: Mapping[str, list[Any]], rank: int
) -> tuple[float, dict[str, Tensor | None]]:
    model = fxpar.parallelize(Many(sizes).double(), tasks=tasks, strategies=None, merge=False, monitor=False)
    loss = model.train_step(batches).loss
    return loss, {n: p.grad if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxpar.errors.FxparWarning")
@pytest.mark.parametrize("seed", range(8))
def test_drawn_plans_are_one_device(seed):
    sizes, tasks, batches = drawn(seed)
    model = Many(sizes).double()
    found = {name: replace(task, compiled=fxpar.compile_task(model, task)) for name, task in tasks.items()}
    want = one_device(model, tasks, batches)
    for loss, grads in run_forked(WORLD, partial(step, sizes, found, batches), timeout_s=300):
        assert loss == pytest.approx(want, rel=1e-10)
        for name, parameter in model.named_parameters():
            have, here = grads[name], parameter.grad
            assert (have is None) == (here is None), name
            if have is not None and here is not None:
                assert float((have - here).abs().max() / here.abs().max()) <= 1e-10, name
