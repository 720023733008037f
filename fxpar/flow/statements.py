"""What is known of ops whose sharding rule does not say how tokens flow through them.

A statement gives the flow of a call's results, or None to leave it to the op's sharding rule: what may be cut along the
tokens without communication treats each token (each document) by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.flow.call import FlowCall
from fxpar.flow.value import Flow, row
from fxpar.ir.dist_config import Shard
from fxpar.ir.node_meta import tensor_metas, whole_meta
from fxpar.ops import traits

aten = torch.ops.aten
own = torch.ops.fxpar
Flows = Flow | tuple[Flow, ...]
Statement = Callable[[FlowCall], Flows | None]

_TO_THE_END = 2**63 - 1  # as ATen writes `x[a:]`
POSITION_KEYS = ("position_ids", "positions")
"""Batch keys that count from 0 in every document."""


def attention(call: FlowCall) -> Flows | None:
    """`fxpar::attention`: a token sees those of its row; of its document, once it is told documents."""
    q, k, v, *rest = call.flows
    args = call.node.args
    documents = rest.pop(0) if args[3] is not None else None
    mask = rest.pop(0) if args[4] is not None else None  # what is left: sinks
    batch = q.dims[:1]
    if batch and batch[0].dim == 0 and all(f.dims in ((), batch) for f in (q, k, v, *rest)):
        return (Flow(dims=batch),) * 2  # rows of the batch, each by itself
    rows = (Shard(2),)
    plain = all(not f.dims or call.is_token(i, 2) for i, f in enumerate((q, k, v)))
    if not plain or any(f.dims not in ((), rows) for f in (q, k, v)) or k.dims != v.dims:
        return row(call.node, "attends over more than tokens")
    if any(f.dims not in ((), q.dims) for f in rest):
        return row(call.node, "is given sinks of another kind than one per token")
    if not k.dims:
        return (Flow(dims=q.dims),) * 2 if documents is None and (mask is None or not mask.dims) else None
    if not q.dims:
        return row(call.node, "sums up all tokens of the row")
    if mask is not None and not (mask.constant or mask.pairs(Shard(2), Shard(3))):
        return row(call.node, "is told a mask of another kind than pairs of tokens")
    numbered = documents is not None and documents.kind == "number"
    if call.packs:
        if documents is not None and not numbered and documents.everywhere is None:
            return row(call.node, "is told documents that the model makes")
        call.at("documents")
    elif not args[5] and not numbered:
        return row(call.node, "lets tokens see later ones")
    return (Flow(dims=rows),) * 2


def recurrence(call: FlowCall) -> Flows | None:
    """`fxpar::recurrence`, `fxpar::causal_conv`: a token sees those before it, in its document once told documents."""
    documents = call.node.args[traits.DOCUMENTS_AT[call.node.target]]
    values = call.flows if documents is None else call.flows[:-1]
    dim = 2 if call.node.target is own.causal_conv.default else 1
    rows, batch = (Shard(dim),), (Shard(0),)
    if all(f.dims in ((), batch) for f in call.flows):
        return Flow(dims=max(f.dims for f in values)) if any(f.dims for f in values) else None
    if any(f.dims not in ((), rows) or (f.dims and not call.is_token(i, dim)) for i, f in enumerate(values)):
        return row(call.node, "runs over more than tokens")
    if documents is not None and call.flows[-1].kind != "number":
        return row(call.node, "is told documents that the model makes")
    call.at("documents")
    return Flow(dims=rows)


def softmax(call: FlowCall) -> Flows | None:
    """A softmax over the keys of [queries, keys]: over those of the document, once others are masked."""
    (x,) = call.flows
    over = Shard(call.view.dim(call.argument(1, "dim")))
    if not any(s.dim == over.dim for s in x.dims):
        return None
    if not call.packs or len(x.dims) != 2 or not all(call.is_token(0, s.dim) and not s.sections for s in x.dims):
        return row(call.node, "normalises over tokens")
    call.at("softmax")
    return Flow(dims=x.dims, inside=True)


def count_up(call: FlowCall) -> Flows | None:
    """`arange` over the tokens: their positions."""
    if call.node.target is aten.arange.default:
        start, end, step = 0, call.argument(0, "end"), 1
    else:
        start, end, step = call.argument(0, "start"), call.argument(1, "end"), call.argument(2, "step", 1)
    if not any(call.depends(value) for value in (start, end, step)):
        return None
    if not isinstance(start, int) or step != 1 or call.meta.shape != (call.token,) or end - start != call.token:
        return row(call.node, "counts from or to the end of the tokens")
    call.at("positions")
    return Flow(dims=(Shard(0),))


def running(call: FlowCall) -> Flows | None:
    """`cumsum` and the like along the tokens: of what is before a token, where tokens alone order the dim."""
    x = call.flows[0]
    over = Shard(call.view.dim(call.argument(1, "dim")))
    if not any(s.dim == over.dim for s in x.dims):
        return None
    if over not in x.dims:  # the tokens repeat: behind the last one stands the first
        return row(call.node, "runs through the tokens more than once")
    plain, single = call.is_token(0, over.dim), len(x.dims) == 1
    outputs = len(call.view.outputs)
    if plain and single and call.node.target is aten.cumsum.default and _marks_starts(call):
        return Flow("number", x.dims)
    if not call.packs:
        return (Flow(dims=x.dims),) * outputs if outputs > 1 else Flow(dims=x.dims)
    counts = not call.meta.dtype.is_floating_point and not call.meta.dtype.is_complex
    if plain and single and call.node.target is aten.cumsum.default and (counts or x.everywhere is not None):
        call.at("count")
        return Flow(dims=x.dims)
    return row(call.node, "adds up the tokens before")


def _marks_starts(call: FlowCall) -> bool:
    """Whether what is added up is `positions == 0`, of positions that come with the batch."""
    node: Any = call.node.args[0]
    while isinstance(node, fx.Node) and node.target in (aten._to_copy.default, aten.view.default):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.eq.Scalar or node.args[1] != 0:
        return False
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target in (aten.unsqueeze.default, aten.view.default):
        source = source.args[0]
    return isinstance(source, fx.Node) and call.keys.get(source) in POSITION_KEYS


def part(call: FlowCall) -> Flows | None:
    """`table[a : a + T]`: the rows of the positions; a part of the tokens themselves is left to the rule."""
    x = call.flows[0]
    d = call.view.dim(call.argument(1, "dim", 0))
    start, end, step = call.argument(2, "start") or 0, call.argument(3, "end"), call.argument(4, "step", 1)
    if any(s.dim == d for s in x.dims):
        # A number of tokens may be longer than any sequence, and shorter than a row.
        size = call.shapes[0][d]
        whole = start in (0, -size) and step == 1 and (end is None or end in (size, _TO_THE_END))
        return None if whole else row(call.node, "takes a part of the tokens")
    if not call.depends(call.meta.shape[d]):
        return None
    if not isinstance(start, int) or start < 0 or step != 1 or call.meta.shape[d] != call.token or x.kind != "same":
        return row(call.node, "takes rows that the number of tokens decides")
    plain = all(size == 1 for size in call.shapes[0][:d]) and all(isinstance(s, int) for s in call.shapes[0])
    if call.packs and call.trained and not plain:
        return row(call.node, "takes as many rows of trained values as there are tokens, and not of a plain table")
    call.at("table")
    return Flow(dims=tuple(sorted((*x.dims, Shard(d)), key=lambda s: s.dim)))


def triangle(call: FlowCall) -> Flows | None:
    """`tril`, `triu` of [tokens, tokens]: by how far two tokens are apart, which is the same in a document."""
    (x,) = call.flows
    rank = len(call.shapes[0])
    square = rank >= 2 and call.is_token(0, rank - 2) and call.is_token(0, rank - 1)
    if not x.pairs(Shard(rank - 2), Shard(rank - 1)) or call.depends(call.argument(1, "diagonal", 0)):
        return None
    if not square:
        return row(call.node, "compares places of another kind than tokens")
    return replace(x, everywhere=None, padded=None)


def dropout(call: FlowCall) -> Flows | None:
    """`fxpar::dropout`: the elements of x; which ones are dropped is drawn anew for every row."""
    x = call.flows[0]
    return replace(x, everywhere=None, padded=0.0 if x.padded == 0 else None)


def lookup(call: FlowCall) -> Flows | None:
    """`fxpar::embedding`: rows of a table; a table whose rows are tokens is looked up by places in the row."""
    weight, _, row_ids = call.flows
    if row_ids.constant and not any(s.dim == 0 for s in weight.dims):
        return None
    return row(call.node, "looks up tokens by their place in the row")


def compare(call: FlowCall) -> Flows | None:
    """Whether two tokens are of one document."""
    if all(f.kind == "number" for f in call.flows) and len(call.flows) == 2:
        return None
    return row(call.node, "uses the numbers of documents") if any(f.kind == "number" for f in call.flows) else None


# ------------------------------------------------------------------------------- for `register_op(..., flow=...)`
def per_token(call: FlowCall) -> Flows | None:
    """Each token by itself, wherever the op may be cut."""
    return _of_tokens(call)


def tokens_before(call: FlowCall) -> Flows | None:
    """A token sees those before it in the row, and none behind it."""
    found = _of_tokens(call)
    return row(call.node, "lets tokens see those of other documents") if found and call.packs else found


def own_document(call: FlowCall) -> Flows | None:
    """A token sees those of its document. An operand must tell the op which that is: the batch's `document_ids`."""
    found = _of_tokens(call)
    told = any(f.kind == "number" for f in call.flows)
    return row(call.node, "is not told the documents") if found and not told else found


def _of_tokens(call: FlowCall) -> Flows | None:
    """Results with a value per token, of operands with a value per token and of constants; None for any others."""
    for i, flow in enumerate(call.flows):
        plain = flow.kind in ("same", "number") and len(flow.dims) <= 1
        if not plain or not all(call.is_token(i, s.dim) and not s.sections for s in flow.dims):
            return None
    found = []
    for meta in tensor_metas(call.node):
        dims = tuple(Shard(d) for d, size in enumerate(meta.shape if meta else ()) if size == call.token)
        if len(dims) != 1:
            return None
        found.append(Flow(dims=dims))
    return tuple(found) if isinstance(whole_meta(call.node), tuple) else found[0]


STATEMENTS: dict[Any, Statement] = {
    own.attention.default: attention,
    own.recurrence.default: recurrence,
    own.causal_conv.default: recurrence,
    own.dropout.default: dropout,
    own.embedding.default: lookup,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: softmax,
    aten.arange.default: count_up,
    aten.arange.start: count_up,
    aten.arange.start_step: count_up,
    aten.cumsum.default: running,
    aten.cumprod.default: running,
    aten.cummax.default: running,
    aten.cummin.default: running,
    aten.slice.Tensor: part,
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.eq.Tensor: compare,
    aten.ne.Tensor: compare,
}
"""Op -> what is known of it."""

ORDERED = {op for op, statement in STATEMENTS.items() if statement in (running, triangle, recurrence)}
"""Of these, ops that make something else of tokens in another order. Positions, and rows of a table by position, come
from the batch in a packed graph.
"""

# Argument positions that may be sizes: these ops do nothing else with them.
SIZES: dict[Any, tuple[int, ...]] = {op: (position,) for op, position in traits.SIZES.items()}
SIZES |= {
    aten.arange.default: (0,),
    aten.arange.start: (0, 1),
    aten.arange.start_step: (0, 1),
    aten.slice.Tensor: (2, 3),
}

# Ops of whose operands only the dtype counts.
UNREAD = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}

MOVES = traits.TAKES | {aten._to_copy.default, operator.getitem}
"""Ops whose result has the elements of operand 0, cast at most."""

NUMBERED = MOVES | {aten.eq.Tensor, aten.ne.Tensor, *traits.DOCUMENTS_AT}
"""Ops that may be given the numbers of documents: they ask at most which are equal."""

LINEAR = traits.TAKES | {
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.stack.default,
    aten.cat.default,
    aten.add.Tensor,
    aten.sub.Tensor,
}
"""Ops that make of a sum over documents the sum of what they make of each."""
