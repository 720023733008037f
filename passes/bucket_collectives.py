"""Bucket collectives: independent collectives of one kind over the same group become one on a fused buffer.

Before: one collective per gradient (or per gathered parameter). After: few large ones; a bucket holds collectives of
the same op, group and dtype, of the same phase and `meta["bucket"]`, with sizes known in advance.

    %a_c = all_reduce(%a, "sum", "@dp")         %f   = fuse([%a, %b])
    %b_c = all_reduce(%b, "sum", "@dp")         %f_c = all_reduce(%f, "sum", "@dp")
                                                %a_w, %b_w = unfuse(%f_w, shapes)

A bucket belongs to the innermost module that all of its members are in.

Cost: the same bytes in fewer launches, and a copy in and out of the buffer, at most `bucket_mb` large.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.fqn import common_module
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import comm_of, fqn_of, local_tensor, phase_of
from fxpar.ir.pass_base import Tier, sort_topologically
from fxpar.ops import layout

c10d = torch.ops._c10d_functional
_ALL_REDUCE = c10d.all_reduce.default
_FUSABLE = (_ALL_REDUCE, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)


@dataclass(frozen=True)
class BucketCollectives:
    """Buckets hold at most `bucket_mb` of local data. Untagged collectives of the body are left alone unless `body`."""

    bucket_mb: float = 256.0
    body: bool = False
    name: ClassVar[str] = "bucket_collectives"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        buckets: dict[Any, list[fx.Node]] = defaultdict(list)
        depth = _depths(graph.graph)
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in _FUSABLE and _is_static(node):
                phase, tag = phase_of(node), node.meta.get("bucket", "")
                if phase == "body" and not tag and not self.body:
                    continue  # activations: order and overlap matter more than launches
                rows: fx.Node = node.args[0]  # type: ignore[assignment]
                buckets[(node.target, node.args[1:], local_tensor(rows).dtype, phase, tag, depth[node])].append(node)
        fused = False
        for members in buckets.values():
            for group in self._split(members):
                if len(group) > 1:
                    _fuse(graph.graph, group)
                    fused = True
        if fused:
            sort_topologically(graph.graph)

    def _split(self, members: list[fx.Node]) -> list[list[fx.Node]]:
        groups: list[list[fx.Node]] = [[]]
        filled = 0.0
        for node in members:
            meta = local_tensor(node.args[0])
            size = meta.numel({}) * meta.dtype.itemsize / 2**20
            if groups[-1] and filled + size > self.bucket_mb:
                groups.append([])
                filled = 0.0
            groups[-1].append(node)
            filled += size
        return groups


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """Collectives of the same phase and tag upstream of each node: two in one bucket never depend on each other."""
    depth: dict[fx.Node, int] = {}
    place = {node: (phase_of(node), node.meta.get("bucket", "")) for node in graph.nodes}
    for node in graph.nodes:
        upstream = [depth[o] + (o.target in _FUSABLE) for o in node.all_input_nodes if place[o] == place[node]]
        depth[node] = max(upstream, default=0)
    return depth


def _is_static(node: fx.Node) -> bool:
    rows: fx.Node = node.args[0]  # type: ignore[assignment]
    meta = rows.meta.get("local")
    return meta is not None and all(isinstance(s, int) for s in meta.shape)


def _fuse(graph: fx.Graph, members: list[fx.Node]) -> None:
    """One collective instead of `members`; the caller sorts the graph afterwards."""
    first, last = members[0], members[-1]
    whole = first.target is _ALL_REDUCE  # its operands carry no leading row dim
    inputs: list[fx.Node] = [m.args[0] for m in members]  # type: ignore[misc]
    waits = [next(iter(m.users)) for m in members]
    owner = common_module(map(fqn_of, members))

    def call(target: Any, args: tuple, local: Any) -> fx.Node:
        node = graph.call_function(target, args)
        for key in ("fqn", "source", "backward", "phase", "bucket"):
            if key in last.meta:
                node.meta[key] = last.meta[key]
        node.meta["fqn"] = owner
        node.meta["local"] = node.meta["tensor"] = local
        return node

    def rows(meta: TensorMeta, whole: bool) -> tuple[int, tuple[int, ...]]:
        return (1, meta.shape) if whole else (meta.shape[0], meta.shape[1:])  # type: ignore[return-value]

    # Gathers start with the first member, whose operands are all there from the start; reductions with the last.
    anchor = first if first.target is c10d.all_gather_into_tensor.default else last
    with graph.inserting_before(anchor):
        if whole:
            inputs = [
                call(layout.lift, (i,), TensorMeta((1, *local_tensor(i).shape), local_tensor(i).dtype)) for i in inputs
            ]
            for lifted, member in zip(inputs, members, strict=True):
                lifted.meta["fqn"] = fqn_of(member)
        buffer = call(layout.fuse, (inputs,), _fused(members, rows, whole, sent=True))
        collective = call(last.target, (buffer, *last.args[1:]), _fused(members, rows, whole, sent=False))
        collective.meta["comm"] = (comm_of(first)[0], _joined([comm_of(m)[1] for m in members]))
        collective.meta["fused"] = len(members)
        wait = call(c10d.wait_tensor.default, (collective,), local_tensor(collective))
        shapes = [rows(local_tensor(m), whole)[1] for m in members]
        parts = call(layout.unfuse, (wait, shapes), tuple(local_tensor(w) for w in waits))
        for i, old in enumerate(waits):
            part = call(operator.getitem, (parts, i), local_tensor(old))
            if whole:
                part = call(layout.lower, (part,), local_tensor(old))
            part.meta.update({k: v for k, v in old.meta.items() if k in ("fqn", "tensor", "dist", "local", "buffer")})
            old.replace_all_uses_with(part)
    for old, member in zip(waits, members, strict=True):
        graph.erase_node(old)
        graph.erase_node(member)


def _operand(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _fused(members: list[fx.Node], rows: Any, whole: bool, *, sent: bool) -> TensorMeta:
    metas: list[TensorMeta] = [local_tensor(_operand(m)) if sent else local_tensor(m) for m in members]
    count, total = rows(metas[0], whole)[0], 0
    for meta in metas:
        size = 1
        for s in rows(meta, whole)[1]:
            size *= s
        total += size
    return TensorMeta((count, total), metas[0].dtype)


def _joined(metas: list[TensorMeta]) -> TensorMeta:
    return TensorMeta((sum(m.numel({}) for m in metas),), metas[0].dtype)
