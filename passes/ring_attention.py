"""Ring attention: attention whose tokens are cut over a ring becomes steps, between which keys and values travel.

Before: one call of attention for all tokens of a row, with queries, keys and values cut over the axes of a ring. After:
a step for each rank of the ring (`fxpar.ops.ring_steps`), in local shapes. A transfer starts before the step during
which it runs:

    %o, %l = attention(%q, %k, %v, %docs)       %kv0 = cat(%k, %v)
                                                %kv1 = shift(%kv0, "ring")
                                                %o0, %l0 = attention_block(%q, %kv0, None, None, %docs, step 0)
                                                %o, %l = attention_block(%q, %kv1, %o0, %l0, %docs, step 1)

In the backward keys and values go around again, and behind them the sum of their gradients so far, which ends at the
rank that has the keys: it adds what its own queries give.

Cost in bytes per rank of a ring of K, for keys and values of n bytes: n (K - 1) forward, 2 n (K - 1) backward. Results
are those of one call but for rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir import collectives as c
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import DOCUMENTS, POSITIONS, AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, local_meta, local_tensor, tensor_of
from fxpar.ir.pass_base import Tier
from fxpar.ops.attention_cpu import compute_dtype
from fxpar.ops.traits import ATTENTION, DOCUMENTS_AT
from fxpar.rules.view import documents_read, ring_of

aten, own = torch.ops.aten, torch.ops.fxpar


@dataclass(frozen=True)
class RingAttention:
    """No options."""

    name: ClassVar[str] = "ring_attention"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        rings = [(node, ring) for node in graph.graph.nodes if (ring := ring_of(node, graph.strategy))]
        if not rings:
            return
        given = {i.fqn: n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "batch"}
        for node, ring in rings:
            documents = documents_read(node)
            positions = None
            if documents is not None and documents is given.get(DOCUMENTS) and POSITIONS in given:
                positions = _whole(graph, given[POSITIONS])
            emit = _Emitter(graph, node, ring, positions)
            with graph.graph.inserting_before(node):
                (emit.backward if ATTENTION[node.target] else emit.forward)()  # type: ignore[index]
            graph.graph.erase_node(node)


def _whole(graph: AnnotatedGraph, node: fx.Node) -> fx.Node:
    """An input that comes whole; who reads it otherwise gets a part of the whole, which moves nothing."""
    lies = dist_of(node)
    if not any(lies.dims):
        return node
    dist = DistConfig.replicated(lies.mesh, lies.ndim, lies.dtype)
    readers = list(node.users)
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    value, meta = node, tensor_of(node)
    node.meta.update(dist=dist, dist_in=(), local=meta)
    with graph.graph.inserting_before(first):
        for dim, entry in ((d, e) for d, entries in enumerate(lies.dims) for e in entries):
            value = graph.graph.call_function(c.shard, (value, entry.axis, dim, entry.sections))
            dims = [(*have, entry) if d == dim else have for d, have in enumerate(dist.dims)]
            dist = replace(dist, dims=tuple(dims))
            local = TensorMeta(dist.local_shape(meta.shape), meta.dtype)
            value.meta.update(tensor=meta, dist=dist, local=local, fqn="", source=None, backward=False, phase="body")
    for reader in readers:
        reader.replace_input_with(node, value)
    return node


class _Emitter:
    """Makes the calls that replace one call of attention."""

    def __init__(self, graph: AnnotatedGraph, node: fx.Node, ring: str, positions: fx.Node | None) -> None:
        self.graph, self.node, self.ring = graph.graph, node, ring
        self.degree = graph.strategy.mesh.degree(ring)
        args: Any = node.args
        documents, _mask, causal, window, scale, softcap, *self.sinks = args[DOCUMENTS_AT[node.target] :]
        self.place = (documents, positions, f"#{ring}")
        self.rule = (causal, window, scale, softcap)

    def forward(self) -> None:
        q, k, v = self.node.args[:3]
        results: Any = local_meta(self.node)
        (out_meta, lse_meta), kv, found = results, self._side_by_side(k, v), [None, None]
        for step in range(self.degree):
            coming: Any = self._shift(kv) if step < self.degree - 1 else None
            wide = TensorMeta(out_meta.shape, compute_dtype(out_meta.dtype))
            metas = (out_meta if coming is None else wide, lse_meta)
            found = self._block(own.attention_block.default, (q, kv, *found), step, metas, () if coming else self.sinks)
            kv = coming
        self._results(found)

    def backward(self) -> None:
        dout, q, k, v, out, lse = self.node.args[:6]
        results: Any = local_meta(self.node)
        kv = self._side_by_side(k, v)
        metas = (local_tensor(q), local_tensor(kv))
        dq: Any = None
        home: Any = None  # gradients of the rank's own keys and values
        away: Any = None  # the sum of those of the others that it has, which travels
        for step in range(self.degree):
            coming: Any = self._shift(kv) if step < self.degree - 1 else None
            arriving = self._shift(away) if away else None
            terms = self._block(own.attention_block_backward.default, (dout, q, kv, out, lse), step, metas)
            dq = self._add(dq, terms[0]) if dq else terms[0]
            if home is None:
                home = terms[1]
            else:
                away = self._add(arriving, terms[1]) if arriving else terms[1]
            kv = coming
        dk, dv = self._apart(self._add(self._shift(away), home), *results[1:])
        self._results([dq, dk, dv])

    def _call(self, target: Any, args: tuple[Any, ...], meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        for key in ("fqn", "reader", "source", "backward", "phase"):
            if key in self.node.meta:
                node.meta[key] = self.node.meta[key]
        node.meta.update(tensor=meta, local=meta)  # of a rank: what lies between ranks has no whole
        return node

    def _side_by_side(self, k: Any, v: Any) -> fx.Node:
        """Keys and values [B, S, Hkv, E + Ev], in which memory they travel."""
        rows = []
        for one in (k, v):
            B, H, S, E = local_tensor(one).shape
            meta = TensorMeta((B, S, H, E), local_tensor(one).dtype)
            rows.append(self._call(aten.transpose.int, (one, 1, 2), meta))
        width: Any = rows[0].meta["local"].shape[3] + rows[1].meta["local"].shape[3]
        meta = TensorMeta((*rows[0].meta["local"].shape[:3], width), rows[0].meta["local"].dtype)
        return self._call(aten.cat.default, (rows, 3), meta)

    def _apart(self, kv: fx.Node, *metas: TensorMeta) -> list[fx.Node]:
        found: list[fx.Node] = []
        begin: Any = 0
        for meta in metas:
            B, H, S, E = meta.shape
            end = begin + E
            part = self._call(aten.slice.Tensor, (kv, 3, begin, end), TensorMeta((B, S, H, E), meta.dtype))
            found.append(self._call(aten.transpose.int, (part, 1, 2), meta))
            begin = end
        return found

    def _shift(self, value: fx.Node) -> fx.Node:
        return self._call(c.shift, (value, self.ring), local_tensor(value))

    def _add(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self._call(aten.add.Tensor, (one, other), local_tensor(one))

    def _block(
        self, op: Any, operands: tuple[Any, ...], step: int, metas: tuple[TensorMeta, ...], sinks: Iterable[Any] = ()
    ) -> list[fx.Node]:
        node = self._call(op, (*operands, *self.place, step, self.degree, *self.rule, *sinks), metas)
        return [self._call(operator.getitem, (node, i), meta) for i, meta in enumerate(metas)]

    def _results(self, found: list[Any]) -> None:
        """Put `found` in the place of the call's results, with the placements that these have."""
        for user in list(self.node.users):
            new = found[user.args[1]]  # type: ignore[index]
            for key in ("tensor", "dist"):
                new.meta[key] = user.meta[key]
            user.replace_all_uses_with(new)
            self.graph.erase_node(user)
