"""Orders without levels."""

from __future__ import annotations

from fxpar.waves import CASES, TaskGraph
from fxpar.waves.bound import relaxed
from fxpar.waves.level_free import level_free
from fxpar.waves.order import Problem
from tests.waves.plain import metaop, nodes, without_transfers


def order(graph: TaskGraph, devices: int, anew: bool = False):
    problem = Problem(graph, nodes(devices))
    found = relaxed(graph, problem.curves, devices)
    pieces = level_free(problem, found.metaop_ms, anew)
    return problem, pieces, max(problem.times(pieces)[1]) / found.bound_ms


def test_all_layers_once_behind_what_they_read():
    for name in ("ofasys-7", "qwen-val"):
        problem, pieces, _ = order(CASES[name], 32)
        done = [0] * len(problem.layers)
        for piece in pieces:
            assert all(done[j] == problem.layers[j] for j in problem.before[piece.metaop])
            done[piece.metaop] += piece.layers
        assert done == problem.layers


def test_a_long_way_behind_gets_more_devices():
    """Equal MetaOps, but one has a language model behind it."""
    towers = (metaop("a", 8), metaop("b", 8), metaop("lm", 24, widest=4))
    _, pieces, ratio = order(TaskGraph(towers, (("a", "lm"),)), 8)
    first = {piece.metaop: piece.width for piece in reversed(pieces)}
    assert first[0] > first[1]
    assert ratio < 1.2


def test_no_level_waits_for_another():
    """A chain of three short MetaOps beside a long one: level by level the chain would wait."""
    towers = (*(metaop(name, 4, widest=2) for name in "abc"), metaop("long", 12, widest=2))
    _, _, ratio = order(TaskGraph(towers, (("a", "b"), ("b", "c"))), 4)
    assert ratio < 1.001


def test_what_is_left_is_relaxed_anew():
    """Ways behind MetaOps change as layers are rounded."""
    graph = without_transfers(CASES["ofasys-7"])
    assert order(graph, 64, anew=True)[2] < min(1.06, order(graph, 64)[2])
