"""What a graph holds over its nodes: walk them in order, with each storage alive from its first to its last use.

Graphs run as generated code that drops every value after its last use, so lifetimes are known in advance.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.node_meta import is_backward, is_on_host
from fxpar.memory.series import HOST, KINDS, Moment, Series
from fxpar.memory.workspace import Conditions, workspace_bytes
from fxpar.remat import SizedStorages, Storages, saved_storages, trace_sized

ONE_THREAD = Conditions()


@dataclass(frozen=True)
class _Lives:
    """Of a graph at one place: its storages, and by call those that are made, each for what, as a place in KINDS, and
    those that are freed behind it.
    """

    sized: SizedStorages
    saved: frozenset[int]
    steps: tuple[tuple[fx.Node, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...]


def body_series(
    graph: fx.Graph,
    dims: Mapping[sympy.Symbol, int],
    places: Sequence[Mapping[str, int]] = ({},),
    conditions: Conditions = ONE_THREAD,
    *,
    fixed: bool = False,
) -> Series:
    """What a lowered graph holds at each of its calls on the CPU rank that is fullest, of those at `places` on the axes
    of the mesh, with the dynamic dims of the micro-batch at `dims`. `fixed`: the graph is not changed any more, so that
    it is traced once for all sizes.
    """
    lives, nbytes = _traced(graph, dims, places, _known(graph) if fixed else {})
    others = (body_series(graph, dims, [place], conditions, fixed=fixed) for place in lives.sized.differ)
    return max([_series(lives, nbytes, dims, conditions), *others], key=lambda series: series.peak.total_bytes)


@functools.lru_cache(maxsize=32)  # a search asks for the same few graphs, at several sizes
def _known(graph: fx.Graph) -> dict[Any, _Lives]:
    """What was found of a graph, by places."""
    return {}


def _traced(
    graph: fx.Graph,
    dims: Mapping[sympy.Symbol, int],
    places: Sequence[Mapping[str, int]],
    known: dict[Any, _Lives],
) -> tuple[_Lives, tuple[int, ...]]:
    """At the first of the places, and the bytes of each storage."""
    key = tuple(tuple(place.items()) for place in places)
    nbytes = known[key].sized.nbytes(dims) if key in known else None
    if nbytes is None:
        known[key] = _lives(graph, trace_sized(graph.nodes, dims, places[0], places[1:]))
        nbytes = known[key].sized.storages.nbytes
    return known[key], nbytes


def _lives(graph: fx.Graph, sized: SizedStorages) -> _Lives:
    storages = sized.storages
    saved = saved_storages(graph, storages)
    kinds, dies = _kinds(graph, storages, saved), _deaths(graph, storages)
    born = set(storages.borrowed)
    steps = []

    def of_kind(found: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple((storage, kinds[storage]) for storage in found)

    for node in graph.nodes:
        if node.op == "call_function":
            births = [storage for storage in storages.of[node] if storage not in born]
            born.update(births)
            steps.append((node, of_kind(births), of_kind(dies.get(node, ()))))
    return _Lives(sized, saved, tuple(steps))


def _series(lives: _Lives, nbytes: Sequence[int], dims: Mapping[sympy.Symbol, int], conditions: Conditions) -> Series:
    live = [0] * len(KINDS)
    moments: list[Moment] = []
    for node, births, deaths in lives.steps:
        for storage, kind in births:
            live[kind] += nbytes[storage]
        moments.append(Moment(node, tuple(live), workspace_bytes(node, dims, conditions)))
        for storage, kind in deaths:
            live[kind] -= nbytes[storage]
    return Series(tuple(moments), sum(nbytes[storage] for storage in lives.saved))


def _kinds(graph: fx.Graph, storages: Storages, saved: Collection[int]) -> dict[int, int]:
    """What each storage is for, as a place in KINDS, by the node that makes it."""
    (output,) = graph.find_nodes(op="output")
    kinds = {s: "result" for node in output.all_input_nodes for s in storages.of[node]}
    for node in graph.nodes:
        if node.op == "call_function":
            for storage in storages.of[node]:
                kinds.setdefault(storage, kind_of(node, storage in saved))
    return {storage: KINDS.index(kind) for storage, kind in kinds.items()}


def kind_of(node: fx.Node, saved: bool) -> str:
    """What the value of a call is for: "saved" or "forward", "again" (the forward's, in the backward), "backward",
    "host".
    """
    if is_on_host(node):
        return HOST
    if node.meta.get("again"):
        return "again"
    if is_backward(node):
        return "backward"
    return "saved" if saved else "forward"


def _deaths(graph: fx.Graph, storages: Storages) -> dict[fx.Node, list[int]]:
    """Storages that are freed behind each node; borrowed ones and results are in none."""
    last: dict[int, fx.Node] = {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op not in ("call_function", "placeholder"):
            continue
        # A collective reads its operand until it is waited for.
        waits = [w for u in node.users if collective_kind(u) for w in u.users]
        final = max([node, *node.users, *waits], key=position.__getitem__)
        for storage in storages.of[node]:
            if storage not in last or position[final] > position[last[storage]]:
                last[storage] = final
    dies: dict[fx.Node, list[int]] = defaultdict(list)
    for storage, node in last.items():
        if storage not in storages.borrowed and node.op != "output":
            dies[node].append(storage)
    return dies
