"""`parallelize(plan=...)`: strategies and budgets of a plan, and plans that are for something else."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar
from fxpar.cost.cluster import usual_cluster
from fxpar.errors import FxparError, LengthsError, ParallelizeError, PlanFileError
from fxpar.ir.strategy import Strategy
from fxpar.models.builtin import packed_lm_loss
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.runtime.auto import Search
from fxpar.runtime.compiling import capture_step
from fxpar.runtime.planned import parameters_of
from fxpar.search.lengths import as_lengths
from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.search.price import Depth, candidate
from fxpar.search.pricing import PricedGroup, PricedSet, SetPricer
from fxpar.search.problem import Found
from tests.runtime.hot import Small, World, compiled, precompile, sequences, small

TWO = {64: "dp2", 512: "tp2+sp"}
COUNT = parameters_of(small())
PLAN = Plan("small", 2, 4096, (PlanGroup(64, "dp2", 128), PlanGroup(512, "tp2+sp", 600)), parameters=COUNT)
PAIR = World(2, lambda: precompile(small, TWO))


def told(model):
    """What a session does with a plan: groups with their budgets, and the loss of a mini-batch."""
    groups = [(g.limit, str(g.strategy), g.token_budget) for g in model.fxpar_session.engine.groups]
    return groups, model.fxpar_session.options.memory_budget_bytes, model.train_step(sequences(3)).loss


def planned(**options):
    more = {"loss": packed_lm_loss, "merge": False, "monitor": False, "compiled": compiled(small, TWO.values())}
    return {**more, **options}


@PAIR.case
def of_an_object(rank):
    plan = replace(PLAN, memory_budget_bytes=10**9)
    model = fxpar.parallelize(small(), plan=plan, **planned())
    assert model.fxpar_session.options.plan is plan
    return told(model)


@PAIR.case
def of_a_file(rank):
    file = Path(tempfile.mkdtemp(prefix="fxpar-test-")) / "plan.toml"
    file.write_text(PLAN.to_toml())

    @fxpar.parallelize(plan=file, memory_budget_bytes=10**8, **planned())
    class Here(Small):
        def __init__(self) -> None:
            super().__init__()
            self.double()

    return told(Here())


@PAIR.case
def by_hand(rank):
    budgets = {64: 128, 512: 600}
    return told(fxpar.parallelize(small(), strategies=TWO, token_budget=budgets, **planned()))


@PAIR.case
def of_unlike_machines(rank):
    """To rank 1 a switch seems to take forever: by itself it would let all groups join."""
    slow = fxpar.Device(tflops=1e-6, memory_gb_per_s=1.0, launch_us=0.0)
    cluster = fxpar.ClusterSpec(1, 2, 1e-6 if rank else 100.0, inter_gb_per_s=1.0, latency_us=0.0, device=slow)
    model = fxpar.parallelize(small(), plan=PLAN, **planned(merge=True, cluster=cluster))
    report = model.train_step(sequences(3))
    return model.fxpar_session.engine.cluster, [group.limit for group in report.groups], report.loss


@PAIR.case
def of_another_world(rank):
    plan = replace(PLAN, world=4, groups=(PlanGroup(64, "dp4", 64),))
    with pytest.raises(PlanFileError, match="it is for 4 ranks, not 2"):
        fxpar.parallelize(small(), plan=plan, **planned())


NODES = fxpar.ClusterSpec(2, 1, 1.0, inter_gb_per_s=1e-3, latency_us=10.0, device=fxpar.Device(1e-3, 1.0, 1.0))
BATCH = (5, 60, 33, 130, 8)


@PAIR.case
def of_links_between_nodes(rank):
    model = fxpar.parallelize(small(), plan=PLAN, **planned(cluster=NODES))
    found = model.plan(sequences(3, BATCH))
    return found.switch_s, found.predicted_s


AUTO = {"strategies": "auto", "lengths": [5, 60, 33, 300], "tokens_per_step": 900}


def automatic(**options):
    return fxpar.parallelize(small(), **{"loss": packed_lm_loss, "merge": False, "monitor": False, **AUTO, **options})


@PAIR.case
def of_a_search(rank):
    lengths = AUTO["lengths"] if rank == 0 else [999]  # what rank 0 finds counts on all
    model = automatic(lengths=lengths)
    plan = model.fxpar_session.options.plan
    loss = model.train_step(sequences(3)).loss
    groups = [(g.limit, str(g.strategy), g.token_budget) for g in model.fxpar_session.engine.groups]
    return plan, groups, loss


@PAIR.case
def of_a_search_in_vain(rank):
    try:
        automatic(memory_budget_bytes=1000)
    except FxparError as error:
        return type(error).__name__, str(error)


def test_a_set_is_priced_as_an_engine_predicts_it():
    """Borders of one strategy, whose gradients leave one by one, too."""
    programs = compiled(small, TWO.values()).programs

    def lowered(strategy, layers):
        return programs[str(strategy)]

    pricer = SetPricer(NODES, Depth(1, whole=True), lowered, (BATCH,), None, overlap=True)
    chosen = [
        (group.limit, candidate(lowered, Strategy.parse(group.strategy), NODES, pricer.depth, (64, 512)))
        for group in PLAN.groups
    ]
    found = pricer.price(chosen)
    assert (found.exposed_s, found.predicted_s) == pytest.approx(of_links_between_nodes()[0], rel=1e-9)


def test_a_search_chooses_the_same_on_all_ranks():
    (plan, groups, loss), other = of_a_search()
    assert other == (plan, groups, loss)
    assert (plan.world, plan.tokens_per_step, plan.parameters) == (2, 900, COUNT)
    assert plan.predicted_s >= plan.lower_bound_s > 0
    assert plan.groups[-1].limit == 300
    assert groups == [(g.limit, g.strategy, g.token_budget) for g in plan.groups]
    assert loss == pytest.approx(by_hand()[0][2])


def test_a_search_that_finds_nothing_ends_all_ranks():
    first, second = of_a_search_in_vain()
    assert first[0] == "SequenceFitsNowhereError"
    assert second == ("AutoStrategiesError", f"rank 0 chose no strategies: {first[0]}: {first[1]}")


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"strategies": "atuo"},
            ParallelizeError,
            "strategies='atuo' is not a dict of strategies; did you mean 'auto'",
        ),
        ({"strategies": "dp2"}, ParallelizeError, r"the longest length that it is for, such as \{4096: 'dp2'\}"),
        ({"lengths": None}, ParallelizeError, 'strategies="auto" needs lengths=. Give both'),
        ({"tokens_per_step": None}, ParallelizeError, "needs tokens_per_step=. Give both"),
        ({"tokens_per_step": 0}, ParallelizeError, "tokens_per_step=0 is not a number of tokens above 0"),
        ({"strategies": TWO}, ParallelizeError, 'lengths= is for strategies="auto"'),
        ({"order": ["dp2"]}, ParallelizeError, "order= needs strategies that are known"),
        ({"token_budget": 64}, ParallelizeError, "token_budget= needs strategies that are known"),
        ({"plan": PLAN}, ParallelizeError, "plan= says strategies already"),
        ({}, ParallelizeError, "torch.distributed is not initialised"),
    ],
)
def test_bad_searches_are_named_before_anything_is_done(options, error, why):
    with pytest.raises(error, match=why):
        fxpar.parallelize(nn.Linear(5, 3), **{**AUTO, **options})


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([], "'lengths=': has no lengths"),
        ([5, -1], "has -1 as length 2"),
        ([5, 1.5], "has 1.5 as length 2"),
        (3, "holds a int, not a list"),
        ("nothing.txt", "there is no such file or folder"),
        ("githb:64", "did you mean 'github'"),
        ("/:64", "is a corpus, .* Give the numbers"),
    ],
)
def test_bad_lengths_are_named(lengths, why):
    with pytest.raises(LengthsError, match=why):
        as_lengths(lengths)


def test_strategies_and_budgets_are_those_of_the_plan():
    groups = [(64, "dp2", 128), (512, "tp2+sp", 600)]
    (first, budget, loss), (decorated, own, other), (hand, _, third) = (
        case()[0] for case in (of_an_object, of_a_file, by_hand)
    )
    assert first == decorated == hand == groups
    assert (budget, own) == (10**9, 10**8)  # what the user says of memory goes first
    assert loss == other == third


def test_ranks_that_see_unlike_machines_plan_for_that_of_rank_0():
    first, second = of_unlike_machines()
    assert first == second
    assert first[0].intra_gb_per_s == 100.0
    assert first[1] == [64, 512]


def test_a_plan_for_other_ranks_is_refused():
    of_another_world()


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"strategies": TWO}, ParallelizeError, "plan= says strategies already: leave out strategies="),
        ({"token_budget": 64}, ParallelizeError, "plan= says token_budget already: leave out token_budget="),
        ({"plan": 3}, ParallelizeError, "plan=3 is not a file of `fxpar plan`, or a Plan"),
        ({"plan": "none.toml"}, PlanFileError, "'none.toml': it cannot be read"),
        ({}, PlanFileError, f"for small with {COUNT:,} parameters, and this model has 18"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_done(options, error, why):
    with pytest.raises(error, match=why):
        fxpar.parallelize(nn.Linear(5, 3), **{"plan": PLAN, **options})


def test_a_class_is_refused_where_it_is_decorated():
    with pytest.raises(ParallelizeError, match="leave out strategies="):
        fxpar.parallelize(plan=PLAN, strategies=TWO)


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, "dp2"), (0.97, "dp2"), (0.9, "tp2+sp")])
def test_several_strategies_must_be_worth_it(seconds, chosen, monkeypatch):
    """The set is predicted to take this share of the time of `dp2` alone."""

    def priced(time: float, *strategies: str) -> PricedSet:
        groups = tuple(PricedGroup(64 * 4**i, one, 512, time, 0.0, time, 1.0, time) for i, one in enumerate(strategies))
        return PricedSet(groups, time, 0.0, 0.0, 0.0, 0.0, {one: {} for one in strategies}, 0)

    one, several = priced(1.0, "dp2"), priced(seconds, "tp2+sp", "dp2")
    found = Found((several,), one, 0.5, 0.5, seconds, 9, 0, 1, {}, 0.1)
    rows = packed_if_proved(capture_step(small(), packed_lm_loss, None))[0]
    monkeypatch.setattr("fxpar.runtime.auto.searched", lambda *args: found)
    cluster = usual_cluster(2, 2, "cpu")
    plan = Search(
        "small", lambda _: rows, Depth(1, whole=True), [[9, 60]], 64, 100, 2, torch.device("cpu"), cluster=cluster
    ).plan()
    assert plan.groups[0].strategy == chosen
    assert plan.predicted_s == (seconds if chosen == "tp2+sp" else 1.0)
