"""What `fxpar explain` is asked about: a parameter, a module, or a node of an annotated graph."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxpar.annotate.solve import AxisSearch
from fxpar.explain.reshards import Reshard, moves, weights_of
from fxpar.ir.fqn import starred
from fxpar.ir.graph import AnnotatedGraph, Input
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.printer import parts
from fxpar.rules.view import is_op, resolve


@dataclass(frozen=True)
class Placed:
    """An annotated graph, of one pipeline `stage` (None: the whole model), and what is known about it.

    `names` are those that `fxpar dump --stage annotated` prints, `weights` the parameters that each node reads. The
    graph has its reshards in it.
    """

    stage: int | None
    graph: AnnotatedGraph
    searches: tuple[AxisSearch, ...]
    names: dict[fx.Node, str]
    inputs: dict[fx.Node, Input]
    weights: dict[fx.Node, set[fx.Node]]
    moves: tuple[Reshard, ...]

    def label(self, node: fx.Node) -> str:
        """The printed name; `return` for the graph's results."""
        return self.names.get(node, "return")


@dataclass(frozen=True)
class Subject:
    """Nodes that were asked about: inputs ("parameter"), all of a module, or one op or input ("node")."""

    kind: Literal["parameter", "module", "node"]
    nodes: tuple[fx.Node, ...]


def placed(graph: AnnotatedGraph, searches: tuple[AxisSearch, ...], stage: int | None = None) -> Placed:
    """All that is known about an annotated graph; puts its reshards in."""
    (printed,) = parts(graph)
    inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    weights = weights_of(graph)
    return Placed(stage, graph, searches, printed.names, inputs, weights, moves(graph))


def find(known: Placed, text: str) -> Subject | None:
    """A parameter, else a node, else a module of that name; else parameters, else modules that the glob matches."""
    params = {node: (info.fqn, *info.aliases) for node, info in known.inputs.items() if info.kind == "param"}
    exact = tuple(node for node, names in params.items() if text in names)
    if exact:
        return Subject("parameter", exact)
    bare = text.removeprefix("%")
    for node, name in known.names.items():
        if name == bare and _is_placed(node):
            return Subject("node", (resolve(node)[0],))
    inside = _inside(known, [text])
    if inside:
        return Subject("module", inside)
    matched = tuple(node for node, names in params.items() if fnmatch.filter(names, text))
    if matched:
        return Subject("parameter", matched)
    inside = _inside(known, fnmatch.filter(_modules(known), text))
    return Subject("module", inside) if inside else None


def vocabulary(known: Placed) -> Iterable[str]:
    """All names that `find` knows."""
    for info in known.inputs.values():
        yield from (info.fqn, *info.aliases)
    yield from (name for node, name in known.names.items() if _is_placed(node))
    yield from _modules(known)


def _is_placed(node: fx.Node) -> bool:
    """A tensor, not an integer."""
    return node.op == "placeholder" or is_op(resolve(node)[0])


def alike(known: Placed, nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The nodes in groups that decide together on every axis; without axes, those of repeated layers."""
    groups: dict[object, list[fx.Node]] = {}
    for node in nodes:
        key: object = tuple(search.problem.class_of[node] for search in known.searches)
        if not key:
            key = starred(known.inputs[node].fqn) if node in known.inputs else node
        groups.setdefault(key, []).append(node)
    return [tuple(group) for group in groups.values()]


def _modules(known: Placed) -> set[str]:
    """FQNs of modules that compute something."""
    found = set()
    for node in known.names:
        words = fqn_of(node).split(".")
        found |= {".".join(words[: i + 1]) for i in range(len(words))}
    return found - {""}


def _inside(known: Placed, modules: Iterable[str]) -> tuple[fx.Node, ...]:
    """Ops and parameters of the modules and of what is in them."""
    starts = tuple(f"{module}." for module in modules)
    if not starts:
        return ()
    return tuple(
        node
        for node in known.names
        if f"{known.inputs[node].fqn if node in known.inputs else node.meta.get('fqn') or ''}.".startswith(starts)
        and (node.op == "placeholder" or is_op(node))
    )


__all__ = ["Placed", "Subject", "alike", "find", "placed", "vocabulary"]
