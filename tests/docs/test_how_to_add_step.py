"""docs/how-to-add.md: a step with a front end, a planner, a cost model, a role and a pass from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxpar
from fxpar.batching import GroupCost
from fxpar.errors import (
    CostContractError,
    ParallelizeError,
)
from fxpar.losses import causal_lm
from fxpar.models import load
from fxpar.runtime.forked import run_forked
from tests.docs.extras import ROLE, module, squares
from tests.runtime.hot import largest_error, one_device, sequences

STRATEGIES = {64: "dp2", 512: ROLE}


def _train(rank: int) -> dict:
    model = load("extras:small", dtype="float64", noise=False, seed=3).model
    settings = {"strategies": STRATEGIES, "loss": causal_lm, "monitor": False, "planner": "nearest"}
    without = fxpar.compile_strategies(model, STRATEGIES, causal_lm)
    passes = module("passes")
    compiled = fxpar.compile_strategies(
        model, STRATEGIES, causal_lm, passes=lambda ladder: [*ladder[:-1], passes.SquareByMul(), passes.Apart()]
    )
    powers = [squares(program) for program in (*without.programs.values(), *compiled.programs.values())]
    alone = {name: fxpar.lower(compiled.logical, name, for_store=True) for name in compiled.programs}
    with pytest.raises(ParallelizeError, match=r"'dp2' knows nothing of documents.*compile_strategies\(passes="):
        fxpar.parallelize(model, compiled=replace(compiled, programs=alone), **settings)
    with pytest.raises(ParallelizeError, match="lowered already; give passes to"):
        fxpar.parallelize(model, compiled=compiled, passes=list, **settings)
    model = fxpar.parallelize(model, compiled=compiled, merge=False, **settings)
    report = model.train_step(sequences(0))
    grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    schedule = model.fxpar_session.engine.switching.schedule
    taken = {plan.chosen for plan in schedule._plans.values()}
    storage = model.fxpar_session.store.storage
    apart = storage.nbytes, sum(storage.strategy_bytes(name) for name in storage.views)
    orders = []
    costs = module("costs")
    for cost in (None, costs.measured, lambda program, cluster: _other(costs.measured(program, cluster), rank)):
        again = load("extras:small", dtype="float64", noise=False, seed=3).model
        again = fxpar.parallelize(again, compiled=compiled, cost=cost, **settings)
        orders.append([again.plan(sequences(0)).order, again.fxpar_session.engine.costs])
    try:
        again = load("extras:small", dtype="float64", noise=False).model
        fxpar.parallelize(again, compiled=compiled, cost=lambda program, cluster: 1.0, **settings)
    except CostContractError as error:
        said = str(error)
    found = {"loss": report.loss, "grads": grads, "taken": taken, "orders": orders, "said": said}
    return {**found, "powers": powers, "apart": apart}


def _other(cost: GroupCost, rank: int) -> GroupCost:
    """Another cost on every rank, as measuring gives it."""
    return GroupCost(cost.fixed_s + rank, cost.per_token_s, cost.per_square_s)


@pytest.fixture(scope="module")
def trained(extras: None) -> list[dict]:
    module("ops")
    return run_forked(2, _train, timeout_s=300)


def test_a_step_agrees_with_one_device(trained):
    truth = one_device(load("extras:small", dtype="float64", noise=False, seed=3).model, [sequences(0)], clip=None)
    assert trained[0]["loss"] == pytest.approx(truth["losses"][0], rel=1e-10)
    assert largest_error(trained[0]["grads"], truth["grads"]) < 1e-10
    assert trained[0]["taken"] == {"nearest"}
    assert trained[0]["powers"] == [1, 1, 0, 0]
    assert trained[0]["apart"][0] >= trained[0]["apart"][1]  # nothing is shared


def test_the_cost_model_changes_the_plan(trained):
    (usual, _), (changed, costs), _ = trained[0]["orders"]
    assert (usual, changed) == ((1,), (0, 1))  # a token under tp2 is said to take 50 times as long
    assert costs == list(module("costs").MEASURED.values())


def test_costs_of_rank_0_count_everywhere(trained):
    assert trained[1]["orders"] == trained[0]["orders"]
    assert "returned float for 'dp2'" in trained[0]["said"]
