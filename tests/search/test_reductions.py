"""Whose gradients add to whose: of priced strategies, and of their programs."""

from __future__ import annotations

from itertools import combinations

from fxpar.ir.strategy import Strategy
from fxpar.search.reductions import SetReductions, accumulator_bytes, accumulators_key
from fxpar.switch import terms
from tests.search.test_driver import known, lowered
from tests.search.test_traffic import NODES

ALIKE = {
    "dp2.tp2": ("dp2.tp2+remat", "dp2.tp2+remat(selective)", "dp2.tp2+chunks(2)"),
    "dp2.tp2+sp": ("dp2.tp2+sp+remat+chunks(2)",),
    "dp4+zero2": ("dp4+zero3",),
    "dp4": ("dp4+remat[layers.0: +remat(selective)]", "dp4+zero1"),
    "tp2.dp2": (),
    "dp2.cp2": ("dp2.cp2+remat",),
    "dp2.pp2": ("dp2.pp2+remat", "dp2.pp2+zb_h1"),
    "dp1 | dp1 | dp2": (),
}
TEXTS = [text for first, others in ALIKE.items() for text in (first, *others)]


def test_what_adds_up_in_a_search_adds_up_in_a_session():
    model = known(NODES)
    priced = {}
    for text in TEXTS:
        found = model.priced(Strategy.parse(text), lambda _: None)
        assert found is not None, text
        priced[text] = found
    expected = {frozenset(pair) for first, others in ALIKE.items() for pair in combinations((first, *others), 2)}
    same = {
        frozenset(pair)
        for pair in combinations(TEXTS, 2)
        if accumulators_key(priced[pair[0]]) == accumulators_key(priced[pair[1]])
    }
    assert same == expected
    for pair in same:
        one, other = (terms.accumulators_of(lowered(Strategy.parse(text), 2)) for text in pair)
        assert one == other is not None
    mine = [priced["dp2.tp2"], priced["dp2.tp2+remat"], priced["dp2.cp2"]]
    tp, cp = (priced[text].stays.gradient_bytes for text in ("dp2.tp2", "dp2.cp2"))
    assert accumulator_bytes(mine[:2], True) == tp
    assert accumulator_bytes(mine, True) == tp + cp
    assert accumulator_bytes(mine, False) == max(tp, cp)
    staged = [priced["dp2.pp2+zb_h1"], priced["dp2.pp2"]]  # counted on other ranks
    assert accumulator_bytes(staged, True) == staged[0].stays.gradient_bytes > staged[1].stays.gradient_bytes
    teams = priced["dp1 | dp1 | dp2"]  # which hand gradients on at their end: the next group has its own
    whole = teams.stays.gradient_bytes
    assert [accumulator_bytes([teams, mine[0], *more], True) for more in ((), (teams,))] == [whole + tp, 2 * whole]
    assert accumulator_bytes([mine[0], mine[0]], True) == tp
    reductions = SetReductions.of({one.name: one for one in mine})
    assert reductions.are_shared
    assert reductions.leaving(["dp2.tp2", "dp2.tp2+remat", "dp2.cp2"]) == ["dp2.tp2+remat", "dp2.cp2"]
    assert reductions.leaving(["dp2.tp2", "dp2.cp2", "dp2.tp2+remat"]) == ["dp2.tp2", "dp2.cp2", "dp2.tp2+remat"]
    assert not SetReductions.of({one.name: one for one in mine[1:]}).are_shared
