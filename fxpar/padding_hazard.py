"""Can a model see the padding at the end of a batch? Where it can, a batch must not be padded."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fxpar.graph import LogicalGraph, TensorMeta

aten = torch.ops.aten
own = torch.ops.fxpar

# Reductions whose result depends on every element of the reduced dim; a running sum sees only what is before it.
_REDUCTIONS = {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.logsumexp.default,
}
_BATCH_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
}


def padding_hazard(logical: LogicalGraph, token: sympy.Symbol | None) -> str | None:
    """The first forward op through which padded tokens would reach real ones, in words; None if there is none.

    Attention is safe if it is causal, or told documents or a mask. A sum down to a scalar is the loss: padded tokens
    have labels that it ignores. Softmax and products over tokens (attention written out) are taken to be masked.
    """
    if token is None:
        return None
    for node in logical.gm.graph.nodes:
        if node.op == "call_function" and not node.meta.get("backward") and _mixes(node, token):
            where = node.meta.get("source") or node.meta.get("fqn") or "the model"
            return f"{node.target} at {where} reads all tokens, padding included"
    return None


def _mixes(node: fx.Node, token: sympy.Symbol) -> bool:
    if node.target is own.attention.default:
        query, documents, mask, causal = node.args[0], node.args[3], node.args[4], node.args[5]
        return not causal and documents is None and mask is None and _has(query, 2, token)
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("tensor"), TensorMeta):
        return False
    rank = len(source.meta["tensor"].shape)
    if node.target in _REDUCTIONS:
        dims: Any = node.args[1] if len(node.args) > 1 else None
        dims = range(rank) if dims is None or dims == [] else ([dims] if isinstance(dims, int) else dims)
        result = node.meta["tensor"]
        scalar = isinstance(result, TensorMeta) and not result.shape
        return not scalar and any(_has(source, d % rank, token) for d in dims)
    if node.target in _BATCH_NORMS:
        return any(_has(source, d, token) for d in range(rank) if d != 1)
    if node.target is aten.convolution.default:
        return any(_has(source, d, token) for d in range(2, rank))
    return False


def _has(node: Any, dim: int, token: sympy.Symbol) -> bool:
    size = node.meta["tensor"].shape[dim]
    return not isinstance(size, int) and token in size.free_symbols
