"""What a pipeline is guessed to hold against the pipeline, lowered."""

from __future__ import annotations

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.ir.strategy import Strategy
from fxpar.search.price import candidate
from fxpar.search.space import without_stages
from fxpar.search.staged import StagedGuess
from tests.search.shallow import shallow

CLUSTER, ANCHORS, LAYERS = usual_cluster(8), (64, 4096), 8


@pytest.mark.parametrize("text", ["dp4.pp2+zero2", "dp4.pp2+zero3"])
def test_what_zero_cuts_is_cut_once(text):
    """The fullest stage has some more than the mean, which is guessed; a second cut would halve it."""
    rows, strategy = shallow("stack", LAYERS), Strategy.parse(text)
    flat = candidate(rows.lower, without_stages(strategy), CLUSTER, rows.depth, ANCHORS)
    guess = StagedGuess(strategy, CLUSTER, ANCHORS, flat).at(64)
    lowered = candidate(rows.lower, strategy, CLUSTER, rows.depth, ANCHORS).at(64)
    for part in ("weight_bytes", "gradient_bytes", "step_bytes"):
        assert 0.75 <= getattr(guess, part) / getattr(lowered, part) <= 1.25, part
