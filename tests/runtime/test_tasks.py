"""Several tasks train one model on forked ranks: losses and gradients are one device's weighted sum."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fxpar.cost.group import kept_cost
from fxpar.errors import FxparError, ParallelizeError, TaskError
from fxpar.ir.graph import LogicalGraph
from fxpar.runtime.compiling import capture_step, lower_task
from fxpar.runtime.forked import run_forked
from fxpar.runtime.options import ParallelizeOptions, cluster_here
from fxpar.runtime.planned import check_choice
from fxpar.runtime.task import check_ranks
from tests.runtime.hot import named
from tests.runtime.towers import Towers, described, labelled, one_device, pair, tasks, text

MiniBatch = Mapping[str, Sequence[Any]]
ALL: MiniBatch = {
    "caption": [text(1, 9), text(2, 33), text(3, 2), text(4, 17), text(5, 21)],
    "pairs": [pair(1, 6), pair(2, 3), pair(3, 3)],
    "classify": [labelled(1, 6), labelled(2, 3)],
    "describe": [described(1, 9), described(2, 21), described(3, 12)],
}
SOME: MiniBatch = {"describe": ALL["describe"][:1], "pairs": ALL["pairs"][1:], "caption": []}


@functools.cache
def captured(name: str) -> LogicalGraph:
    """The step of a task, whatever its strategies."""
    task = tasks()[name]
    return capture_step(Towers().double(), task.loss, task.example, task.dynamic, tell_unused=False)


@dataclass(frozen=True)
class Case:
    """Mini-batches under the strategies of all tasks, or of their own (`changes`); gradients are those of the last."""

    batches: Sequence[MiniBatch]
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rescaled: float = 1.0  # of the last mini-batch
    held_out: MiniBatch | None = None

    def compiled(self, known: dict[Any, Any]) -> dict[str, fxpar.Task]:
        """The tasks with programs, made once in the parent."""
        found = {}
        for name, task in tasks(**self.changes).items():
            task = replace(task, strategies=task.strategies or STRATEGIES)
            key = (name, tuple(task.strategies.items()), task.ranks)
            if key not in known:
                known[key] = lower_task(captured(name), task)
                for program in known[key].programs.values():
                    kept_cost(program, cluster_here(None, WORLD, torch.device("cpu")))
            found[name] = replace(task, compiled=known[key])
        return found

    def run(self, given: Mapping[str, fxpar.Task], rank: int) -> dict[str, Any]:
        model = parallel(given, **self.options)
        reports = []
        for batch in self.batches:
            model.zero_grad()
            reports.append(model.train_step(batch))
        grads = {n: p.grad if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        held_out = None if self.held_out is None else model.evaluate(self.held_out)
        layouts = {name: set(layout.params) for name, layout in model.fxpar_session.store.layouts.items()}
        mine = {name: len(views) for name, views in model.fxpar_session.store.storage.views.items()}
        return {"reports": reports, "grads": grads, "held out": held_out, "layouts": layouts, "mine": mine}


WORLD, STRATEGIES = 3, {64: "dp3"}
CASES = {
    # With all tasks there, and then without some.
    "one strategy": Case(
        [ALL, SOME], {"absent_tasks": "rescale"}, rescaled=5.0 / 3.5, held_out={"caption": ALL["caption"]}
    ),
    "own strategies, taking turns": Case(
        [ALL],
        {"resident": []},
        {
            "caption": {"strategies": {16: "dp3", 64: "cp3"}},
            "pairs": {"strategies": {8: "cp3"}},
            "describe": {"strategies": {10: "dp3+zero3", 64: "tp3+sp"}},
        },
    ),
    "side by side": Case(
        [ALL],
        {},
        {
            "caption": {"strategies": {16: "dp1", 64: "dp1+remat"}, "ranks": (2,)},
            "pairs": {"strategies": {8: "tp2"}, "ranks": (0, 1)},
            "classify": {"strategies": {64: "dp1"}, "ranks": (0,)},
            "describe": {"strategies": {64: "dp2"}, "ranks": (1, 2)},
        },
        held_out={"caption": ALL["caption"][:2]},  # of whole batches: the pairs below
    ),
    "towers on ranks of their own": Case(
        [ALL],
        {},
        {
            "caption": {"strategies": {64: "dp2"}, "ranks": (0, 1)},
            "classify": {"strategies": {64: "dp1"}, "ranks": (2,)},
            "pairs": {"strategies": {8: "tp1+zb_h1+cut(embedding) > tp2"}},
            "describe": {"strategies": {64: "tp1+cut(embedding|decoder) > tp2 > tp2@0"}},
        },
        held_out={"pairs": ALL["pairs"][1:], "describe": ALL["describe"][:2]},
    ),
}


def parallel(given: Mapping[str, fxpar.Task], **options: Any) -> Any:
    model = Towers().double()
    return fxpar.parallelize(model, tasks=given, strategies=STRATEGIES, merge=False, monitor=False, **options)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    known: dict[Any, Any] = {}
    works = {name: partial(case.run, case.compiled(known)) for name, case in CASES.items()}
    given = CASES["one strategy"].compiled(known)
    works["joins and leaves"] = partial(joins_and_leaves, given, str(tmp_path_factory.mktemp("checkpoints")))
    works["refusals"] = partial(refusals, given)
    return run_forked(
        WORLD, lambda rank: {name: named(name, partial(work, rank)) for name, work in works.items()}, timeout_s=500
    )


def largest_error(have: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> float:
    assert {n for n, g in have.items() if g is None} == {n for n, g in want.items() if g is None}
    return max(
        float((have[n] - w).abs().max() / w.abs().max().clamp_min(1e-30)) for n, w in want.items() if w is not None
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(ran, name):
    case = CASES[name]
    for number, batch in enumerate(case.batches):
        last = number == len(case.batches) - 1
        want = one_device(Towers().double(), tasks(), batch, case.rescaled if last else 1.0)
        for found in ran:
            report = found[name]["reports"][number]
            assert report.loss == pytest.approx(want["loss"], rel=1e-12)
            assert {task: one.loss for task, one in report.tasks.items()} == pytest.approx(want["losses"], rel=1e-12)
    assert all(largest_error(found[name]["grads"], want["grads"]) <= 1e-10 for found in ran)


def test_a_task_has_the_parameters_that_it_reads(ran):
    """And a rank only those of tasks that run on it."""
    (layout,) = (names for name, names in ran[0]["one strategy"]["layouts"].items() if name.startswith("classify"))
    assert {fqn.partition(".")[0] for fqn in layout} == {"vision", "classes"}
    assert [found["side by side"]["mine"]["classify: dp1"] > 0 for found in ran] == [True, False, False]
    assert ran[0]["one strategy"]["grads"]["never.weight"] is None


def test_reports_are_by_task(ran):
    (report,) = ran[0]["own strategies, taking turns"]["reports"]
    assert [group.strategy for group in report.tasks["caption"].groups] == ["caption: dp3", "caption: cp3"]
    assert report.sequences == sum(map(len, ALL.values())) == sum(one.sequences for one in report.tasks.values())
    assert report.to_json()["tasks"]["pairs"]["valid_tokens"] == 12
    assert list(ran[0]["one strategy"]["reports"][1].tasks) == ["pairs", "describe"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.held_out])
def test_evaluates_each_task_without_training(ran, name):
    want = one_device(Towers().double(), tasks(), CASES[name].held_out)["losses"]
    assert all(found[name]["held out"] == pytest.approx(want, rel=1e-12) for found in ran)


def refusals(given: Mapping[str, fxpar.Task], rank: int) -> list[str]:
    """What a mini-batch is refused for, on all ranks, and what the next one still finds."""
    model, found = parallel(given), []
    pixels, ids = pair(1, 3).values()
    wrong: list[Callable[[], Any]] = [
        lambda: model.train_step([text(1, 5)]),
        lambda: model.train_step({"captions": [text(1, 5)]}),
        lambda: model.train_step({"caption": []}),
        lambda: model.train_step({"caption": [text(1, 5)], "pairs": [{"pixels": pixels}]}),
        lambda: model.train_step({"pairs": [{"pixels": pixels, "ids": ids[:2]}]}),
        lambda: model.train_step({"pairs": [{"pixels": pixels, "ids": ids, "mask": ids}]}),
        lambda: model.train_step({"pairs": [{"pixels": pixels, "ids": ids + 37}]}),
        lambda: model.train_step({"pairs": ALL["pairs"]}, denominator={"caption": 3.0}),
        lambda: model.train_step({"pairs" if rank else "caption": ALL["pairs"]}),
        lambda: model.evaluate({"classify" if rank else "nothing": ALL["classify"]}),
    ]
    for work in wrong:
        with pytest.raises(FxparError) as error:
            work()
        found.append(f"{type(error.value).__name__}: {error.value}")
    step = model.train_step({"classify": ALL["classify"]})
    return [*found, f"step {step.step}, {model.engine_state()['steps']}"]


def joins_and_leaves(given: Mapping[str, fxpar.Task], folder: str, rank: int) -> dict[str, Any]:
    """Two tasks, then one of them with another one, in the same run and in one that goes on from a checkpoint; a change
    that fails changes nothing.
    """
    model = parallel({name: given[name] for name in ("caption", "pairs")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = [model.train_step({"caption": ALL["caption"], "pairs": ALL["pairs"]}).loss]
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TaskError, match="has ranks="):
        model.change_tasks({"pairs": replace(given["pairs"], ranks=(0, 3))}, STRATEGIES)
    found.append(model.train_step({"pairs": ALL["pairs"]}).loss)
    optimizer.zero_grad()
    where = f"{folder}/run"
    save_checkpoint(where, model.step_count, model, optimizer, {"engine": model.engine_state()})
    other = parallel({name: given[name] for name in ("classify", "pairs")})
    extra = load_checkpoint(latest_checkpoint(where), other, torch.optim.AdamW(other.parameters()))
    other.load_engine_state(extra["engine"])
    resumed = other.train_step({"pairs": ALL["pairs"]})
    known = model.fxpar_session.tasks["caption"].compiled.logical
    kept = replace(given["caption"], weight=3.0, compiled=None)
    with warnings.catch_warnings(record=True) as told:
        model.change_tasks({"classify": given["classify"], "caption": kept}, STRATEGIES)
    report = model.train_step({"classify": ALL["classify"], "caption": ALL["caption"]})
    grads = {n: p.grad if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
    optimizer.step()
    again = model.fxpar_session.tasks["caption"].compiled.logical is known
    said = [str(one.message) for one in told]
    end = {"step": report.step, "grads": grads, "kept": again, "resumed": resumed, "said": said}
    return {"losses": [*found, report.loss], **end}


def test_tasks_join_and_leave(ran):
    model, chosen = Towers().double(), tasks(caption={"weight": 0.5})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    want = [one_device(model, chosen, {name: ALL[name] for name in ("caption", "pairs")})["loss"]]
    optimizer.step()
    optimizer.zero_grad()
    want.append(one_device(model, chosen, {"pairs": ALL["pairs"]})["loss"])
    optimizer.zero_grad()
    later = tasks(caption={"weight": 3.0})
    last = one_device(model, later, {name: ALL[name] for name in ("classify", "caption")})
    for found in (each["joins and leaves"] for each in ran):
        assert found["losses"] == pytest.approx([*want, last["loss"]], rel=1e-9)
        assert (found["step"], found["kept"]) == (3, True)
        assert found["resumed"].loss == found["losses"][1]
        assert found["resumed"].step == 3
        assert largest_error(found["grads"], last["grads"]) <= 1e-9


def test_tasks_that_share_nothing_run_and_are_told(ran):
    """One reads images and the other text: above they train as on one device."""
    said = ran[0]["joins and leaves"]["said"]
    for name in ("classify", "caption"):
        assert (
            sum(one.startswith(f"task {name!r} trains no parameter that another task trains. It") for one in said) == 1
        )
    assert not ran[1]["joins and leaves"]["said"]


def test_what_is_refused(ran):
    names = "the tasks are caption, pairs, classify, describe"
    expected = [
        "TaskBatchError: this model is trained for tasks, and was given a list. Give a dict",
        f"TaskBatchError: there is no task 'captions'; did you mean 'caption'.. Give a dict from tasks .*; {names}",
        "TaskBatchError: no task has a batch",
        "WholeBatchError: task 'pairs': batch 0 of the mini-batch has no 'ids', which the step reads; it has pixels",
        r"WholeBatchError: task 'pairs': batch 0 .* has 'ids' of shape \[2, 6\]; the captured step reads \[B, 6\]",
        "WholeBatchError: task 'pairs': batch 0 of the mini-batch has 'mask', which the step does not read",
        "BatchIdError: task 'pairs': 'ids' of the batch has the value .* has 37 rows",
        "TaskBatchError: denominator= names the task 'caption', which has no batch",
        "BatchMismatchError: the plan of the mini-batch on rank",
    ]
    for found in ran:
        for text_, pattern in zip(found["refusals"], expected, strict=False):
            assert re.match(pattern, text_), (text_, pattern)
        assert found["refusals"][-1] == "step 1, 1"
        assert found["refusals"][9].startswith("BatchMismatchError")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tasks": {}}, "has a name and is fxpar.Task"),
        ({"tasks": {"a:b": tasks()["pairs"]}}, "is not a name"),
        ({"tasks": {"pairs": print}}, "task 'pairs' is <built-in"),
        ({"tasks": tasks(), "example": {}}, "example= is for one loss, and there are tasks=: give fxpar.Task"),
        ({"tasks": tasks(), "strategies": "auto"}, 'strategies="auto" is for one loss'),
        ({"tasks": tasks(), "strategies": STRATEGIES, "gradients": "chain"}, "gradients='chain' is for one loss"),
    ],
)
def test_options_that_do_not_go_together(options, why):
    with pytest.raises((TaskError, ParallelizeError), match=why):
        check_choice(ParallelizeOptions(**options))


@pytest.mark.parametrize("weight", [0, -1.0, True, float("nan"), "2"])
def test_weights_are_numbers_above_0(weight):
    with pytest.raises(TaskError, match="has weight="):
        fxpar.Task(torch.sum, weight=weight)


@pytest.mark.parametrize("ranks", [3, "01", (0.0, 1.0), (False, True), (), (1, 0), (3, 4)])
def test_what_no_ranks_are(ranks: object):
    with pytest.raises(TaskError, match=r"task 'a' has ranks=.*consecutive ones of 0 to 3"):
        check_ranks("a", ranks, 4)  # type: ignore[arg-type]
