"""Several tasks train one model on forked ranks: losses and gradients are one device's weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

import fxpar
from fxpar.runtime.forked import run_forked
from tests.runtime.hot import named
from tests.runtime.towers import Towers, described, labelled, one_device, pair, tasks, text

MiniBatch = Mapping[str, Sequence[Any]]
ALL: MiniBatch = {
    "caption": [text(1, 9), text(2, 33), text(3, 2), text(4, 17), text(5, 21)],
    "pairs": [pair(1, 5), pair(2, 3), pair(3, 4)],
    "classify": [labelled(1, 6), labelled(2, 3)],
    "describe": [described(1, 9), described(2, 20), described(3, 14)],
}


@dataclass(frozen=True)
class Case:
    """Mini-batches of tasks that begin with the given one, under strategies of their own or those of all."""

    batches: Sequence[MiniBatch]
    strategies: Mapping[int, str] = field(default_factory=lambda: {64: "dp2"})
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Sequence[str] = ("caption", "pairs", "classify", "describe")

    def tasks(self) -> dict[str, fxpar.Task]:
        return {name: task for name, task in tasks(**self.changes).items() if name in self.names}

    def compiled(self, known: dict[Any, Any]) -> dict[str, fxpar.Task]:
        """With programs, made once in the parent."""
        found, model = {}, Towers().double()
        for name, task in self.tasks().items():
            strategies = task.strategies or self.strategies
            key = (name, tuple(strategies.items()), task.token_budget)
            if key not in known:
                known[key] = fxpar.compile_task(model, task, self.strategies)
            found[name] = fxpar.Task(**{**vars(task), "compiled": known[key]})
        return found

    def run(self, given: Mapping[str, fxpar.Task]) -> dict[str, Any]:
        model = fxpar.parallelize(
            Towers().double(), tasks=given, strategies=self.strategies, merge=False, monitor=False, **self.options
        )
        reports = [model.train_step(batch) for batch in self.batches]
        grads = {n: p.grad if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        return {"reports": reports, "grads": grads, "held out": model.evaluate(ALL_OF(self)), "memory": model.memory}


def ALL_OF(case: Case) -> MiniBatch:
    return {name: ALL[name] for name in case.names}


CASES = {
    "one strategy": Case([ALL]),
    "own strategies": Case(
        [ALL, {**ALL, "pairs": ALL["pairs"][:1]}],
        {16: "dp2", 64: "cp2"},
        {"memory_budget_bytes": 10**8},
        {"pairs": {"strategies": {8: "tp2"}}, "describe": {"strategies": {10: "dp2+zero3", 64: "tp2+sp"}}},
    ),
}


@pytest.fixture(scope="module")
def trained():
    known: dict[Any, Any] = {}
    given = {name: case.compiled(known) for name, case in CASES.items()}
    results = run_forked(
        2,
        lambda rank: {
            name: named(name, lambda case=case, name=name: case.run(given[name])) for name, case in CASES.items()
        },
        timeout_s=500,
    )
    for other in results[1:]:
        for name, found in results[0].items():
            assert [report.loss for report in other[name]["reports"]] == [report.loss for report in found["reports"]]
    return results[0]


def largest_error(have: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> float:
    assert {n for n, g in have.items() if g is None} == {n for n, g in want.items() if g is None}
    return max(
        float((have[n] - w).abs().max() / w.abs().max().clamp_min(1e-30)) for n, w in want.items() if w is not None
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(trained, name):
    case, model = CASES[name], Towers().double()
    for report, batch in zip(trained[name]["reports"], case.batches, strict=True):
        want = one_device(model, case.tasks(), batch)
        assert report.loss == pytest.approx(want["loss"], rel=1e-12)
        assert {task: one.loss for task, one in report.tasks.items()} == pytest.approx(want["losses"], rel=1e-12)
    assert largest_error(trained[name]["grads"], want["grads"]) <= 1e-10
