"""What savings take at least against strategies that are lowered; searches that put some off against all of it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU
from fxpar.ir.strategy import Strategy
from fxpar.search.driver import _Search, find_plan_of
from fxpar.search.floors import Floor, again_s
from fxpar.search.known import KnownModel
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.price import Candidate, candidate
from fxpar.search.problem import Problem
from fxpar.search.space import SAVINGS, with_savings
from fxpar.search.staged import StagedGuess
from fxpar.search.variants import Variants
from tests.repeat import thinned
from tests.search.shallow import shallow

CLUSTER = ClusterSpec(1, 2, intra_gb_per_s=0.05, inter_gb_per_s=0.05, latency_us=100.0, device=CPU)
ROWS, LONGEST = shallow("stack", 8), 512


def problem(memory_bytes: int | None) -> Problem:
    return Problem(
        shapes=tuple(map(Strategy.parse, ("dp2", "tp2+sp", "pp2"))),
        cluster=CLUSTER,
        batches=tuple(mini_batches(read_lengths(f"github:{LONGEST}"), 4000, 2)),
        longest=LONGEST,
        memory_bytes=memory_bytes,
        max_strategies=2,
        depth=ROWS.depth,
        keep=1,
    )


@functools.cache
def known() -> KnownModel:
    """Lowered once for all tests."""
    return problem(None).known(ROWS.lower, ROWS.outlines)


def priced(strategy: Strategy | str) -> Candidate:
    found = known().candidate(Strategy.parse(strategy) if isinstance(strategy, str) else strategy, lambda _: None)
    assert found is not None
    return found


@pytest.mark.parametrize("slowdown", [None, 1.0])
def test_no_savings_take_less(slowdown: float | None):
    """Full recomputation about a third more, and ZeRO-3 what the links need, where kernels hide none of it."""
    cluster = replace(CLUSTER, device=replace(CPU, overlap_slowdown=slowdown))
    base = replace(priced("dp2"), cluster=cluster)
    took = {}
    for level in range(1, len(SAVINGS)):
        strategy = with_savings(base.strategy, level)
        lowered = replace(priced(strategy), cluster=cluster)
        floor = Floor(strategy, cluster, base.anchors, base, again_s(base))
        least, cost = floor.cost, lowered.cost
        assert least.fixed_s <= cost.fixed_s
        assert least.per_token_s <= cost.per_token_s * (1 + 1e-9)
        assert least.per_square_s <= cost.per_square_s * (1 + 1e-9)
        for tokens in (256, 4096):
            assert all(a <= b for a, b in zip(floor.at(tokens).columns, lowered.at(tokens).columns, strict=True))
        took[level] = least.seconds([LONGEST]) / base.cost.seconds([LONGEST])
    assert took[1] == 1.0
    assert took[2] > (1.2 if slowdown is None else 0.99)
    assert took[3] > 1.15


def test_the_plans_are_those_of_a_search_that_puts_nothing_off(monkeypatch):
    """With memory that all but full recomputation is short of, and with some more."""
    sizes = [int(share * priced("tp2+sp").memory(LONGEST).peak_bytes) for share in (0.9, 1.2)]
    fewer = [find_plan_of(problem(size), known()) for size in sizes]
    monkeypatch.setattr(_Search, "_may_help", lambda *of: True)
    for size, found in zip(sizes, fewer, strict=True):
        every = find_plan_of(problem(size), known())
        assert found.pruned > 0 == every.pruned
        assert found.evaluated < every.evaluated
        assert (found.plans, found.best_static, found.lower_bound_s) == (
            every.plans,
            every.best_static,
            every.lower_bound_s,
        )


def test_budgets_are_those_of_each_limit_alone():
    one, edges = priced("dp2"), (64, 128, 256, LONGEST)
    for share in (0.7, 1.0, 2.0):
        pricer = _Search(problem(int(share * one.memory(LONGEST).peak_bytes)), known(), lambda _: None).pricer
        found = pricer.budgets(one, edges)
        assert found == [pricer.budgets(one, [edge])[0] for edge in edges]
        assert (found[-1] is None) == (share < 1)
        assert found[0] is not None


def test_a_variant_that_is_guessed_to_be_slower_is_not_lowered(monkeypatch):
    """With all activations on the host it is; with a quarter of them it may win as long as none is fast enough, and as
    long as it is faster than what is guessed of the strategy itself.
    """
    asked, pipeline = [], Strategy.parse("pp2+remat")

    def guess(times: float) -> StagedGuess:
        found = StagedGuess(pipeline, CLUSTER, known().anchors, priced("dp2+remat"))
        found.__dict__["cost"] = found.cost.times(times)
        return found

    variants = Variants(known(), _Search(problem(None), known(), lambda _: None).pricer, lambda _: None)
    monkeypatch.setattr(KnownModel, "guessed", lambda self, text, said: asked.append(text) or guesses[str(text)])
    guesses = {"pp2": guess(0.5), "pp2+offload": guess(2.0), "pp2+remat": guess(1.0)}
    chosen, offloaded = [(LONGEST, guess(1.0))], Strategy.parse("pp2+offload")
    took_s = variants.pricer.price(chosen).predicted_s

    def may_win(variant: Strategy) -> bool:
        return variants._may_win(variant, pipeline, chosen, took_s, took_s)

    assert may_win(offloaded)  # with a quarter of them there
    guesses["pp2+remat"] = guess(0.8)
    assert not may_win(offloaded)
    guesses |= {"pp2": guess(0.99), "pp2+remat": guess(2.0)}
    assert not may_win(offloaded)
    asked.clear()
    assert may_win(Strategy.parse("pp2+remat+zb_h1"))
    assert not asked  # its program is there


ALL_VARIANTS = [(1, 3.0, None), (2, 0.9, 1.13)]


@pytest.mark.parametrize(("most", "share", "slowdown"), thinned(ALL_VARIANTS, ALL_VARIANTS[:1]))
def test_the_plans_are_those_of_a_search_that_lowers_all_variants(monkeypatch, most, share, slowdown):
    """Under each schedule by itself, without a look at how full it is, and whatever they are guessed to take."""
    size = int(share * priced("tp2+sp").memory(LONGEST).peak_bytes)
    cluster = replace(CLUSTER, device=replace(CPU, overlap_slowdown=slowdown))
    pipeline = (Strategy.parse("pp2"),)
    asked = replace(problem(size), shapes=pipeline, max_strategies=most, cluster=cluster)
    fewer = known() if cluster == CLUSTER else asked.known(ROWS.lower, ROWS.outlines)
    found = find_plan_of(asked, fewer)
    lowered = {text: one for text, one in fewer._candidates.items() if one is None or one.alike is None}
    assert len(lowered) < len(fewer._candidates)
    monkeypatch.setattr(KnownModel, "_rescheduled", lambda *of: None)
    monkeypatch.setattr(Variants, "_is_too_full", lambda *of: False)
    monkeypatch.setattr(Variants, "_may_win", lambda *of: True)
    every = find_plan_of(asked, replace(fewer, _candidates=lowered))
    assert (found.plans, found.best_static, found.lower_bound_s) == (
        every.plans,
        every.best_static,
        every.lower_bound_s,
    )


def test_another_schedule_is_priced_from_the_same_programs():
    faster = Strategy.parse("pp2+zb_h1")
    usual, made = priced("pp2"), priced(faster)
    assert made.alike is usual
    lowered = candidate(ROWS.lower, faster, CLUSTER, ROWS.depth, known().anchors)
    assert lowered.alike is None
    assert made.cost == lowered.cost != usual.cost
    assert (made.by_position, made.reduce_s, made.reduced) == (lowered.by_position, lowered.reduce_s, lowered.reduced)
    assert (made.pace, made.sent) == (lowered.pace, lowered.sent)
    assert made.at(LONGEST) == lowered.at(LONGEST) != usual.at(LONGEST)
    assert [one.strategy for one in made.programs] == [one.strategy for one in lowered.programs]


def test_what_is_too_full_is_seen_at_one_position():
    priced("pp2")
    made = priced("pp2+zb_h1")
    held = [made.at_position(place, LONGEST) for place in range(2)]
    assert made.positions(LONGEST) == held
    fullest = made.at(LONGEST).peak_bytes
    assert fullest == max(one.peak_bytes for one in held)
    slack = abs(held[0].weight_bytes - held[1].weight_bytes)
    for size, full in ((fullest + slack - 1, False), (fullest - slack - 1, True), (None, False)):
        pricer = _Search(problem(size), known(), lambda _: None).pricer
        variants, chosen = Variants(known(), pricer, lambda _: None), [(LONGEST, made)]
        assert variants._is_too_full(made, chosen) is full
        assert not full or pricer.price(chosen, settle=True) is None
        assert not variants._is_too_full(replace(made, alike=None), chosen)


def test_sets_with_pipelines_are_chosen_by_what_they_take_under_a_faster_schedule(monkeypatch):
    """Where not all of a set fit under it, by what they take with one of them so."""
    search = _Search(problem(None), known(), lambda _: None)
    guesses = [
        StagedGuess(Strategy.parse(text), CLUSTER, known().anchors, priced("dp2")) for text in ("pp2", "pp2+remat")
    ]
    search.candidates, search.seconds = [*guesses, priced("dp2")], [search.least] * 3
    last = len(search.intervals.edges) - 1
    one, two, flat = ((last, 0),), ((last - 2, 0), (last, 1)), ((last, 2),)
    plans = {groups: search._price(groups) for groups in (one, flat)}
    assert search._at_best_s(plans[one]) < plans[one].predicted_s
    assert search._at_best_s(plans[flat]) == plans[flat].predicted_s
    price, asked = search.pricer.price, []

    def fits_one(chosen):
        asked.append(["zb_h1" in each.name for _, each in chosen])
        return None if all(asked[-1]) else price(chosen)

    monkeypatch.setattr(search.pricer, "price", fits_one)
    search.priced[two] = replace(plans[one], predicted_s=1.0)
    assert search._at_best_s(search.priced[two]) < 1.0
    assert asked == [[True, True], [True, False], [False, True]]
