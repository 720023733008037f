"""What strategies take at least against what they take, lowered."""

from __future__ import annotations

import functools

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.strategy import Strategy
from fxpar.search.floors import Floors
from fxpar.search.price import Candidate, Priced, candidate
from fxpar.search.space import SAVINGS, with_savings, without_stages
from fxpar.search.staged import StagedGuess
from tests.search.shallow import shallow

CLUSTER, ANCHORS, LAYERS = ClusterSpec.from_file("a800").with_nodes(2, 4), (64, 8192), 12
FLOORS = Floors(CLUSTER)


@functools.cache
def lowered(strategy: Strategy) -> Candidate:
    rows = shallow("stack", LAYERS)
    return candidate(rows.lower, strategy, CLUSTER, rows.depth, ANCHORS)


def with_floor(shape: str, level: int) -> tuple[Priced, Priced]:
    """A strategy that saves memory, of a pipeline as it is guessed, and what it takes at least."""
    strategy = with_savings(Strategy.parse(shape), level)
    flat = lowered(without_stages(strategy))
    floor = FLOORS.least(lowered(without_stages(Strategy.parse(shape))), flat.strategy, whole_loss=True)
    if strategy.pipeline_size == 1:
        return flat, floor
    return StagedGuess(strategy, CLUSTER, ANCHORS, flat), StagedGuess(strategy, CLUSTER, ANCHORS, floor)


@pytest.mark.parametrize("level", range(1, len(SAVINGS)))
@pytest.mark.parametrize("shape", ["dp2.cp2.tp2+sp", "pp2.cp2.tp2+sp"])
def test_nothing_takes_less(shape, level):
    one, floor = with_floor(shape, level)
    for tokens in (1, 512, 4096, 32768):
        assert floor.cost.seconds([tokens]) <= one.cost.seconds([tokens]) * (1 + 1e-9)
    for tokens in ANCHORS:
        pairs = zip(floor.at(tokens).columns, one.at(tokens).columns, strict=True)
        assert all(least <= held for least, held in pairs)


def test_what_runs_again_and_what_is_gathered_are_in_it():
    """Of blocks that run again four fifths of what that takes more; transfers of ZeRO-3 that nothing could hide."""
    plain = lowered(with_savings(Strategy.parse("dp2.cp2.tp2+sp"), 0))
    full, floor = with_floor("dp2.cp2.tp2+sp", 3)
    tokens = [32768]
    more = full.cost.seconds(tokens) - plain.cost.seconds(tokens)
    assert floor.parts[1].again.at(32768) > 0
    assert floor.cost.seconds(tokens) > plain.cost.seconds(tokens) - more
    gathered, least = with_floor("dp2.cp2.tp2+sp", 2)
    assert least.cost.seconds([1]) > 0.3 * gathered.cost.seconds([1])
