"""Rules that a search finds, against every choice there is."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.ir.strategy import Strategy
from fxpar.search.blends import Blend, Changed
from fxpar.search.driver import Problem, _Search, find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.positions import with_run
from fxpar.search.price import Depth
from tests.search.shallow import shallow

LAYERS, LONGEST = 5, 512
CLUSTER = usual_cluster(4)
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


def test_no_number_of_layers_is_better():
    """Where all layers fit only if they recompute: all numbers of each kind, planned as sets are."""
    given = problem(between(0.5), "dp4")
    found = find_plan_of(given, known())
    plan = found.plans[0]
    search = _Search(given, known(), lambda _: None)
    search.lower_all()
    search.pricer.optimizer_s = plan.optimizer_s
    layers = known().layers
    assert layers is not None
    every = []
    levels = [one.strategy for one in search.candidates if one.strategy.zero == 0]
    for less, more in itertools.combinations(levels, 2):
        for count in range(1, LAYERS):
            one = priced(str(with_run(less, more, layers, count)))
            every.append(search.pricer.price([(LONGEST, one)], settle=True))
    best = min(one.predicted_s for one in every if one is not None)
    assert plan.predicted_s == pytest.approx(best, rel=1e-9)
    assert plan.predicted_s < found.uniform_s
    assert found.lower_bound_s <= found.uniform_s
    assert found.won == pytest.approx(1 - plan.predicted_s / found.uniform_s)
    assert max(plan.memory_bytes.values()) <= between(0.5)
    assert "[layers." in plan.strategies[0]
    assert found.best_static is not None


def test_without_rules_nothing_has_them():
    found = find_plan_of(replace(problem(between(0.5), "dp4"), rules=False), known())
    assert "[" not in found.plans[0].strategies[0]
    assert (found.plans[0].predicted_s, found.won, found.ruled) == (found.uniform_s, 0.0, 0)


def test_where_all_fits_no_rule_is_better():
    """`dp4` sends nothing and recomputes nothing."""
    found = find_plan_of(problem(10**11, "dp4"), known())
    assert (found.plans[0].strategies, found.plans[0].predicted_s) == (("dp4",), found.uniform_s)
    assert found.ruled == 0


@pytest.mark.parametrize("names", [("*.attention", "*.ffn")])
def test_two_changes_take_what_each_takes(names):
    """The guess at two rules at once, against the program that has both."""
    first, second = (f"{name}: {roles}" for name, roles in zip(names, ("cp4", "cp2.tp2+sp"), strict=True))
    alone, both = priced("tp4+sp"), priced(f"tp4+sp[{first}; {second}]")
    guess = Changed(
        both.strategy, CLUSTER, alone.anchors, alone, (priced(f"tp4+sp[{first}]"), priced(f"tp4+sp[{second}]"))
    )
    assert guess.cost.seconds([LONGEST]) == pytest.approx(both.cost.seconds([LONGEST]), rel=0.02)
    assert guess.memory(LONGEST).peak_bytes == pytest.approx(both.memory(LONGEST).peak_bytes, rel=0.05)
    assert guess.reduce_s == pytest.approx(both.reduce_s, rel=0.05)


def test_a_blend_is_what_the_mixture_takes():
    less, more, both = priced("dp4"), priced("dp4+remat"), priced("dp4[layers.{0-1}: +remat]")
    guess = Blend(both.strategy, CLUSTER, less.anchors, less, more, 2 / LAYERS)
    assert guess.cost.seconds([LONGEST]) == pytest.approx(both.cost.seconds([LONGEST]), rel=0.01)
    assert guess.memory(LONGEST).peak_bytes == pytest.approx(both.memory(LONGEST).peak_bytes, rel=0.05)
