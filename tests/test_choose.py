"""Tests of tests.choose, which says what runs by day."""

from __future__ import annotations

import ast

from tests.blocks import marked
from tests.choose import Measured, as_lines, chosen, merged


def of(**tests: tuple[float, str]) -> dict[str, Measured]:
    return {
        name.replace("__", "/"): Measured(cpu_s, frozenset(map(ord, blocks))) for name, (cpu_s, blocks) in tests.items()
    }


def test_a_block_is_run_by_two_tests_of_any_room_and_one_of_its_own():
    tests = of(a__x=(9, "pq"), a__y=(8, "p"), b__x=(7, "pq"), b__y=(6, "q"))
    assert chosen(tests) == ["a/y", "b/y"]  # no other of its room runs q of a/x, and p of b/x
    assert chosen(of(a__x=(9, "p"), a__y=(8, "p"))) == []


def test_the_last_case_of_a_cheap_test_stays():
    tests = {"a/x[1]": 0.5, "a/x[2]": 0.6, "a/y": 0.5, "a/z": 0.01, "a/w": 0.01}
    tests = {name: Measured(cpu_s, frozenset({1})) for name, cpu_s in tests.items()}
    assert chosen(tests) == ["a/x[2]"]
    dear = {name: Measured(2 * one.cpu_s, one.blocks) for name, one in tests.items()}
    assert chosen(dear) == ["a/x[2]", "a/x[1]", "a/y"]
    elsewhere = {name.replace("a/", "cli/test_early.py::"): one for name, one in dear.items()}
    assert chosen(elsewhere) == ["cli/test_early.py::x[2]"]


def test_cases_are_named_where_some_are_left():
    assert as_lines(["a/x[1]", "a/y[1]", "a/y[2]"], ["a/x[1]", "a/x[2]", "a/y[1]", "a/y[2]"]) == ["a/x[1]", "a/y"]


def test_a_case_that_asks_something_of_its_own_stays():
    assert chosen({f"flow/test_x.py::test_y[{i}]": Measured(9, frozenset({1})) for i in range(4)}) == []


def test_names_that_are_added():
    assert merged(["a/x[1]", "a/y"], ["a/x", "a/z[1]"]) == ["a/x", "a/y", "a/z[1]"]


def test_each_block_of_a_function_sets_its_byte():
    code = '''
def f(x):
    """Says."""
    for _ in range(x):
        if x > 1:
            return "many"
        else:
            pass
    try:
        return {0: "none"}[x]
    except KeyError:
        return "one"
'''
    tree, end = marked(code, 10)
    hit = bytearray(end)
    names: dict = {"__blocks__": hit}
    exec(compile(ast.fix_missing_locations(tree), "f", "exec"), names)
    ran = {}
    for x in (0, 1, 2):
        hit[:] = bytes(end)
        what = names["f"](x)
        ran[what] = sum(hit)
    # Of the function, the loop, both branches, the attempt and its handler.
    assert end == 16
    assert ran == {"none": 2, "one": 5, "many": 3}
    assert names["f"].__doc__ == "Says."
