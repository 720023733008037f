"""Spindle's shares and waves: the worked example, what each wave keeps, and the open planner's figures."""

from __future__ import annotations

import pytest

from fxpar.waves import CASES, MetaOp, TaskGraph
from fxpar.waves.order import Problem
from fxpar.waves.spindle import EXTENSIONS, SORTS, shares, waves
from tests.waves.plain import nodes


def test_shares_between_two_widths():
    """Twelve layers on 1.5 devices: by speed 8 of them on two devices, 4 on one."""
    problem = Problem(TaskGraph((MetaOp("a", 12, {1: 2.0, 2: 1.0}),)), nodes(4))
    found = shares(problem, [0], 12 * 2.0 / 1.5)
    assert [(one.width, one.layers) for one in found] == [(2, 8), (1, 4)]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_waves_keep_their_rules(sort, extension):
    """Levels one after the other, devices not twice, all layers once, two waves per MetaOp of a level at most."""
    graph = CASES["ofasys-7"]
    problem = Problem(graph, nodes(16))
    found = waves(problem, sort, extension)
    done = [0] * len(graph.metaops)
    for wave in found:
        assert sum(piece.width for piece in wave) <= 16
        assert len({piece.metaop for piece in wave}) == len(wave)
        assert all(done[j] == problem.layers[j] for piece in wave for j in graph.before[piece.metaop])
        for piece in wave:
            done[piece.metaop] += piece.layers
    assert done == problem.layers
    if extension == "none":
        assert len(found) <= 2 * len(graph.metaops)


def barrier_ms(problem, found):
    """What waves take if each begins when the one before has ended, transfers aside."""
    return sum(max(problem.curves[piece.metaop].ms[piece.width] * piece.layers for piece in wave) for wave in found)


# "With extension" of the open planner, where its rounding is not finer than what is written of it.
@pytest.mark.parametrize(
    ("name", "devices", "ms"),
    [("clip-4", 8, 97.6), ("clip-10", 8, 334.5), ("clip-10", 16, 180.1), ("qwen-val", 8, 4639), ("qwen-val", 64, 619)],
)
def test_figures_of_the_open_planner(name, devices, ms):
    problem = Problem(CASES[name], nodes(devices))
    found = min(barrier_ms(problem, waves(problem, "wide-long", extension)) for extension in ("time", "area"))
    assert found == pytest.approx(ms, rel=0.004)
