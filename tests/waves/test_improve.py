"""Local search over orders."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxpar.waves import CASES, MetaOp, TaskGraph
from fxpar.waves.bound import relaxed
from fxpar.waves.improve import MOVES, improved
from fxpar.waves.level_free import level_free
from fxpar.waves.order import Piece, Problem
from tests.repeat import examples
from tests.waves.plain import nodes


def start(name: str, devices: int) -> tuple[Problem, list[Piece], float]:
    graph = CASES[name]
    problem = Problem(graph, nodes(devices))
    found = relaxed(graph, problem.curves, devices)
    return problem, level_free(problem, found.metaop_ms), found.bound_ms


def check_order(problem: Problem, pieces: list[Piece]) -> None:
    done = [0] * len(problem.layers)
    for piece in pieces:
        assert piece.layers >= 1
        assert piece.width in problem.curves[piece.metaop].widths
        assert all(done[j] == problem.layers[j] for j in problem.before[piece.metaop])
        done[piece.metaop] += piece.layers
    assert done == problem.layers


@given(st.integers(0, 10**6))
@example(213840)  # a second part behind the first one, longer than the piece was, came after what needs it whole
@settings(max_examples=examples(30), deadline=None)
def test_moves_keep_orders_whole(seed):
    problem, here, _ = start("ofasys-7", 8)
    random = Random(seed)
    for _ in range(40):
        there = random.choice(MOVES)(problem, list(here), random.randrange(len(here)), random)
        if there is not None:
            here = there
            check_order(problem, here)


def test_it_finds_shorter_orders():
    problem, here, bound = start("clip-4", 16)
    found = improved(problem, here, 20_000, bound)
    check_order(problem, found)
    assert max(problem.times(found)[1]) < 0.96 * max(problem.times(here)[1])
    assert found == improved(problem, here, 20_000, bound)
    lent = improved(problem, here, 20_000, bound, loans=True)
    check_order(problem, lent)
    assert lent != found


def test_what_was_found_is_kept():
    """On one device less it is longer by so little that steps go there; the shortest is returned all the same."""
    problem = Problem(TaskGraph((MetaOp("a", 9, {1: 1.0, 2: 0.9999}),)), nodes(2))
    for seed in range(20):
        found = improved(problem, [Piece(0, 2, 9)], 3, 0.0, seed)
        assert max(problem.times(found)[1]) == pytest.approx(9 * 0.9999, rel=1e-14)  # one piece, or two


def test_it_ends_where_nothing_is_left_to_find():
    problem, here, _ = start("clip-4", 16)
    tidy = improved(problem, here, 0, 0.0)
    assert max(problem.times(tidy)[1]) <= max(problem.times(here)[1])
    assert len(tidy) <= len(here)
    assert improved(problem, here, 10**9, 1e9) == tidy


def test_devices_are_lent_for_some_layers():
    """Four devices, two towers on two each: `long` ends first if it borrows one for a while, which no move of one piece
    alone leads to.
    """
    graph = TaskGraph((MetaOp("long", 6, {2: 2.0, 3: 1.4}), MetaOp("short", 6, {1: 2.0, 2: 1.1})))
    problem, pieces = Problem(graph, nodes(4)), [Piece(0, 2, 6), Piece(1, 2, 6)]
    seen = set()
    for seed in range(200):
        there = MOVES[-1](problem, list(pieces), 0, Random(seed))
        assert there is not None
        check_order(problem, there)
        seen.add(tuple(there))
    assert (Piece(0, 3, 3), Piece(1, 1, 2), Piece(1, 2, 4), Piece(0, 2, 3)) in seen  # borrowed first
    assert (Piece(0, 2, 3), Piece(1, 2, 4), Piece(1, 1, 2), Piece(0, 3, 3)) in seen  # last
    least = min(max(problem.times(one)[1]) for one in seen)
    assert least < 0.95 * max(problem.times(pieces)[1])
    assert MOVES[-1](problem, [Piece(0, 3, 6), Piece(1, 1, 6)], 0, Random(0)) is None
