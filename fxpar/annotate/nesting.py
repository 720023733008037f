"""In what order axes cut that cut one dim of a tensor.

The search places one axis after the other, each on sizes local to those before. So what it finds is right where axes
cut in that order. The modules of a rule want another one, in which the parts of an axis are one axis again. It is as
good for an op of which all tensors are cut by both axes in one dim, or none is. It is not for attention whose keys are
cut by fewer axes than its queries, or for a view that makes one dim of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sympy
from torch import fx

from fxpar.ir.axes import ROLE_AXES, whole_axis
from fxpar.ir.dist_config import DistConfig, OuterShard, Placement, R, Shard
from fxpar.ir.fqn import starred
from fxpar.ir.graph import TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import EXPERT_PRODUCTS, EXPERT_PRODUCTS_BACKWARD
from fxpar.rules.option import Option
from fxpar.rules.view import is_op


def combine(
    base: DistConfig,
    meta: TensorMeta,
    placements: Mapping[str, Placement],
    token: sympy.Symbol | None,
    roles: Mapping[str, str] | None,
    bins: Collection[str] = (),
) -> DistConfig:
    """The placements of all axes on one tensor. What cuts weights cuts first, but on a token dim last, as a piece on a
    context axis is a run of tokens; what cuts `bins` goes first of all, so that no document is cut. `roles` are the
    axes that each is for where the tensor is, None for the order of the search; in pieces of tokens all modules agree.
    """
    cut = {axis: place for axis, place in placements.items() if isinstance(place, Shard | OuterShard)}

    def turn(axis: str) -> tuple[int, tuple[int, int]]:
        place, here = cut.get(axis), base.mesh.place(axis)
        size = meta.shape[place.dim] if place else 1
        if not isinstance(size, int) and token in size.free_symbols:
            return (-len(ROLE_AXES) if axis in bins else -ROLE_AXES.index(whole_axis(axis))), here
        return _turn(base.mesh, axis, roles[axis]) if roles else (0, (0, 0))

    for axis in sorted((axis for axis, place in placements.items() if place != R), key=turn):
        base = base.with_placement(axis, placements[axis])
    return base.whole(meta.shape) if any(":" in axis for axis in placements) else base


def _turn(mesh: Mesh, axis: str, role: str) -> tuple[int, tuple[int, int]]:
    return ROLE_AXES.index(role), mesh.place(axis)


def together(options: Mapping[str, Option], one: str, other: str) -> bool:
    """Whether it is all the same which of two axes cuts first in an op: all its tensors are cut by both in one dim, or
    none is.
    """
    pairs = {(_cut_dim(a), _cut_dim(b)) for a, b in zip(_places(options[one]), _places(options[other]), strict=True)}
    return all(a == b for a, b in pairs) or all(a is None or a != b for a, b in pairs)


def without_experts(op: Any, options: Mapping[str, Option]) -> Mapping[str, Option]:
    """Options of an op on each axis, of a product by expert those of its rows: ep cuts the weights by expert, which no
    dim of the rows counts, so that they are cut on their own.
    """
    if op in EXPERT_PRODUCTS:
        return {a: Option((o.inputs[0], *o.inputs[2:]), o.outputs) for a, o in options.items()}
    return {a: Option(o.inputs, ()) for a, o in options.items()} if op in EXPERT_PRODUCTS_BACKWARD else options


def _places(option: Option) -> tuple[Placement, ...]:
    return (*option.inputs, *option.outputs)


def _cut_dim(place: Placement) -> int | None:
    return place.dim if isinstance(place, Shard | OuterShard) else None


def modules_in_order_of_search(
    nodes: Iterable[fx.Node], choices: Mapping[str, Mapping[fx.Node, Option]], strategy: Strategy
) -> frozenset[str]:
    """The modules, with numbers left out, with an op for which the order that its rule wants is not as good. `choices`
    are the options that were found on each axis, in the order of the search.
    """
    found: set[str] = set()
    known: dict[tuple[int, ...], bool] = {}
    inverted: dict[int | None, list[tuple[str, str]]] = {}
    for node in nodes:
        rule = node.meta.get("rule")
        if rule not in inverted:
            turns = {axis: _turn(strategy.mesh, axis, strategy.axis_in(axis, rule)) for axis in choices}
            inverted[rule] = [(a, b) for a, b in itertools.combinations(turns, 2) if turns[a] > turns[b]]
        if not inverted[rule] or not is_op(node):
            continue
        options = {axis: choice[node] for axis, choice in choices.items()}
        key = (*map(id, options.values()),)
        if key not in known:
            rows = without_experts(node.target, options)
            known[key] = all(together(rows, *pair) for pair in inverted[rule])
        if not known[key]:
            found.add(starred(fqn_of(node)))
    return frozenset(found)


def is_within(module: str, modules: Collection[str]) -> bool:
    """Whether a module is one of these, with numbers left out, or inside of one; "" is the whole model."""
    if not modules:
        return False
    parts = starred(module).split(".")
    return "" in modules or any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


__all__ = ["combine", "is_within", "modules_in_order_of_search", "together", "without_experts"]
