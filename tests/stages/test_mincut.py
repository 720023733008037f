"""The minimum cut against all cuts, and layers against all ways to share them out."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from fxpar.stages import Layer, balanced_cuts
from fxpar.stages.mincut import EARLY, LATE, CutNetwork

NODES = ["a", "b", "c", "d", "e"]
edges = st.dictionaries(
    st.tuples(st.sampled_from([LATE, *NODES]), st.sampled_from([*NODES, EARLY])).filter(lambda e: e[0] != e[1]),
    st.one_of(st.integers(1, 10**9), st.none()),
    min_size=1,
    max_size=14,
)


def price(found: dict, late: set) -> float:
    late = late | {LATE}
    return sum(float("inf") if p is None else p for (a, b), p in found.items() if a in late and b not in late)


@given(edges)
def test_cheapest(found):
    """No set of late nodes costs less (up to the rounding of prices to 28 bits)."""
    sets = [set(c) for n in range(len(NODES) + 1) for c in itertools.combinations(NODES, n)]
    best = min(price(found, late) for late in sets)
    if best == float("inf"):
        return
    network = CutNetwork()
    for (a, b), amount in found.items():
        if amount is None:
            network.forbid(a, b)
        else:
            network.pay(a, b, float(amount))
    assert price(found, network.late() & set(NODES)) <= best * 1.001 + 100


def test_hints_only_break_ties():
    network = CutNetwork()
    for pair in (("a", "b"), ("b", "c"), ("c", EARLY)):
        network.pay(*pair, 8.0)
    network.forbid(LATE, "a")
    assert network.late() & set(NODES) == {"a"}
    network.hint("b", late=True)
    network.hint("c", late=False)
    assert network.late() & set(NODES) == {"a", "b"}
    network.pay("b", "c", 1.0)
    assert network.late() & set(NODES) == {"a"}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 5))
def test_balance(seconds, stages):
    """The dearest stage is as cheap as any way to share out the layers makes it."""
    layers = [Layer(f"layers.{i}", i, f) for i, f in enumerate(seconds)]
    assume(stages <= len(layers))

    def dearest(ends) -> int:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *ends, len(seconds)]))

    cuts = [int(fqn.split(".")[1]) for fqn in balanced_cuts(layers, stages)]
    assert cuts == sorted(set(cuts))
    assert len(cuts) == stages - 1
    assert 0 not in cuts
    assert dearest(cuts) == min(dearest(ends) for ends in itertools.combinations(range(1, len(seconds)), stages - 1))


def test_first_stages_are_larger():
    layers = [Layer(f"layers.{i}", i, 5) for i in range(7)]
    assert balanced_cuts(layers, 3) == ["layers.3", "layers.5"]
