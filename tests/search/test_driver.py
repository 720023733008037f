"""The search on a small model, against every set there is."""

from __future__ import annotations

import functools
import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from fxpar.batching import LengthGroup, plan_batch
from fxpar.batching.lengths import LengthLimits
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU
from fxpar.errors import NoCandidateError, NotYetError, SequenceFitsNowhereError
from fxpar.ir.strategy import Strategy
from fxpar.memory import Conditions, predict_memory, steady_micro_batches
from fxpar.models import load
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.passes.share_weights import ALIGN_BYTES
from fxpar.runtime.storage import activation_bytes
from fxpar.search import driver, pricing
from fxpar.search.bounds import least_seconds
from fxpar.search.chosen import lowering
from fxpar.search.driver import _Search, find_plan, find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.price import Candidate, Depth, Memory, candidate
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Found, Problem
from fxpar.search.space import SAVINGS
from fxpar.store import home_layout, memory_report, param_specs
from fxpar.switch import layout_of
from fxpar.tracer import capture

LINKS = ClusterSpec(1, 2, intra_gb_per_s=0.5, inter_gb_per_s=0.5, latency_us=100.0, device=CPU)
LENGTHS = read_lengths("github:512")


@functools.cache
def rows():
    model = load("llama", device="meta")
    return packed_if_proved(capture(model.model, model.loss_fn, model.example_batch))[0]


lower, outlined = lowering(lambda layers: rows())
lowered = functools.cache(lower)
TWO, FOUR = ("dp2", "cp2", "tp2+sp"), ("dp4", "dp2.cp2", "dp2.tp2+sp")


def problem(memory_bytes: int | None = 5_000_000, strategies: int = 2, names: tuple[str, ...] = TWO) -> Problem:
    return Problem(
        shapes=tuple(map(Strategy.parse, names)),
        cluster=replace(LINKS, devices_per_node=4) if names == FOUR else LINKS,
        batches=mini_batches(LENGTHS, 4096, 3),
        longest=512,
        memory_bytes=memory_bytes,
        max_strategies=strategies,
        depth=Depth(2, whole=True),
    )


@functools.cache
def known(cluster: ClusterSpec) -> KnownModel:
    """What is learnt of the model on a cluster, once: problems differ in memory, shapes and sets."""
    return replace(problem(), cluster=cluster).known(lowered, outlined)


def plan_of(given: Problem) -> Found:
    return find_plan_of(given, known(given.cluster))


def test_no_set_is_better_than_the_one_that_is_found():
    """All sets of two strategies and one edge, each planned with its borders."""
    given = problem(names=("dp2", "tp2+sp"))
    found = plan_of(given)
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    search.pricer.optimizer_s = found.plans[0].optimizer_s
    edges, best = search.intervals.edges, np.inf
    for names in itertools.product(search.candidates, repeat=2):
        for edge in edges[:-1]:
            chosen = [(edge, names[0]), (edges[-1], names[1])]
            priced = search.pricer.price(chosen)
            assert priced is None or search.pricer.at_best_s(chosen) <= priced.predicted_s
            best = min(best, priced.predicted_s if priced else np.inf)
    singles = [search.pricer.price([(edges[-1], one)]) for one in search.candidates]
    least = min(one.predicted_s for one in singles if one)
    assert found.best_static.predicted_s == pytest.approx(least, rel=1e-9)
    assert found.plans[0].predicted_s <= min(best, least) * (1 + 1e-9)
    assert found.lower_bound_s <= found.plans[0].predicted_s
    assert found.speedup >= 1.0


def test_savings_are_tried_where_they_could_help():
    """`cp2` may do without: that matters if nothing else is as fast as it would be with unlimited memory."""
    given = problem(None, names=("dp2", "cp2"))
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    shape = Strategy.parse("cp2")
    search.fastest[:] = search.least[:] = 0.0
    assert search._helpful(shape, 1) is None
    assert search.pruned == len(SAVINGS) - 1
    search.fastest[:, :, -1] = np.inf
    assert search._helpful(shape, 1) == (shape, 1)
    assert search.pruned == len(SAVINGS) - 1


def test_larger_micro_batches_are_neither_better_nor_below_the_bound():
    """Without a limit on memory; planned by the batch planner alone."""
    given = problem(None)
    found = plan_of(given)
    for name in TWO:
        one = candidate(lowered, Strategy.parse(name), given.cluster, given.depth, (64, 8192))
        group = LengthGroup(512, one.strategy, 10**6)
        plans = [plan_batch(batch, [group], [one.cost], lambda *_: 0.0) for batch in given.batches]
        took = float(np.mean([plan.predicted_s for plan in plans]))
        assert found.lower_bound_s <= took + found.plans[0].optimizer_s
        assert found.plans[0].predicted_s <= took + one.reduce_s + found.plans[0].optimizer_s + found.plans[0].exposed_s


def test_savings_are_tried_for_larger_micro_batches_too():
    """`dp2` holds every sequence, but not many of them at a time: with recomputation it is faster."""
    given = problem(7_000_000, names=("dp2",))
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    assert None not in search.pricer.budgets(search.candidates[0], search.intervals.edges)
    assert len(search.candidates) > 1


class Unknown(Candidate):
    """Of which nobody knows what it needs."""

    def predicted(self, tokens: int) -> Memory:
        raise AssertionError(tokens)


def test_what_a_set_takes_at_best_is_known_without_its_memory():
    """It is what the set takes where nobody counts memory."""
    given = problem(None)
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    edge, last = search.intervals.edges[0], search.intervals.edges[-1]
    one, other = search.candidates[:2]
    took = search.pricer.price([(edge, one), (last, other)])
    blank = [Unknown(c.strategy, c.cluster, c.anchors, c.samples, c.steps, c.programs) for c in (one, other)]
    limited = replace(search.pricer, memory_bytes=1)
    assert limited.at_best_s([(edge, blank[0]), (last, blank[1])]) == took.predicted_s
    said = replace(blank[1], strategy=replace(other.strategy, tokens=last - 1))  # holds no such sequence
    assert limited.at_best_s([(edge, blank[0]), (last, said)]) == np.inf


class Optimist(Candidate):
    """Holds all that one wants, until it is looked at."""

    def most_tokens(self, limit: int, room: int, most: int) -> int:
        return most


def test_what_was_guessed_wrong_is_taken_as_what_it_is(monkeypatch):
    """It is among the best as it was guessed, and holds none of these; what is found holds its sequences."""
    given = problem(3_000_000)
    want = plan_of(given)
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    monkeypatch.setattr(driver, "GUESSES", (Optimist,))
    search.pricer.optimizer_s = want.plans[0].optimizer_s
    for s, one in enumerate(search.candidates):
        guess = Optimist(**{each.name: getattr(one, each.name) for each in fields(one) if each.init})
        budgets = search.pricer.budgets(guess, search.intervals.edges)
        search.candidates[s] = guess
        search.seconds[s] = least_seconds(guess.cost, guess.strategy, budgets, search.intervals)
    plans, static = search._chosen()
    assert static.groups == want.best_static.groups
    assert want.plans[0].predicted_s <= plans[0].predicted_s <= static.predicted_s
    assert any(type(one) is Candidate for one in search.candidates)  # was looked at


def test_a_set_is_judged_by_the_tokens_that_it_holds(monkeypatch):
    """Between its anchors memory is a guess: what was best by it may hold fewer tokens, or not even its sequences."""
    given = problem(names=("cp2", "tp2+sp"))
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    by_guess, alone = ([search.pricer.price([(512, c)], settle=s) for c in search.candidates] for s in (False, True))
    guessed, best = (min((one for one in of if one), key=lambda one: one.predicted_s) for of in (by_guess, alone))
    assert guessed.strategies != best.strategies
    assert search.found(0.0).best_static.strategies == best.strategies

    held, refused = pricing.settled_tokens, best.strategies[0]

    def settled(one: Candidate, *of: int) -> int | None:
        return None if one.name == refused else held(one, *of)

    monkeypatch.setattr(pricing, "settled_tokens", settled)
    again = _Search(given, search.known, lambda _: None)
    again.lower_all()
    found = again.found(0.0)
    assert all(refused not in plan.strategies for plan in (found.best_static, *found.plans))


def test_each_plan_fits_and_holds_all_lengths():
    given = problem(4_000_000, 3, FOUR)
    found = plan_of(given)
    for plan in found.plans:
        assert plan.groups[-1].limit == 512
        assert all(nbytes <= given.memory_bytes for nbytes in plan.memory_bytes.values())
        for name, parts in plan.memory_parts.items():  # what they share is counted alike, and once
            assert parts["optimizer"] == plan.optimizer_bytes == parts["home"] > 0, name
            assert parts["weights"] > 0 < parts["micro_batch"], name
        assert all(group.token_budget >= group.limit for group in plan.groups)
        assert sum(group.tokens for group in plan.groups) == pytest.approx(
            sum(map(sum, given.batches)) / len(given.batches)
        )


@pytest.mark.nightly
def test_more_memory_is_never_slower():
    took = [plan_of(problem(nbytes)).plans[0].predicted_s for nbytes in (3_500_000, 6_000_000)]
    took.append(plan_of(problem(None)).plans[0].predicted_s)
    assert took == sorted(took, reverse=True)


def test_nothing_fits():
    with pytest.raises(SequenceFitsNowhereError, match=r"no strategy fits a sequence of 512 tokens into 0\.10MB"):
        plan_of(problem(100_000))


def test_the_best_single_strategy_is_the_plan_where_no_ranked_set_fits(monkeypatch):
    """Memory for it alone, and none for the weights and messages of any other beside it."""
    ranked = driver.ranked_sets
    monkeypatch.setattr(driver, "ranked_sets", lambda *given: ranked(*given) if given[3] == 1 else [])
    found = plan_of(problem())
    assert found.plans == (found.best_static,)


def test_a_model_that_runs_under_nothing():
    def refuse(strategy: Strategy, layers: int):
        raise NotYetError("this", "that")

    with pytest.raises(NoCandidateError, match=r"dp2: .*this"):
        find_plan(problem(), refuse, outlined)


def test_plans_that_refining_makes_alike_are_one(monkeypatch):
    """What saves memory or permutes ranks may leave one strategy of two: it is a plan once, and the best alone."""
    best = plan_of(problem(strategies=1)).plans[0]
    slower = replace(best, predicted_s=2 * best.predicted_s, groups=(replace(best.groups[0], strategy="tp2+sp"),))
    monkeypatch.setattr(_Search, "_refined", lambda self, groups, rules: best if len(groups) > 1 else slower)
    found = plan_of(problem())
    assert (found.plans, found.best_static) == ((best, slower), best)


def test_a_schedule_that_waits_less_is_found():
    """With memory for both, the one that fills its pipeline faster; it needs more."""
    given = problem(None, 1, names=("pp2",))
    found = plan_of(given)
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    (one,) = search.candidates
    under_1f1b = search.pricer.price([(512, one)]).predicted_s + found.plans[0].optimizer_s
    assert found.best_static.strategies == found.plans[0].strategies == ("pp2+zb_h1",)
    assert found.lower_bound_s <= found.plans[0].predicted_s < 0.97 * under_1f1b
    tight = replace(given, memory_bytes=one.memory(512).peak_bytes)
    assert plan_of(tight).best_static.strategies == ("pp2",)


def test_a_pipeline_that_holds_its_logits_has_them_whole():
    """A set has chunks for what a guess cannot hold."""
    given = problem(None, 1, names=("pp2",))
    search = _Search(given, known(given.cluster), lambda _: None)
    chosen = [(512, search.known.candidate(Strategy.parse("pp2+chunks(8)"), lambda _: None))]
    (group,) = search.variants.best(chosen, search.pricer.price(chosen, settle=True)).groups
    assert group.strategy == "pp2+zb_h1"


@pytest.mark.parametrize(
    ("slowdown", "host_gb_per_s", "memory_bytes", "found"),
    [
        (None, 100.0, None, "dp2+remat"),
        (1.0, 100.0, None, "dp2+offload"),
        (1.0, 0.15, 6_530_000, "dp2+offload(0.25)"),  # 90,000 bytes less than `dp2` takes; the link hides no more
    ],
)
def test_what_a_layer_keeps_waits_on_the_host_where_that_takes_less_time(
    slowdown: float | None, host_gb_per_s: float, memory_bytes: int | None, found: str
):
    """Than to compute it again: where copies run beside kernels, as much as the link takes beside them."""
    given = problem(memory_bytes, 1, names=("dp2",))
    device = replace(CPU, overlap_slowdown=slowdown, host_gb_per_s=host_gb_per_s)
    given = replace(given, cluster=replace(LINKS, device=device))
    search = _Search(given, known(given.cluster), lambda _: None)
    chosen = [(512, search.known.candidate(Strategy.parse("dp2+remat"), lambda _: None))]
    (group,) = search.variants.best(chosen, search.pricer.price(chosen, settle=True)).groups
    assert group.strategy == found


def test_a_group_that_no_mini_batch_has_is_none():
    given = problem(9_000_000, names=("dp2", "tp2+sp"))
    search = _Search(given, known(given.cluster), lambda _: None)
    search.lower_all()
    last = len(search.intervals.edges) - 1
    short = search.intervals.edges.index(64)
    both = search.pricer.price([(64, search.candidates[0]), (512, search.candidates[1])])
    assert [group.tokens > 0 for group in both.groups] == [False, True]
    assert search._price(((short, 0), (last, 1))) is search._price(((last, 1),))
    assert set(search.priced) == {((last, 1),)}
    search.settled[(short, 0), (last, 1)] = both  # only what is faster leaves it without tokens
    assert [group.limit for group in search._refined(((short, 0), (last, 1)), rules=False).groups] == [512]


@pytest.mark.parametrize(
    ("names", "memory_bytes", "nodes", "seconds", "planned"),
    [
        (("dp2", "tp2+sp"), 9_000_000, 1, {True: 1.0, False: 2.0}, [True, False]),
        (("dp2", "tp2+sp"), 9_000_000, 1, {True: 2.0, False: 1.0}, [True, False]),
        (("dp2", "tp2+sp"), None, 1, {True: 1.0}, [True]),  # the same micro-batches: nothing is hidden if they do not
        (("dp2", "dp2"), 9_000_000, 1, {False: 1.0}, [False]),  # one strategy inside of one node
        (("dp2", "dp2"), 9_000_000, 2, {True: 1.0}, [True]),
    ],
)
def test_groups_overlap_where_that_is_worth_its_memory(names, memory_bytes, nodes, seconds, planned, monkeypatch):
    cluster = replace(LINKS, nodes=nodes, devices_per_node=2 // nodes)
    given = replace(problem(memory_bytes), overlap=True, cluster=cluster)
    chosen = [
        (limit, candidate(lowered, Strategy.parse(name), given.cluster, given.depth, given.anchors))
        for limit, name in zip((64, 512), names, strict=True)
    ]
    asked = dict[bool, list[int]]()

    def stub(self, chosen, groups, settle, overlap, doubt):
        asked[overlap] = [one.token_budget for one in groups]
        return SimpleNamespace(predicted_s=seconds[overlap])

    monkeypatch.setattr(SetPricer, "_planned", stub)
    pricer = _Search(given, known(given.cluster), lambda _: None).pricer
    assert pricer.price(chosen, settle=True).predicted_s == min(seconds.values())
    assert list(asked) == planned
    if len(asked) == 2:
        assert asked[True] < asked[False]


@pytest.mark.parametrize("text", ["dp2", "tp2+sp", "pp2", "pp2+zb_h1"])
def test_memory_plan_and_engine_differ_in_what_the_page_says(text):
    """docs/hot_switching.md: messages beside a micro-batch, the optimizer, and rounding of parameters."""
    strategy, tokens = Strategy.parse(text), 512
    program, count = lowered(strategy, 2), steady_micro_batches(strategy)
    alone = predict_memory(program, {"T": tokens}, micro_batches=count)
    group = LengthGroup(tokens, strategy, tokens)
    home = home_layout(param_specs(program), 2, {})
    staging = 2 * layout_of(program, text).max_bytes()

    def needed(rank: int) -> int:
        activations = activation_bytes([program], [group], True, LengthLimits(), rank)
        return memory_report({text: program}, home, [rank], None, staging, activations).total_bytes

    engine = max(map(needed, range(2)))  # under zb_h1 the first rank has most weights, the last one most activations
    rounding = ALIGN_BYTES * len(program.params())
    assert alone.reserved_bytes <= engine <= alone.reserved_bytes + rounding
    assert alone.step_bytes > alone.switch_bytes
    assert alone.peak_bytes == alone.reserved_bytes + alone.optimizer_bytes - alone.staging_bytes
    plan = candidate(lowered, strategy, LINKS, Depth(2, whole=True), (256, tokens)).at(tokens)
    assert engine <= plan.peak_bytes - plan.optimizer_bytes
    alone = predict_memory(program, {"T": tokens}, micro_batches=count, conditions=Conditions(several=True))
    stage = program.placed[-1 if "zb_h1" in text else 0]  # where most micro-batches are kept
    fullest = sum(info.kind == "param" for info in stage.inputs)
    assert plan.peak_bytes == alone.reserved_bytes + alone.optimizer_bytes + ALIGN_BYTES * fullest


@pytest.mark.parametrize("overlap", [False, True])
def test_a_set_takes_what_an_engine_reserves_for_it(overlap):
    """One engine runs them all: the largest accumulators (of groups that overlap the two largest), messages and
    activations, of whichever strategy each is.
    """
    given = replace(problem(9_000_000), overlap=overlap)
    pricer = _Search(given, known(given.cluster), lambda _: None).pricer
    strategies = [Strategy.parse(name) for name in ("dp2", "cp2+zero3+remat")]
    chosen = [
        (limit, candidate(lowered, one, given.cluster, given.depth, given.anchors))
        for limit, one in zip((64, 512), strategies, strict=True)
    ]
    priced = pricer.price(chosen, settle=True)
    programs = {str(one): lowered(one, 2) for one in strategies}
    budgets = [LengthGroup(group.limit, Strategy.parse(group.strategy), group.token_budget) for group in priced.groups]
    activations = activation_bytes(list(programs.values()), budgets, True, LengthLimits())
    layouts = [layout_of(program, name) for name, program in programs.items()]
    staging = 2 * max(layout.max_bytes() for layout in layouts)
    specs = param_specs(programs["dp2"])
    home = home_layout(specs, 2, {})
    reserved = memory_report(programs, home, (0, 1), (), staging, activations, overlap).total_bytes
    taken = max(priced.memory_bytes.values()) - priced.optimizer_bytes
    assert reserved <= taken < 1.05 * reserved
