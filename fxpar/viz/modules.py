"""The module tree of a graph, and how the parts of each module lie in a drawing: layers, order, edges.

A module's parts ("items") are its submodules, runs of its own nodes between calls of submodules, and single nodes.
Drawn from top to bottom, an item stands below all that it takes values from.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx

SHORT_RUN = 4  # fewer own nodes in a row than this are drawn one by one
ROW = 6  # items without any edge stand in rows of so many
SWEEPS = 4

Kind = Literal["module", "run", "node", "input", "output"]


@dataclass(frozen=True)
class ModuleItem:
    """One box inside of a module. `nodes` are numbers of all nodes in it, ascending; `module` is set for a module.

    Of an input or an output of the graph `label` is its name, and `nodes` the nodes that read it, or the one that makes
    it.
    """

    kind: Kind
    nodes: tuple[int, ...]
    label: str = ""
    module: Module | None = None


@dataclass
class Module:
    """A module call: `name` is the last component of `fqn`; `items` in program order of their first nodes."""

    name: str
    fqn: str
    items: list[ModuleItem] = field(default_factory=list)
    nodes: tuple[int, ...] = ()

    def walk(self) -> Iterable[Module]:
        """This module and all below it, parents first."""
        yield self
        for item in self.items:
            if item.module is not None:
                yield from item.module.walk()


@dataclass(frozen=True)
class Edge:
    """Values that one item hands to another: `path` leads from the source through bends to the target.

    Items are numbered as in `Module.items`, bends follow them. `back` marks an edge against the order of layers, which
    only a module that is called several times has.
    """

    path: tuple[int, ...]
    values: tuple[int | str, ...]
    back: bool = False


@dataclass(frozen=True)
class Drawing:
    """`layers` from top to bottom, each from left to right, with numbers of items and bends."""

    layers: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]


def module_tree(fqns: Mapping[int, str]) -> Module:
    """The tree of the nodes (numbers ascending, with their modules' FQNs); the root's FQN is ""."""
    paths = {number: tuple(fqn.split(".")) if fqn else () for number, fqn in fqns.items()}
    return _module("", "", list(paths), paths, 0)


def _module(name: str, fqn: str, nodes: list[int], paths: Mapping[int, tuple[str, ...]], depth: int) -> Module:
    module = Module(name, fqn, nodes=tuple(nodes))
    called: dict[str, list[int]] = defaultdict(list)
    for number in nodes:
        if len(paths[number]) > depth:
            called[paths[number][depth]].append(number)
    run: list[int] = []
    for number in nodes:
        child = paths[number][depth] if len(paths[number]) > depth else None
        if child is None:
            run.append(number)
            continue
        if called[child]:
            _add_run(module, run, bool(called))
            inner = _module(child, f"{fqn}.{child}" if fqn else child, called[child], paths, depth + 1)
            module.items.append(ModuleItem("module", inner.nodes, module=inner))
            called[child] = []
            run = []
    _add_run(module, run, bool(called))
    return module


def _add_run(module: Module, nodes: list[int], among_modules: bool) -> None:
    """Own nodes of a module: one by one, or as a run if they are many and stand between submodules."""
    if among_modules and len(nodes) >= SHORT_RUN:
        module.items.append(ModuleItem("run", tuple(nodes)))
    else:
        module.items += [ModuleItem("node", (number,)) for number in nodes]


def run_as_module(run: ModuleItem) -> Module:
    """A run's own inside, to be drawn as a module is."""
    return Module("", "", [ModuleItem("node", (number,)) for number in run.nodes], run.nodes)


Reads = Callable[[int], Iterable[int | str]]


def draw(module: Module, reads: Reads) -> Drawing:
    """Layers, order and edges of the module's items; `reads(n)` are the values that node n reads: numbers of nodes, or
    names of inputs of the graph.
    """
    values = _values(module, reads)
    order = range(len(module.items))
    forward, back = _acyclic(values)
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(sorted({i for edge in forward for i in edge}))
    graph.add_edges_from(forward)
    layer = _layers(graph)
    paths, layer = _bends(forward, layer, len(module.items))
    rows = _ordered(paths, layer)
    linked = set(graph) | {i for edge in back for i in edge}
    loose = [i for i in order if i not in linked]
    rows += [tuple(i for i in order if i in linked and i not in graph)] if linked - set(graph) else []
    rows += [tuple(loose[i : i + ROW]) for i in range(0, len(loose), ROW)]
    edges = [Edge(tuple(paths[pair]), tuple(values[pair])) for pair in forward]
    edges += [Edge(pair, tuple(values[pair]), back=True) for pair in back]
    return Drawing(tuple(rows), tuple(edges))


def _values(module: Module, reads: Reads) -> dict[tuple[int, int], dict[int | str, None]]:
    """(source, target) -> the values handed over, in order of use."""
    owner: dict[int | str, int] = {}
    for i, item in enumerate(module.items):
        if item.kind == "input":
            owner[item.label] = i
        elif item.kind != "output":
            owner.update((number, i) for number in item.nodes)
    found: dict[tuple[int, int], dict[int | str, None]] = defaultdict(dict)
    for i, item in enumerate(module.items):
        if item.kind == "output":
            for number in item.nodes:
                if number in owner:
                    found[owner[number], i][number] = None
            continue
        for number in item.nodes if item.kind != "input" else ():
            for value in reads(number):
                source = owner.get(value)
                if source is not None and source != i:
                    found[source, i][value] = None
    return found


def _acyclic(edges: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The edges that point down, and those that would close a cycle: the ones against program order."""
    graph = nx.DiGraph(list(edges))
    component = {i: number for number, part in enumerate(nx.strongly_connected_components(graph)) for i in part}
    back = [(a, b) for a, b in graph.edges if component[a] == component[b] and a > b]
    return [edge for edge in graph.edges if edge not in set(back)], back


def _layers(graph: nx.DiGraph) -> dict[int, int]:
    """As high as its operands allow; what has none stands right above its first user."""
    layer = {i: depth for depth, generation in enumerate(nx.topological_generations(graph)) for i in generation}
    for i in graph:
        if not graph.pred[i]:
            layer[i] = min(layer[user] for user in graph.succ[i]) - 1
    return layer


def _bends(
    edges: Sequence[tuple[int, int]], layer: dict[int, int], count: int
) -> tuple[dict[tuple[int, int], list[int]], dict[int, int]]:
    """Edges over several layers bend once in each; all edges from one source share its bends."""
    layer = dict(layer)
    chain: dict[int, list[int]] = defaultdict(list)
    paths: dict[tuple[int, int], list[int]] = {}
    for source, target in edges:
        while len(chain[source]) < layer[target] - layer[source] - 1:
            layer[count] = layer[source] + len(chain[source]) + 1
            chain[source].append(count)
            count += 1
        paths[source, target] = [source, *chain[source][: layer[target] - layer[source] - 1], target]
    return paths, layer


def _ordered(paths: Mapping[tuple[int, int], Sequence[int]], layer: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Rows in which neighbours in the rows above and below lie close: the barycentre heuristic."""
    above: dict[int, set[int]] = defaultdict(set)
    below: dict[int, set[int]] = defaultdict(set)
    for path in paths.values():
        for a, b in itertools.pairwise(path):
            below[a].add(b)
            above[b].add(a)
    rows: list[list[int]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for i in sorted(layer):
        rows[layer[i]].append(i)
    place = {i: k for row in rows for k, i in enumerate(row)}

    def centre(i: int, near: Mapping[int, set[int]]) -> float:
        return sum(place[other] for other in near[i]) / len(near[i]) if near[i] else place[i]

    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            row.sort(key=lambda i: centre(i, near))
            place.update({i: k for k, i in enumerate(row)})
    return [tuple(row) for row in rows if row]
