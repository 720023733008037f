"""Switches of sets, each planned once, against those that an engine plans for just this set."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fxpar.ir.strategy import Strategy
from fxpar.passes.share_weights import ALIGN_BYTES, ShareWeights, laid_out
from fxpar.search.known import KnownModel
from fxpar.search.pricing import SetPricer
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
            assert mine.at_least().predicted_s(name, order[:number]) <= expected * (1 + 1e-9)
    # Whole weights are gathered from both ranks, over the only link there is.
    least_s = mine.at_least().predicted_s("dp2", ())
    assert least_s == pytest.approx(alone.plan("dp2", ()).predicted_s, rel=1e-9)


@pytest.mark.parametrize("names", [NAMES, ("tp2+sp", "pp2")])
def test_weights_that_are_shared_count_once(names):
    """As the storage of a run lays them out: pieces of tp lie in whole weights, those of stages in none."""
    known = KnownModel(lowered, outlined, LINKS, problem().depth, problem().anchors)
    priced = {name: known.named(Strategy.parse(name)) for name in names}
    programs = {name: lowered(Strategy.parse(name), 2) for name in names}
    found = known.switches.weight_bytes(priced, guess=False)
    stored = max(laid_out(ShareWeights(), programs, rank).nbytes for rank in (0, 1))
    alone = sum(one.stays.weight_bytes for one in priced.values())
    padding = len(names) * ALIGN_BYTES * len(programs["tp2+sp"].params())
    assert stored - padding <= found < alone
    if "dp2" in names:
        assert found <= stored + padding
        # So whole weights stay for all that runs, even where micro-batches fill the memory.
        chosen = [(64, priced["dp2"]), (512, priced["cp2"])]
        pricer = SetPricer(LINKS, known.depth, outlined, problem().batches[:1], None, switches=known.switches)
        tight = replace(pricer, memory_bytes=max(pricer.needs(chosen)) * 101 // 100)
        weights = known.switches.weight_bytes({one.name: one for _, one in chosen}, guess=False)
        groups = tight.groups(chosen)
        assert groups is not None
        assert tight._resident(chosen, groups, weights, False) == ("dp2", "cp2")
        assert tight._resident(chosen, groups, 2 * weights, False) == ()


@pytest.mark.parametrize(("name", "more"), [("tp2+sp", "remat"), ("pp2", "zb_h1")])
def test_what_moves_no_parameter(name, more):
    one, other = Strategy.parse(name), Strategy.parse(f"{name}+{more}")
    assert placement_of(one) == placement_of(other)
    assert placement_of(one) != placement_of(Strategy.parse("dp2+zero3"))
    assert layout_of(lowered(one, 2)).params == layout_of(lowered(other, 2)).params
