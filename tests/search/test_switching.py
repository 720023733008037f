"""Switches of sets, each planned once, against those that an engine plans for just this set."""

from __future__ import annotations

import itertools

import pytest

from fxpar.ir.strategy import Strategy
from fxpar.search.known import KnownModel
from fxpar.search.switching import placement_of
from fxpar.store import home_of
from fxpar.switch import layout_of
from fxpar.switch.order import SwitchSchedule
from tests.search.test_driver import LINKS, lowered, outlined, problem

NAMES = ("dp2", "cp2", "tp2+sp")


@pytest.mark.parametrize("resident", [(), NAMES])
def test_they_take_as_long_as_those_of_the_set_alone(resident):
    given = problem(names=NAMES)
    known = KnownModel(lowered, outlined, LINKS, given.depth, given.anchors)
    found = {name: known.candidate(Strategy.parse(name), lambda _: None) for name in NAMES}
    priced = {name: one for name, one in found.items() if one is not None}
    assert list(priced) == list(NAMES)
    # Another set has had some of them before.
    known.switches.of_set(dict(list(priced.items())[:2]), (), guess=False).order(NAMES[:2])
    mine = known.switches.of_set(priced, resident, guess=False)
    layouts = {name: layout_of(outlined(Strategy.parse(name), 2), name) for name in NAMES}
    alone = SwitchSchedule(layouts, home_of(layouts["dp2"])[1], LINKS, resident=resident)
    for order in itertools.permutations(NAMES):
        for number, name in enumerate(order):
            expected = alone.plan(name, order[:number]).predicted_s
            assert mine.predicted_s(name, order[:number]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "more"), [("tp2+sp", "remat"), ("pp2", "zb_h1")])
def test_what_moves_no_parameter(name, more):
    one, other = Strategy.parse(name), Strategy.parse(f"{name}+{more}")
    assert placement_of(one) == placement_of(other)
    assert placement_of(one) != placement_of(Strategy.parse("dp2+zero3"))
    assert layout_of(lowered(one, 2)).params == layout_of(lowered(other, 2)).params
