"""What a graph holds over its nodes: walk them in order, with each storage alive from its first to its last use.

Graphs run as generated code that drops every value after its last use, so lifetimes are known in advance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import sympy
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.node_meta import is_backward, is_on_host
from fxpar.memory.series import HOST, KINDS, Moment, Series
from fxpar.memory.workspace import Conditions, workspace_bytes
from fxpar.remat import Storages, saved_storages, trace_places

ONE_THREAD = Conditions()


def body_series(
    graph: fx.Graph,
    dims: Mapping[sympy.Symbol, int],
    places: Sequence[Mapping[str, int]] = ({},),
    conditions: Conditions = ONE_THREAD,
) -> Series:
    """What a lowered graph holds at each of its calls on the CPU rank that is fullest, of those at `places` on the axes
    of the mesh, with the dynamic dims of the micro-batch at `dims`.
    """
    found = [_series(graph, dims, storages, conditions) for storages in trace_places(graph, dims, places)]
    return max(found, key=lambda series: series.peak.total_bytes)


def _series(graph: fx.Graph, dims: Mapping[sympy.Symbol, int], storages: Storages, conditions: Conditions) -> Series:
    saved = saved_storages(graph, storages)
    kinds = _kinds(graph, storages, saved)
    dies = _deaths(graph, storages)
    live = [0] * len(KINDS)
    born: set[int] = set(storages.borrowed)
    moments: list[Moment] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for storage in storages.of[node]:
            if storage not in born:
                born.add(storage)
                live[kinds[storage]] += storages.nbytes[storage]
        moments.append(Moment(node, tuple(live), workspace_bytes(node, dims, conditions)))
        for storage in dies.get(node, ()):
            live[kinds[storage]] -= storages.nbytes[storage]
    return Series(tuple(moments), sum(storages.nbytes[storage] for storage in saved))


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
