"""From captured tasks to waves of modules on ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar import Task
from fxpar.cost.cluster import usual_cluster
from fxpar.cost.group import group_cost
from fxpar.errors import ClusterError, FitsNoDevicesError, NotYetError, RunMemoryError
from fxpar.ir.node_meta import fqn_of
from fxpar.lowering import lower
from fxpar.tasks import TaskStep, captured, plan_tasks
from fxpar.tasks.contract import contract
from fxpar.tasks.held import Home
from fxpar.tasks.runs import planned_runs
from fxpar.tasks.times import costs_of, shares_of, task_graph, widths_of
from tests.runtime.test_pipeline_towers import Two
from tests.tasks.towers import step

CLUSTER = usual_cluster(2)


@pytest.fixture(scope="module")
def tasks():
    return {"caption": step("caption"), "text": step("text")}


@pytest.fixture(scope="module")
def graph(tasks):
    return task_graph(tasks, contract(tasks), CLUSTER, 2)


@pytest.fixture(scope="module")
def planned(tasks, graph):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxpar.tasks.plan.task_graph", lambda *_: graph)  # lowered once for all tests
        return plan_tasks(tasks, CLUSTER)


def test_times_of_metaops_add_up_to_those_of_programs(planned):
    for task, batches, length in (("caption", 2, 8), ("text", 4, 8)):
        program = lower(step(task).logical, "dp1", for_store=True)
        cost = group_cost(program, CLUSTER)
        whole = cost.seconds([length] * batches) if step(task).logical.packing else batches * cost.seconds([length])
        mine = [one for one in planned.plan.graph.metaops if one.name.startswith(task)]
        assert sum(one.layers * one.layer_ms[1] for one in mine) == pytest.approx(1000 * whole, rel=1e-9)


def test_batches_are_spread_where_that_is_best(planned):
    image = planned.plan.graph.metaops[0]
    assert image.layer_ms[2] == pytest.approx(image.layer_ms[1] / 2)
    assert planned.chains[0].strategies == {1: "dp1", 2: "dp2"}


def test_every_module_with_parameters_runs_once_in_each_task(planned):
    for task in ("caption", "text"):
        modules = [one for piece in planned.assignments if piece.task == task for one in piece.modules]
        known = step(task).forward
        mine = [one for one in modules if one and known.params([one])]  # code of no module stands before and behind
        assert len(mine) == len(set(mine))
        assert set(known.params(mine)) == set(known.params([""]))


def test_pieces_say_what_ranks_run(planned):
    for piece, placed in zip(planned.assignments, planned.plan.pieces, strict=True):
        chain = planned.chains[placed.metaop]
        assert (piece.first, piece.last, piece.ranks) == (placed.first, placed.last, placed.devices)
        assert piece.strategy == chain.strategies[len(piece.ranks)]
        assert {one for layer in chain.layers[piece.first : piece.last] for one in layer} <= {*piece.modules}
        assert placed in [planned.plan.pieces[at] for at in planned.plan.waves[piece.wave]]
    assert planned.strategies[0, 2] == "dp2"


def test_a_batch_that_cannot_be_spread_stays_on_one_device():
    logical = step("tapped").logical
    plan = plan_tasks({"tapped": TaskStep(logical)}, CLUSTER)
    assert all(strategy != "dp2" for chain in plan.chains for strategy in chain.strategies.values())


def test_mistakes():
    with pytest.raises(ClusterError, match="too small for strategies on 4 ranks"):
        plan_tasks({"text": step("text")}, CLUSTER, 4)


def test_a_task_that_no_strategy_runs(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise NotYetError("a scan over rows", "Write it out.")

    monkeypatch.setattr("fxpar.tasks.times.lower", refuse)
    why = r"'text' fits on no devices: it runs under no strategy\. dp1: .*a scan over rows.*; cp2: "
    with pytest.raises(FitsNoDevicesError, match=why):
        plan_tasks({"text": step("text")}, CLUSTER)


def test_widths_of_metaops():
    assert (widths_of(12), widths_of(6)) == ([1, 2, 4, 8, 12], [1, 2, 4, 5, 6])


def test_code_that_two_metaops_have_is_split_between_them():
    caption = step("caption")
    found = contract({"caption": caption})
    image, lm = (one.part for one in found)
    image.behind += [node for node in lm.before if not fqn_of(node)]
    program = lower(caption.logical, "dp1", for_store=True, verified=False)
    shares = shares_of(caption, found)
    assert 0 < shares[""][0] < 1
    costs = costs_of(program, shares, 2, CLUSTER)
    assert float(sum(one.at(8) for one in costs)) == pytest.approx(group_cost(program, CLUSTER).seconds([8]), rel=1e-9)


def test_a_run_can_follow_the_plan(planned):
    """Batches spread over both ranks take as long as one task after the other, here."""
    runs = planned.runs
    assert {run.task for run in runs.runs} == {"caption", "text"}
    assert runs.ms <= runs.sequential_ms * (1 + 1e-9)
    assert all(set(run.ranks) <= {0, 1} for run in runs.runs)


def test_towers_run_side_by_side_where_that_is_shorter():
    """One batch of four rows: what two ranks save of a small tower is less than what another tower beside it does."""
    example = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    rows = {"x": {0: "B"}, "y": {0: "B"}}
    step = captured(Two(), Task(lambda model, batch: model(batch["x"], batch["y"]).sum(), example, dynamic=rows))
    plan = plan_tasks({"both": step}, CLUSTER)
    (run,) = plan.runs.runs
    assert (run.ranks, run.option.strategy) == ((0, 1), "dp1+zb_h1+cut(other) > dp1")
    alone = {one.name: one.layer_ms[1] for one in plan.plan.graph.metaops}
    tower = alone["both.one"] + alone["both.loss"]  # and what is made of it before the two meet
    assert run.option.ms == pytest.approx(sum(alone.values()) - tower)
    assert run.option.ms < plan.runs.sequential_ms


class Joined(nn.Module):
    """Two narrow towers, and wide layers on what both have made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))) for _ in range(2))
        self.over = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.over(self.one(x) + self.other(y))


def test_what_follows_towers_runs_on_the_ranks_of_all():
    """Launches are all that narrow layers take, so that more ranks do not help them; wide layers are shared."""
    example = {"x": torch.empty(65536, 8, device="meta"), "y": torch.empty(65536, 8, device="meta")}
    rows = {"x": {0: "B"}, "y": {0: "B"}}
    with torch.device("meta"):
        model = Joined()
    step = captured(model, Task(lambda model, batch: model(batch["x"], batch["y"]).sum(), example, dynamic=rows))
    plan = plan_tasks({"both": step}, CLUSTER)
    (run,) = plan.runs.runs
    assert (run.ranks, run.option.strategy) == ((0, 1), "dp1+zb_h1+cut(other|over) > dp1 > cp2@0")
    alone = {one.name: one.layers * one.layer_ms[1] for one in plan.plan.graph.metaops}
    assert run.option.ms < plan.runs.sequential_ms < sum(alone.values())


def test_weights_that_come_and_gradients_that_leave_are_part_of_a_step(planned):
    """The step is what tasks take and what moving does, both as the runtime predicts them."""
    runs = planned.runs
    assert all(run.option.moved_ms > 0 for run in runs.runs)
    assert runs.ms == pytest.approx(runs.moved_ms + sum(max(run.option.ms for run in wave) for wave in runs.waves))
    assert planned.plan.step.reductions


def test_what_does_not_fit_is_placed_otherwise_or_refused(tasks, graph):
    """Slower layouts that cut weights take less; with less memory than those, it is said what would do."""
    found, (_, _, layouts) = contract(tasks), graph
    home = Home.of([layouts[name][0].held for name in tasks], CLUSTER, 2)
    free = planned_runs(tasks, found, layouts, home)
    assert not free.needs_budget
    small = planned_runs(tasks, found, layouts, home, max(free.rank_bytes) - 1)
    assert small.needs_budget
    assert max(small.rank_bytes) < max(free.rank_bytes)
    assert small.ms > free.ms
    assert any("tp2" in run.option.strategy for run in small.runs)
    with pytest.raises(RunMemoryError, match=r"fit on 2 devices of 1.0 kB: the least choice takes 1MB") as told:
        planned_runs(tasks, found, layouts, home, 1000, has_budget=True)
    assert "masters, gradients, optimizer states and messages" in str(told.value)
    assert planned_runs(tasks, found, layouts, home, 1e6, has_budget=True).needs_budget
