"""What a run of tasks holds and moves: as lowered programs and the runtime have it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.lowering import lower
from fxpar.memory import predict_memory
from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.store import home_layout, memory_report, specs_of, wire_layout
from fxpar.switch import layout_of
from fxpar.switch.node_first import cheapest_reduction
from fxpar.switch.order import SwitchSchedule
from fxpar.switch.terms import gradient_placements
from fxpar.tasks.held import Held, Home, on_rank
from fxpar.tasks.runs import _cheapest_order, rank_bytes
from fxpar.waves.runs import Option, RunPlan, TaskRun
from tests.tasks.towers import step

CLUSTER = ClusterSpec(2, 2, 100.0, 10.0, 10.0, device=Device(10.0, 1000.0, 4.0))


@pytest.fixture(scope="module")
def programs():
    return {name: lower(step("text").logical, name, for_store=True) for name in ("dp1", "cp2", "dp2.cp2", "dp4")}


@pytest.mark.parametrize(("one", "replicas", "all_of_it"), [("cp2", 2, "dp2.cp2"), ("dp1", 4, "dp4")])
def test_replicas_hold_what_programs_with_them_hold(programs, one, replicas, all_of_it):
    made, lowered = Held.of(programs[one]).placed(replicas), Held.of(programs[all_of_it])
    assert dict(made.weights) == dict(lowered.weights)
    assert dict(made.gradients) == dict(lowered.gradients)
    assert made.held_bytes == lowered.held_bytes
    assert made.active_bytes == pytest.approx(lowered.active_bytes, rel=0.02)


def test_moving_takes_what_the_runtime_predicts(programs):
    """Two tasks in a row on four ranks: the second one finds weights where the first has left them."""
    tasks = {"dp4": programs["dp4"], "dp2.cp2": programs["dp2.cp2"]}
    held = [Held.of(one) for one in tasks.values()]
    specs = specs_of(tasks.values())
    home = home_layout(specs, 4)
    schedule = SwitchSchedule(
        {n: layout_of(p, n) for n, p in tasks.items()}, wire_layout(home, specs), CLUSTER, resident=tuple(tasks)
    )
    expected = []
    for number, (name, program) in enumerate(tasks.items()):
        gradients = gradient_placements(program)
        leaving = cheapest_reduction(gradients, home.only(gradients), CLUSTER, sums_bytes=STAGING_BYTES)
        expected.append(1e3 * (schedule.plan(name, list(tasks)[:number]).predicted_s + leaving.predicted_s))
    found = Home.of(held, CLUSTER, 4)
    assert found.moved_ms(held) == pytest.approx(expected, rel=1e-9)
    assert found.moved_ms(held)[1] < found.moved_ms(held, stay=False)[1]


def test_tasks_run_in_the_order_in_which_weights_need_not_come_twice(programs):
    """Four ranks have all weights; then one of them alone needs none."""
    held = [Held.of(programs["dp1"]), Held.of(programs["dp4"])]
    home = Home.of(held, CLUSTER, 4)
    one, both = (TaskRun(name, tuple(range(n)), Option(n, 1.0, f"dp{n}")) for name, n in (("one", 1), ("all", 4)))
    weights_ms = home.weights_ms([[task] for task in held])
    assert _cheapest_order(RunPlan(4, ((one,), (both,)), 2.0), weights_ms) == (1, 0)
    saved_ms = sum(home.moved_ms(held)) - sum(home.moved_ms(held[::-1]))
    assert saved_ms > 0
    assert weights_ms((0, 1)) - weights_ms((1, 0)) == pytest.approx(saved_ms, rel=1e-9)
    parts = RunPlan(4, ((one,), (both,), (replace(one, task="other"),)), 3.0)
    assert _cheapest_order(parts, lambda order: float(order[1] == 1)) == (0, 1, 2)  # a run would join the two


def test_bytes_are_those_of_the_memory_report(programs):
    program = programs["dp2.cp2"]
    home = Home.of([held := Held.of(program)], CLUSTER, 4)
    report = memory_report({"": program}, home.masters, range(4))
    one = predict_memory(program, micro_batches=2, cluster=CLUSTER)
    assert held.held_bytes == report.gradient_bytes + one.weight_bytes
    assert home.optimizer_bytes == one.optimizer_bytes
    stays = report.home_bytes + report.home_gradient_bytes + one.optimizer_bytes
    assert home.nbytes == stays + one.staging_bytes + one.sums_bytes


def test_ranks_begin_anywhere(programs):
    held = Held.of(programs["cp2"]).placed(first=2)
    assert held.meshes[0].ranks == (2, 3)
    assert all(one.dist.mesh.ranks == (2, 3) for terms in held.gradients.values() for one in terms)
    assert held.held_bytes == Held.of(programs["cp2"]).held_bytes


def test_weights_that_lie_alike_are_held_once_and_others_may_take_turns(programs):
    """`dp4` and `dp2.cp2` have all weights on each rank, ranks 0 and 1 have those of a third task cut."""
    whole, alike = Held.of(programs["dp4"]), Held.of(programs["dp2.cp2"])
    cut = Held.of(lower(step("text").logical, "tp2+sp", for_store=True))
    home = Home.of([whole], CLUSTER, 4)
    weights, sums = (sum(on_rank(one, 0).values()) for one in (whole.weights, whole.sums))
    mine, of_it = (sum(on_rank(one, 0).values()) for one in (cut.weights, cut.sums))
    known = on_rank(whole.weights, 0)  # norms are not cut
    more = sum(size for piece, size in on_rank(cut.weights, 0).items() if piece not in known)
    assert 0 < more < mine
    active = max(whole.active_bytes, cut.active_bytes)

    def held(waves, stay):
        return [one - home.nbytes for one in rank_bytes(waves, home, stay)]

    assert held([[whole], [alike]], True)[0] == weights + sums + max(whole.active_bytes, alike.active_bytes)
    assert (
        held([[whole], [cut]], True) == [weights + more + sums + active] * 2 + [weights + sums + whole.active_bytes] * 2
    )
    assert held([[whole], [cut]], False)[0] == max(weights, mine) + max(sums, of_it) + active
    assert held([[whole, cut]], True)[0] == weights + more + sums + of_it + active  # their gradients leave together
