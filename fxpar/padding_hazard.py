"""Can a model see the padding at the end of a batch? Where it can, a batch must not be padded."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.graph import ForwardGraph, LogicalGraph, TensorMeta

aten = torch.ops.aten
own = torch.ops.fxpar

# Reductions whose result depends on every element of the reduced dim; a running sum sees only what is before it.
_REDUCTIONS = {
    aten.sum.default,
    aten.mean.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.logsumexp.default,
}
_SOFTMAXES = {aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default}
_LOOKED_THROUGH = {aten._to_copy.default, aten.view.default, aten.expand.default, aten.clone.default}
_BATCH_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
}


def padding_hazard(logical: LogicalGraph, token: sympy.Symbol | None) -> str | None:
    """The first forward op through which padded tokens would reach real ones, in words; None if there is none.

    Attention is safe if it is causal, or told documents or a mask; written out, if a mask of [T, T] is put on the
    scores before the softmax. A sum down to a scalar that no token sees again is the loss: padded tokens have labels
    that it ignores. A forward whose loss is outside may return any sum, so only sums of cross entropies are safe there,
    and what it counts from the end of the tokens would move.
    """
    if token is None:
        return None
    weighted = _weighted(logical)
    outside = isinstance(logical, ForwardGraph)
    for node in logical.gm.graph.nodes:
        if node.op != "call_function" or node.meta.get("backward"):
            continue
        if (
            _mixes(node, token, weighted, outside)
            or _moves_the_end(node, token)
            or (outside and _counts_from_the_end(node, token))
        ):
            where = node.meta.get("source") or node.meta.get("fqn") or "the model"
            return f"{node.target} at {where} reads all tokens, padding included"
    return None


def _weighted(logical: LogicalGraph) -> set[fx.Node]:
    """Nodes computed from parameters; a mask is not."""
    found: set[fx.Node] = set()
    for node, info in zip(logical.placeholders, logical.inputs, strict=True):
        if info.kind == "param":
            found.add(node)
    for node in logical.gm.graph.nodes:
        if any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _is_masked(scores: fx.Node, token: sympy.Symbol, weighted: set[fx.Node]) -> bool:
    """Whether a [T, T] tensor that does not depend on weights has been put on the scores since they were made."""
    queue, seen = [scores], set()
    while queue:
        node = queue.pop()
        if node in seen or node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            if node.op == "call_function" and node.target in _LOOKED_THROUGH and node not in seen:
                seen.add(node)
                queue += node.all_input_nodes[:1]
            continue
        seen.add(node)
        for operand in node.all_input_nodes:
            shape = operand.meta["tensor"].shape if isinstance(operand.meta.get("tensor"), TensorMeta) else ()
            square = sum(not isinstance(s, int) and token in s.free_symbols for s in shape) >= 2
            if square and operand not in weighted:
                return True
            queue.append(operand)
    return False


def _seen_again(node: fx.Node, token: sympy.Symbol) -> bool:
    """Whether a scalar goes back into something that has tokens, in the forward."""
    queue, seen = [node], set()
    while queue:
        here = queue.pop()
        for user in here.users:
            if user in seen or user.op == "output" or user.meta.get("backward"):
                continue
            seen.add(user)
            meta = user.meta.get("tensor")
            shape = meta.shape if isinstance(meta, TensorMeta) else ()
            if any(not isinstance(s, int) and token in s.free_symbols for s in shape):
                return True
            queue.append(user)
    return False


def _is_loss(value: fx.Node, weighted: set[fx.Node]) -> bool:
    """Whether a value is made of cross entropies of tokens, which are zero where the labels are padding."""
    queue, seen = [value], {value}
    while queue:
        node = queue.pop()
        source: Any = node.args[0] if node.args else None
        if node not in weighted or (node.target is operator.getitem and source.target is own.cross_entropy.default):
            continue
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _LOOKED_THROUGH:
            return False
        queue += [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(node.all_input_nodes)
    return True


def _counts_from_the_end(node: fx.Node, token: sympy.Symbol) -> bool:
    """`x[-1]`, `x[-n:]` and the like on a token dim; `x[:-n]` is an output of another length."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or len(node.args) < 3:
        return False
    source, dim, start = node.args[:3]
    rank = len(source.meta["tensor"].shape)  # type: ignore[union-attr]
    return _has(source, dim % rank, token) and (isinstance(start, fx.Node) or (start or 0) < 0)  # type: ignore


def _moves_the_end(node: fx.Node, token: sympy.Symbol) -> bool:
    """A token dim turned round: padding at its end would come first."""
    if node.target not in (aten.flip.default, aten.roll.default):
        return False
    source: Any = node.args[0]
    dims: Any = node.args[1 if node.target is aten.flip.default else 2 :][:1]
    rank = len(source.meta["tensor"].shape)
    return any(_has(source, d % rank, token) for d in (dims[0] if dims and dims[0] else range(rank)))


def _mixes(node: fx.Node, token: sympy.Symbol, weighted: set[fx.Node], outside: bool) -> bool:
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
        over_tokens = any(_has(source, d % rank, token) for d in dims)
        if not over_tokens or source not in weighted:
            return False
        return not scalar or _seen_again(node, token) or (outside and not _is_loss(source, weighted))
    if node.target in _SOFTMAXES:
        dim: Any = node.args[1]
        return _has(source, dim % rank, token) and source in weighted and not _is_masked(source, token, weighted)
    if node.target in _BATCH_NORMS:
        return any(_has(source, d, token) for d in range(rank) if d != 1)
    if node.target is aten.convolution.default:
        return any(_has(source, d, token) for d in range(2, rank))
    return False


def _has(node: Any, dim: int, token: sympy.Symbol) -> bool:
    size = node.meta["tensor"].shape[dim]
    return not isinstance(size, int) and token in size.free_symbols
