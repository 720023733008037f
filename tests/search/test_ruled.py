"""Rules that a search finds, against every choice there is."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.strategy import Strategy
from fxpar.search.blends import Changed
from fxpar.search.chosen import lowering, problem_of
from fxpar.search.driver import _Search, find_plan, find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.layer_roles import Choice, LayerSearch
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.positions import PlannedStage, glob_of_head, globs_of_weight, of_planned
from fxpar.search.price import Depth
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Found, Problem
from fxpar.search.ruled import RuleSearch
from fxpar.search.simulate import Named, simulate
from fxpar.search.stage_options import GuessedPipeline
from fxpar.search.stage_options import planned as planned_stage
from tests.search.shallow import shallow, stack_rows

LAYERS, LONGEST = 5, 512
CLUSTER = ClusterSpec(1, 4, intra_gb_per_s=0.5, inter_gb_per_s=0.5, latency_us=100.0, device=CPU)
ANCHORS = (256, 4096)


@functools.cache
def known() -> KnownModel:
    """Of a model whose layers take most of the memory; lowered once for all tests."""
    model = shallow("llama", LAYERS)
    return KnownModel(model.lower, model.outlines, CLUSTER, Depth(LAYERS), ANCHORS)


def priced(text: str):
    found = known().candidate(Strategy.parse(text), lambda _: None)
    assert found is not None, known().refused
    return found


def between(share: float) -> int:
    """Bytes with which so much of the activations of `dp4` fit, beside what recomputation leaves."""
    most, least = (priced(text).at(LONGEST).peak_bytes for text in ("dp4", "dp4+remat"))
    return round(least + share * (most - least))


def problem(memory_bytes: int, *names: str) -> Problem:
    return Problem(
        shapes=tuple(map(Strategy.parse, names)),
        cluster=CLUSTER,
        batches=mini_batches(read_lengths(f"github:{LONGEST}"), 8192, 2),
        longest=LONGEST,
        memory_bytes=memory_bytes,
        max_strategies=1,
        depth=Depth(LAYERS),
        keep=1,
        rules=True,
    )


@functools.cache
def found() -> Found:
    """Where all layers fit only if they recompute."""
    return find_plan_of(problem(between(0.8), "dp4"), known())


def test_a_run_of_layers_wins():
    plan = found().plans[0]
    assert "[layers." in plan.strategies[0]
    assert found().best_static == plan
    assert max(plan.memory_bytes.values()) <= between(0.8)
    assert plan.predicted_s < 0.95 * found().uniform_s
    assert found().won == pytest.approx(1 - plan.predicted_s / found().uniform_s)
    assert found().uniform_bound_s <= found().uniform_s
    assert found().lower_bound_s < plan.predicted_s  # sets with rules too
    assert 0 < found().gap < 0.2
    assert found().ruled > 0


def test_it_is_simulated_as_it_was_found():
    """A set that a user names, with rules that the shallow models have no layers for."""
    given, model, plan = problem(between(0.8), "dp4"), shallow("llama", LAYERS), found().plans[0]
    pricer = SetPricer(CLUSTER, given.depth, model.outlines, given.batches, given.memory_bytes)
    one = simulate([Named.parse(plan.strategies[0])], LONGEST, model.lower, pricer)
    assert one.plan.predicted_s == pytest.approx(plan.predicted_s, rel=1e-9)


@pytest.mark.nightly
def test_no_number_of_layers_is_better():
    """All numbers of each kind, planned as sets are."""
    plan, layers = found().plans[0], known().layers
    search = _Search(problem(between(0.8), "dp4"), known(), lambda _: None)
    search.lower_all()
    search.pricer.optimizer_s = plan.optimizer_s
    assert layers is not None
    every = []
    levels = [one.strategy for one in search.candidates if one.strategy.zero == 0]
    for less, more in itertools.combinations(levels, 2):
        for count in range(1, LAYERS):
            stage = PlannedStage((more, less), (count, LAYERS - count))
            one = priced(str(of_planned([stage], "1f1b", layers)))
            every.append(search.pricer.price([(LONGEST, one)], settle=True))
    best = min(one.predicted_s for one in every if one is not None)
    assert plan.predicted_s == pytest.approx(best, rel=1e-9)


def test_stages_that_differ_are_simulated():
    """Not as if all were the slowest: here the first, with four of five layers. Without stages it is as planned."""
    given, model = problem(between(2.0), "dp4"), shallow("llama", LAYERS)
    pricer = SetPricer(CLUSTER, given.depth, model.outlines, given.batches, given.memory_bytes)
    found = [pricer.price([(LONGEST, priced(text))], settle=True) for text in ("dp2.pp2+cut(layers.4)", "dp4")]
    assert all(one is not None for one in found)
    staged, whole = found
    assert 0.5 * staged.predicted_s < staged.simulated_s < 0.99 * staged.predicted_s
    assert whole.simulated_s == whole.predicted_s


def test_without_rules_nothing_has_them():
    one = find_plan_of(replace(problem(between(0.8), "dp4"), rules=False), known())
    assert "[" not in one.plans[0].strategies[0]
    assert (one.plans[0].predicted_s, one.won, one.ruled) == (one.uniform_s, 0.0, 0)
    assert one.lower_bound_s == one.uniform_bound_s


def test_where_all_fits_no_rule_is_better():
    """`dp4` sends nothing and recomputes nothing."""
    one = find_plan_of(problem(10**11, "dp4"), known())
    assert (one.plans[0].strategies, one.plans[0].predicted_s) == (("dp4",), one.uniform_s)
    assert one.ruled == 0


@pytest.mark.parametrize("names", [("*.attention", "*.ffn")])
def test_two_changes_take_what_each_takes(names):
    """The guess at two rules at once, against the program that has both."""
    first, second = (f"{name}: {roles}" for name, roles in zip(names, ("cp2.tp2+sp", "cp4"), strict=True))
    alone, both = priced("tp4+sp"), priced(f"tp4+sp[{first}; {second}]")
    guess = Changed(
        both.strategy, CLUSTER, alone.anchors, alone, (priced(f"tp4+sp[{first}]"), priced(f"tp4+sp[{second}]"))
    )
    assert guess.cost.seconds([LONGEST]) == pytest.approx(both.cost.seconds([LONGEST]), rel=0.02)
    assert guess.memory(LONGEST).peak_bytes == pytest.approx(both.memory(LONGEST).peak_bytes, rel=0.05)
    assert guess.reduce_s == pytest.approx(both.reduce_s, rel=0.05)


def test_a_mixture_takes_what_its_layers_take():
    """Of kinds whose roles differ, between programs in which all layers are of one kind; a border comes on top."""
    alone, other, layers = priced("tp4+sp"), priced("tp4+sp[*.attention: cp2.tp2+sp]"), known().layers
    assert layers is not None
    search = LayerSearch(known(), [alone], [], (), layers, lambda _: None)
    stage = search._stage([Choice(alone, np.zeros(3)), Choice(other, np.ones(3))], (), 1)
    search._borders[alone.strategy, other.strategy] = Polynomial(Fraction(1))

    def mixed(*counts: int) -> GuessedPipeline:
        pairs = ((search._with_borders(stage), counts),)
        return GuessedPipeline(alone.strategy, CLUSTER, alone.anchors, pairs, alone)

    for counts, whole in (((LAYERS, 0), alone), ((0, LAYERS), other)):
        assert mixed(*counts).cost.seconds([LONGEST]) == pytest.approx(whole.cost.seconds([LONGEST]), rel=0.01)
        assert mixed(*counts).reduce_s == pytest.approx(whole.reduce_s, rel=1e-9)
        assert mixed(*counts).memory(LONGEST).peak_bytes == pytest.approx(whole.memory(LONGEST).peak_bytes, rel=0.02)
    ends = [mixed(*counts).cost.seconds([LONGEST]) for counts in ((LAYERS, 0), (0, LAYERS))]
    assert mixed(2, 3).cost.seconds([LONGEST]) == pytest.approx((2 * ends[0] + 3 * ends[1]) / LAYERS + 1.0, rel=1e-9)
    assert str(of_planned([planned_stage(stage, (2, 3))], "1f1b", layers)) == (
        "tp4+sp[layers.{2-4}.attention: cp2.tp2+sp]"
    )
    search._borders[alone.strategy, other.strategy] = Polynomial(Fraction(-9))  # a difference: more than all else
    assert mixed(2, 3).cost.fixed_s == 0


@functools.cache
def by_attention(gb_per_s: float, vocab: int = 16) -> KnownModel:
    """Two ranks; a model of attention and feed-forward, with links of such a rate."""
    lower, outlines = lowering(functools.partial(stack_rows, vocab=vocab))
    cluster = ClusterSpec(1, 2, intra_gb_per_s=gb_per_s, inter_gb_per_s=gb_per_s, latency_us=20.0, device=CPU)
    return KnownModel(lower, outlines, cluster, Depth(4), ANCHORS)


def planned(gb_per_s: float, memory_bytes: int, *names: str) -> Found:
    given, known_ = problem(memory_bytes, *names), by_attention(gb_per_s)
    batches = mini_batches(read_lengths(f"github:{LONGEST}"), ANCHORS[1], 2)
    return find_plan_of(replace(given, cluster=known_.cluster, depth=known_.depth, batches=batches), known_)


def test_bins_win_where_links_are_slow():
    """Against tokens for heads, which sends more."""
    one = planned(0.05, 10**9, "cp2")
    assert one.plans[0].strategies == ("tp2+sp[*.attention: rows2; *.ffn: cp2]",)
    assert one.won > 0.25


def test_bins_that_do_not_hold_the_longest_are_not_tried():
    """There is room for 700 tokens, and the two bins of a micro-batch need 512 each."""
    alone = by_attention(0.05).candidate(Strategy.parse("tp2+sp"), lambda _: None)
    assert alone is not None
    one = planned(0.05, alone.at(700).peak_bytes, "tp2+sp")
    assert one.won > 0.1
    assert "rows" not in one.plans[0].strategies[0]


def test_the_head_may_run_in_chunks():
    """It alone, beside any role."""
    one, layers = priced("tp4+sp"), known().layers
    assert layers is not None
    search = RuleSearch(known(), None, [one], lambda _: None)  # type: ignore[arg-type]
    head, layouts = glob_of_head(one, layers), [(("tp", 4),), (("cp", 4),)]
    every = [
        str(rule)
        for glob in globs_of_weight(one, layers, 0.0)
        for rule in search._rules(one.strategy, glob, layouts, 4 * (glob == head))
    ]
    in_chunks = {"head: +chunks(4)", "head: +zero3+chunks(4)", "head: cp4+chunks(4)", "head: cp4+zero3+chunks(4)"}
    assert {rule for rule in every if "chunks" in rule} == in_chunks
    assert len(every) == len(set(every))


def test_bins_have_room_where_the_head_runs_in_chunks():
    """A mini-batch fits as it is, but not two bins for its longest sequence, beside logits."""
    known_ = by_attention(0.05, 2048)
    alone = known_.candidate(Strategy.parse("tp2+sp"), lambda _: None)
    assert alone is not None
    given = problem(alone.at(930).peak_bytes, "tp2+sp")
    batches = ((512, 388), (500, 400))
    one = find_plan_of(replace(given, cluster=known_.cluster, depth=known_.depth, batches=batches), known_)
    (name,) = one.plans[0].strategies
    rules = {rule.glob: rule for rule in Strategy.parse(name).rules}
    assert (Strategy.parse(name).chunks, rules["*.attention"].axes) == (1, (("rows", 2),))
    assert (rules["head"].chunks or 1) > 1
    assert one.plans[0].memory_bytes[name] <= given.memory_bytes


def test_layers_that_save_are_found_by_their_programs():
    """Where each other search of rules finds nothing: guesses at stages know no layer that gathers beside one that
    computes again.
    """
    fast = by_attention(0.05)
    known_ = KnownModel(fast.lower, fast.outlines, fast.cluster, fast.depth, (32, 1024))
    most, least = (known_.candidate(Strategy.parse(one), lambda _: None) for one in ("dp2", "dp2+zero3"))
    assert most is not None
    assert least is not None
    room = least.at(64).peak_bytes + round(0.85 * (most.at(64).peak_bytes - least.at(64).peak_bytes))
    given = replace(problem(room, "dp2"), longest=64, cluster=known_.cluster, depth=known_.depth)
    one = find_plan_of(replace(given, batches=((64,) * 4, (48,) * 6)), known_)
    assert one.plans[0].strategies == ("dp2+remat[layers.3: +remat(none)]",)
    assert one.won > 0.02


@pytest.mark.nightly
def test_layers_save_beside_roles(monkeypatch):
    """One layer computes again, and feed-forwards cut tokens; better than what is found without."""
    with_layers = planned(0.05, 5_500_000, "tp2+sp").plans[0]
    monkeypatch.setattr(LayerSearch, "proposals", lambda *_: iter(()))
    without = planned(0.05, 5_500_000, "tp2+sp").plans[0]
    assert with_layers.strategies == ("tp2+sp[*.ffn: cp2; layers.0: +remat]",)
    assert with_layers.predicted_s < 0.95 * without.predicted_s


@pytest.mark.nightly
def test_bins_are_not_taken_where_links_are_fast():
    """Bins are filled unevenly."""
    assert planned(50.0, 10**9, "cp2").plans[0].strategies == ("cp2",)


@pytest.mark.nightly
def test_experts_apart_win_where_links_are_slow():
    """Against weights that are reduced, and activations that are gathered."""
    model = shallow("mixture", LAYERS)
    cluster = ClusterSpec(1, 2, intra_gb_per_s=0.05, inter_gb_per_s=0.05, latency_us=20.0, device=CPU)
    given = problem_of(model.rows, model.depth, cluster, [[64] * 8, [48] * 12], 64, None)
    one = find_plan(
        replace(given, shapes=(Strategy.parse("cp2"),), max_strategies=1, rules=True), model.lower, model.outlines
    )
    assert "*.ffn: ep2" in one.plans[0].strategies[0]
    assert one.won > 0.3
