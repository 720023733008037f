"""Arithmetic on symbolic sizes: remembered, and what torch says without remembering."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch

from fxpar.torch_api import sizes, tracing
from fxpar.torch_api.symbolic import FakeWorld

OPERATIONS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.ge,
    operator.floordiv,
]


def _world() -> tuple[FakeWorld, torch.SymInt]:
    world = FakeWorld(lambda: None)
    return world, world.symbol("T", 8)


def test_results_are_those_of_torch() -> None:
    world, size = _world()
    plain = torch.SymInt(sizes.SymNode(size.node._expr, world.shape_env, int, 8))
    assert type(plain.node) is sizes.SymNode
    for operation, other in itertools.product(OPERATIONS, (3, 16, size * 2)):
        ours, theirs = operation(size, other), operation(plain, other)
        assert str(ours) == str(theirs)
        assert ours.node.hint == theirs.node.hint
        assert ours.node.pytype is theirs.node.pytype


def test_the_same_operation_gives_the_same_node() -> None:
    _, size = _world()
    assert (size * 2).node is (size * 2).node
    assert (size * 2).node is not (size * 3).node
    assert ((size * 2) == 6).node is ((size * 2) == 6).node


def test_a_size_compared_with_itself_is_not_traced() -> None:
    world, size = _world()
    found: list[bool] = []
    traced: list[object] = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        rows = x.shape[0]
        with tracing.observe_nodes(lambda node: traced.append(node.target)):
            found.extend(bool(compare(rows * 2, 2 * rows)) for compare in (operator.eq, operator.le, operator.gt))
            found.append(rows != rows * 2)  # of two sizes
        return (x,)

    with world.mode:
        x = torch.empty(size)
    tracing.trace(world, step, [x])
    assert found == [True, True, False, True]
    assert [target for target in traced if target in OPERATIONS[3:]] == [operator.ne]


def test_nothing_is_remembered_across_a_guard_that_fixes_a_size() -> None:
    world, size = _world()
    before = size * 2
    assert before.node.maybe_as_int() is None
    assert size == 8  # a guard: from here on T is 8
    after = size * 2
    assert after.node is not before.node
    assert after.node.expr == 16
    assert before.node.maybe_as_int() == after.node.maybe_as_int() == 16
    assert len(world.guards) == 1


def test_decided_without_guards():
    world = FakeWorld(lambda: None)
    T = world.symbol("T", 6)
    with world.without_guards():
        assert T == 6
        assert T > 3
    assert (world.guards, world.replacements()) == ([], {})
    assert T == 6
    assert (len(world.guards), len(world.replacements())) == (1, 1)


@pytest.mark.parametrize("made", [lambda T: (T * 2) // 2, lambda T: (T * 3) % (T * 2), lambda T: -T, lambda T: T / 2])
def test_what_is_made_of_sizes_remembers_too(made):
    # A plain node hands on plain nodes, and all behind it is computed again and again.
    _, T = _world()
    assert type(made(T).node) is sizes.SizeNode
    assert type((made(T) + 1).node) is sizes.SizeNode
    assert type(torch.sym_not(made(T) > 3).node) is sizes.SizeNode


def test_truth_values_and_sums_remember_too():
    _, T = _world()
    either = T.node.wrap_bool(False).or_((T > 3).node)
    assert type(either) is sizes.SizeNode
    assert either is T.node.wrap_bool(False).or_((T > 3).node)
    assert type(T.node.sym_sum([T.node, (T * 2).node])) is sizes.SizeNode
    assert T.node.wrap_int(1).pytype is int
    assert T.node.wrap_bool(True).pytype is bool
