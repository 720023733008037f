"""The peak of a graph's memory: walk its nodes in order, with each storage alive from its first to its last use.

Graphs run as generated code that drops every value after its last use, so lifetimes are known in advance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from fxpar.exec_graph import collective_kind
from fxpar.memory.workspace import Conditions, workspace_bytes
from fxpar.remat import Storages, saved_bytes, trace_storages

ONE_THREAD = Conditions()


@dataclass(frozen=True)
class Peak:
    """Bytes at the node where a graph holds most, over what its caller keeps (parameters, batch, accumulators).

    `forward_bytes`: values of the forward; `again_bytes`: those computed again in the backward; `backward_bytes`: other
    values of the backward; `result_bytes`: what the graph returns (gradients), as far as it exists at that node;
    `workspace_bytes`: what the node's kernel allocates for itself; `message_bytes`: what pipeline stages have received
    and not used yet or are sending, and the batches of micro-batches under way. `saved_bytes` is what lives between
    forward and backward, in a pipeline of all micro-batches at once, at most.

    Of a pipeline's rank, results are what its stages add up gradients in, and the forward's values those of all
    micro-batches under way.
    """

    node: str
    forward_bytes: int
    again_bytes: int
    backward_bytes: int
    result_bytes: int
    workspace_bytes: int
    saved_bytes: int
    message_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        parts = (self.forward_bytes, self.again_bytes, self.backward_bytes)
        return sum(parts) + self.result_bytes + self.workspace_bytes + self.message_bytes


def body_peak(
    graph: fx.Graph,
    dims: Mapping[sympy.Symbol, int],
    coordinates: Mapping[str, int] | None = None,
    conditions: Conditions = ONE_THREAD,
) -> Peak:
    """The peak of a lowered graph on one CPU rank (at `coordinates` of the mesh), with the dynamic dims of the
    micro-batch at `dims`.
    """
    storages = trace_storages(graph, dims, coordinates)
    kinds = _kinds(graph, storages)
    dies = _deaths(graph, storages)
    live: dict[str, int] = defaultdict(int)
    born: set[int] = set(storages.borrowed)
    best, at, workspace_at = {}, "", 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for storage in storages.of[node]:
            if storage not in born:
                born.add(storage)
                live[kinds[storage]] += storages.nbytes[storage]
        workspace = workspace_bytes(node, dims, conditions)
        if sum(live.values()) + workspace > sum(best.values()) + workspace_at:
            best, at, workspace_at = dict(live), node.name, workspace
        for storage in dies.get(node, ()):
            live[kinds[storage]] -= storages.nbytes[storage]
    found = {f"{kind}_bytes": best.get(kind, 0) for kind in ("forward", "again", "backward", "result")}
    return Peak(at, **found, workspace_bytes=workspace_at, saved_bytes=saved_bytes(graph, storages))


def _kinds(graph: fx.Graph, storages: Storages) -> dict[int, str]:
    """What each storage is for, by the node that makes it."""
    (output,) = graph.find_nodes(op="output")
    kinds = {s: "result" for node in output.all_input_nodes for s in storages.of[node]}
    for node in graph.nodes:
        if node.op == "call_function":
            for storage in storages.of[node]:
                kinds.setdefault(storage, kind_of(node))
    return kinds


def kind_of(node: fx.Node) -> str:
    """What the value of a call is for: "forward", "again" (the forward's, in the backward) or "backward"."""
    if node.meta.get("again"):
        return "again"
    return "backward" if node.meta.get("backward") else "forward"


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
