"""Graphs as plain data: for pickling, caching and JSON dumps.

`torch.fx.GraphModule` pickles itself as source code and traces it again, which loses metadata and runs into functions
that look at shapes. Here a graph is a list of node records; targets are names.

For pickles between the processes of one job: a pickle is code. Files of others are read by `fxpar.graph_files.codec`.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from torch import fx

from fxpar.errors import GraphFormatError

OpOverload = type(torch.ops.aten.mm.default)  # torch has no public name for it
_META = (
    "tensor",
    "local",
    "dist",
    "sym",
    "fqn",
    "source",
    "backward",
    "phase",
    "comm",
    "fused",
    "kind",
    "buffer",
    "again",
    "host",
    "chunk",
    "gradient",
    "ep_chunk",
    "experts",
    "reader",
    "pass",
)


class NodeRef:
    """Stands for a node, by position, inside arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple:
        return NodeRef, (self.index,)


def target_name(target: Any) -> str:
    """`aten.mm.default` for an op, `module:name` for a function."""
    if isinstance(target, OpOverload):
        return str(target)
    module = "operator" if getattr(target, "__module__", "") == "_operator" else target.__module__
    return f"{module}:{target.__qualname__}"


def target_from_name(name: str) -> Any:
    """Inverse of `target_name`. Raises GraphFormatError for a name that does not resolve."""
    try:
        if ":" in name:
            module, attribute = name.split(":")
            return getattr(operator if module == "operator" else importlib.import_module(module), attribute)
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (AttributeError, ImportError, ValueError) as error:
        raise GraphFormatError(f"op {name!r} of a saved graph is not available here: {error}") from error


def graph_to_data(graph: fx.Graph) -> list[dict[str, Any]]:
    """Node records in order; arguments refer to earlier nodes by `NodeRef`."""
    index = {node: i for i, node in enumerate(graph.nodes)}

    def ref(node: fx.Node) -> Any:
        return NodeRef(index[node])

    return [
        {
            "op": node.op,
            "name": node.name,
            "target": target_name(node.target) if node.op == "call_function" else str(node.target),
            "args": _thaw(fx.node.map_arg(node.args, ref)),
            "kwargs": dict(fx.node.map_arg(node.kwargs, ref)),
            "meta": {k: node.meta[k] for k in _META if k in node.meta},
        }
        for node in graph.nodes
    ]


def graph_from_data(data: list[dict[str, Any]]) -> fx.Graph:
    """Inverse of `graph_to_data`."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def back(value: Any) -> Any:
        if isinstance(value, NodeRef):
            return nodes[value.index]
        if isinstance(value, list | tuple):
            return type(value)(back(v) for v in value)
        if isinstance(value, dict):
            return {k: back(v) for k, v in value.items()}
        return value

    for record in data:
        target = target_from_name(record["target"]) if record["op"] == "call_function" else record["target"]
        node = graph.create_node(
            record["op"], target, back(record["args"]), back(record["kwargs"]), name=record["name"]
        )
        node.meta.update(record["meta"])
        nodes.append(node)
    return graph


def _thaw(value: Any) -> Any:
    """fx's immutable lists as plain ones."""
    if isinstance(value, tuple):
        return tuple(_thaw(v) for v in value)
    if isinstance(value, list):
        return [_thaw(v) for v in value]
    return value
