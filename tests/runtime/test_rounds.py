"""Rounds that are chosen for each mini-batch: whatever runs where, gradients are those of one device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from fxpar.ir.teams import formations
from fxpar.runtime.engine import Replanned
from fxpar.runtime.forked import run_forked
from tests.repeat import examples
from tests.runtime.hot import largest_error, make_llama, one_device, parallel, precompile, sequences, shallow

WRITTEN = ("cp2.tp2+sp", "ring3+tokens(140)", "tp2+sp+chunks(2)+tokens(100)", "dp1+remat+tokens(48)[head: +chunks(2)]")
STRATEGIES = {"cut from one": {192: "rounds(cp4)"}, "written": {192: f"rounds({', '.join(WRITTEN)})"}}
LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2, 21, 7, 30)
PLANS = min(20, examples(35))  # seven by day, of each
THIRDS = {"cut from one": {192: "rounds(cp6)"}, "in step": {192: "rounds(cp6+zero3)"}}  # of six ranks: 6, 3, 2 and 1
Steps = list[tuple[list[str], float, dict[str, Any]]]


def six_heads() -> Any:
    return make_llama(layers="1", dim="48", heads="6", kv_heads="6")


def under_random_plans(rank: int) -> dict[str, tuple[Steps, int]]:
    return {what: _steps(shallow, strategies) for what, strategies in STRATEGIES.items()}


def on_six_ranks(rank: int) -> dict[str, tuple[Steps, int]]:
    return {what: _steps(six_heads, strategies) for what, strategies in THIRDS.items()}


def _steps(make: Callable[[], Any], strategies: dict[int, str]) -> tuple[Steps, int]:
    """The same mini-batch with the same weights in different plans: those for random limits, with random costs. With
    the number of process groups that this rank has then.
    """
    model, batch = parallel(make, strategies=strategies, merge=True), sequences(3, LENGTHS)
    engine, rng, found = model.fxpar_session.engine, random.Random(7), []
    seen: set[str] = set()
    while len(seen) < PLANS:
        *shorter, longest = (group.limit for group in engine.opened)
        limits = sorted(int(limit * rng.uniform(0.2, 1)) for limit in shorter)
        factors = tuple(10 ** rng.uniform(-1, 1) for _ in engine.opened)
        engine.replan(Replanned((*limits, longest), factors, 10 ** rng.uniform(-3, 0)))
        plan = model.plan(batch)
        if plan.fingerprint() in seen:
            continue
        seen.add(plan.fingerprint())
        report = model.train_step(batch)
        grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        found.append(([group.strategy for group in report.groups], report.loss, grads))
        model.zero_grad()
    return found, model.fxpar_session.ground.process_groups.count


@pytest.fixture(scope="module")
def by_rank():
    for strategies in STRATEGIES.values():
        precompile(shallow, strategies)
    return run_forked(4, under_random_plans)


@pytest.fixture(scope="module")
def ran(by_rank):
    return {what: steps for what, (steps, _) in by_rank[0].items()}


@pytest.fixture(scope="module")
def want():
    return one_device(shallow(), [sequences(3, LENGTHS)], clip=None)


@pytest.mark.parametrize("what", STRATEGIES)
def test_no_plan_changes_a_gradient(ran, want, what):
    assert len(ran[what]) == PLANS
    for _, loss, grads in ran[what]:
        assert loss == pytest.approx(want["losses"][0], rel=1e-12)
        assert largest_error(grads, want["grads"]) <= 1e-10


@pytest.mark.parametrize(("what", "strategies"), STRATEGIES.items())
def test_plans_have_all_rounds(ran, what, strategies):
    """Several in one mini-batch, and every formation of four ranks in some plan."""
    rounds = [names for names, *_ in ran[what]]
    assert max(map(len, rounds)) >= 2
    assert {name for names in rounds for name in names} == set(map(str, formations(strategies[192])))


@pytest.mark.nightly
def test_degrees_that_are_no_powers_of_two():
    """Six, three, two and one of six ranks; at most one process group for each size of team and rank, and one beside.
    In step, gathers are of replicas on all ranks.
    """
    for strategies in THIRDS.values():
        precompile(six_heads, strategies)
    by_rank = run_forked(6, on_six_ranks)
    want = one_device(six_heads(), [sequences(3, LENGTHS)], clip=None)
    for what, strategies in THIRDS.items():
        steps = by_rank[0][what][0]
        assert len(steps) == PLANS
        for _, loss, grads in steps:
            assert loss == pytest.approx(want["losses"][0], rel=1e-12)
            assert largest_error(grads, want["grads"]) <= 1e-10
        assert max(len(names) for names, *_ in steps) >= 2
        assert len({name for names, *_ in steps for name in names}) > len(formations(strategies[192])) // 2
    assert max(found["cut from one"][1] for found in by_rank) <= 4


def test_few_process_groups(by_rank):
    """Of two ranks, of four, and one more for what runs beside: none of replicas."""
    assert {found["cut from one"][1] for found in by_rank} == {math.log2(4) + 1}
