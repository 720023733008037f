"""What becomes of rows of experts, [N, K, ...], on a rank that has some of the experts: of a token's K rows it makes
those of its own experts, and zeros for the others.

    zero    rows of other ranks' experts are zeros: a sum over slots is a term of the sum over ranks
    junk    they are anything: an activation may make ones of zeros
    term    [N, ...]: a term of the sum over ranks
    same    each rank makes the same of a token, as it has all of it

An op that is none of these is not known to keep tokens and slots apart.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from fxpar.ir import collectives
from fxpar.ir.axes import REPLICAS
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import local_meta, wanted_dists
from fxpar.ir.pass_base import tensor_operands
from fxpar.ops.traits import KEEPS_ZERO, is_elementwise, is_random

aten, own = torch.ops.aten, torch.ops.fxpar
Rows = Literal["zero", "junk", "term", "same"]
Kinds = Rows | tuple[Rows, ...]  # several for an op whose results are not alike

# Lookups in tables of a row per expert: op -> where the ids stand.
LOOKUPS: dict[Any, int] = {own.embedding.default: 1, own.embedding_backward.default: 1}
_SUMS = {aten.sum.dim_IntList, aten.mean.dim}
_WEIGHED = {own.weighted_sum.default, own.weighted_sum_backward.default}
_ADDS = {aten.add.Tensor, aten.sub.Tensor}
_MULTIPLIES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Scalar}
# They move elements inside of a row, or write them in another way, where tokens and slots stay the first two dims.
_MOVES = {
    own.pack_rows.default,
    own.unpack_rows.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.cat.default,
    aten.stack.default,
}
# Of these, position of the dim that the call is about, and whether it is one of the result.
_DIMS: dict[Any, tuple[int, bool]] = {
    aten.unsqueeze.default: (1, True),
    aten.slice.Tensor: (1, False),
    aten.select.int: (1, False),
    aten.unbind.int: (1, False),
    aten.split.Tensor: (2, False),
    aten.split_with_sizes.default: (2, False),
    aten.slice_backward.default: (2, True),
    aten.select_backward.default: (2, True),
    aten.cat.default: (1, False),
    aten.stack.default: (1, True),
}
# Collectives over ranks that have the same copies, as they have parts of each row: position of the dims in question.
_BETWEEN_PARTS: dict[Any, tuple[int, ...]] = {
    collectives.all_reduce: (),
    collectives.all_gather: (2,),
    collectives.reduce_scatter: (3,),
    collectives.all_to_all: (2, 4),
    collectives.shard: (2,),
}


def shapes_of(node: fx.Node) -> list[tuple[Any, ...]]:
    """Local shapes of a node's results."""
    meta = local_meta(node)
    return [one.shape for one in (meta if isinstance(meta, tuple) else (meta,)) if isinstance(one, TensorMeta)]


def has_tokens(node: fx.Node) -> bool:
    """Whether a value grows with the batch."""
    return any(getattr(size, "free_symbols", None) for shape in shapes_of(node) for size in shape)


def is_by_token(node: fx.Node, tokens: Any) -> bool:
    """Whether a call makes something of each of the first dim's `tokens` alone, by an op that this page knows."""
    known = is_elementwise(node.target) or node.target in _MOVES or node.target in _SUMS or node.target in _WEIGHED
    if not known or is_random(node.target):
        return False
    made = shapes_of(node)
    if not _leaves(node, 1):
        return False
    wide = max(map(len, made), default=0)
    for operand in filter(has_tokens, tensor_operands(node)):
        (shape, *_) = shapes_of(operand)
        aligned = len(shape) == wide or not is_elementwise(node.target)
        if not shape or shape[0] != tokens or not aligned:
            return False
    return bool(made) and all(shape and shape[0] == tokens for shape in made)


def source_of_ids(ids: Any) -> fx.Node:
    """Where ids come from: gathered twice, for forward and backward, they are the same."""
    while collectives.is_collective(ids) or ids.target is aten.detach.default:
        ids = ids.args[0]
    return ids


def walk_rows(
    nodes: Iterable[fx.Node],
    products: Mapping[fx.Node, Rows],
    tokens: Any,
    slots: int,
    stay: Collection[fx.Node] = (),
) -> dict[fx.Node, Kinds]:
    """The calls that are known to keep tokens and slots apart, in the order of the graph, with what they make of rows:
    `products` and what is made of them, but for calls that `stay` out and what is behind these.
    """
    found: dict[fx.Node, Kinds] = {}
    for node in nodes:
        if node in products:
            found[node] = products[node]
        elif (
            node.op == "call_function"
            and node not in stay
            and any(found.get(o) not in (None, "same", "term") for o in node.all_input_nodes)
        ):
            kind = _made(node, found, tokens, slots)
            if kind is not None:
                found[node] = kind
    return found


def _made(node: fx.Node, found: Mapping[fx.Node, Kinds], tokens: Any, slots: int) -> Kinds | None:
    if node.target is operator.getitem:
        source: Any = node.args
        kinds = found[source[0]]
        return kinds[source[1]] if isinstance(kinds, tuple) else kinds
    given: list[Any] = [found.get(o) or ("same" if has_tokens(o) else None) for o in tensor_operands(node)]
    return rows_of(node, given, tokens, slots)


def rows_of(node: fx.Node, given: Sequence[Rows | None], tokens: Any, slots: int) -> Kinds | None:
    """What a call makes of rows, with `given` for each of its tensor operands (None: no tokens in it); None where it
    is not known to keep tokens and slots apart.
    """
    if "term" in given:
        return None
    if node.target in _BETWEEN_PARTS:
        return given[0] if _is_between_parts(node, tokens, slots) else None
    if not is_by_token(node, tokens):
        return None
    if node.target in _SUMS:
        return _summed(node, given[0])
    if node.target is own.weighted_sum.default:
        return "term" if given[0] == "zero" and given[1] == "same" else None
    if node.target is own.weighted_sum_backward.default:  # (grad, rows, weights) -> (drows, dweights)
        return ("junk", "zero" if given[1] == "zero" and given[0] == "same" else "junk")
    if any(shape[:2] != (tokens, slots) for shape in shapes_of(node)) or not _leaves(node, 2):
        return None
    rows = [kind for kind in given if kind]
    if node.target in _MULTIPLIES:
        return "zero" if "zero" in rows and "junk" not in rows else "junk"
    keeps = (
        node.target in KEEPS_ZERO or node.target in _MOVES or (node.target in _ADDS and len(rows) == len(given) == 2)
    )
    return "zero" if keeps and set(rows) == {"zero"} and len(rows) == len(given) else "junk"


def ranks_alike(product: fx.Node) -> int:
    """How many ranks have each token of a product by expert, as they have parts of its rows or weights."""
    wanted = wanted_dists(product)
    if not wanted:
        return 1
    mesh, cut = wanted[-1].mesh, wanted[-1].dims[0]
    return mesh.size // mesh.degree(".".join([REPLICAS, *(entry.axis for entry in cut)]))


def _is_between_parts(node: fx.Node, tokens: Any, slots: int) -> bool:
    """Whether a collective leaves tokens and slots as they are, and sums at most."""
    dims: Any = [node.args[position] for position in _BETWEEN_PARTS[node.target]]
    rows = all(shape[:2] == (tokens, slots) for one in (node, node.args[0]) for shape in shapes_of(one))  # type: ignore[arg-type]
    sums = node.target not in (collectives.all_reduce, collectives.reduce_scatter) or node.args[2] == "sum"
    return rows and sums and all(dim >= 2 for dim in dims)


def _leaves(node: fx.Node, dims: int) -> bool:
    """Whether a call that is about a dim is about none of the first `dims`."""
    if node.target not in _DIMS:
        return True
    position, of_result = _DIMS[node.target]
    dim: Any = node.args[position] if len(node.args) > position else 0
    (shape, *_) = shapes_of(node if of_result else tensor_operands(node)[0])
    return dim % len(shape) >= dims


def _summed(node: fx.Node, rows: Rows | None) -> Rows | None:
    (shape,) = shapes_of(tensor_operands(node)[0])
    over: Any = node.args[1] if len(node.args) > 1 else None
    dims = {dim % len(shape) for dim in over or ()}
    if not dims or 0 in dims:
        return None
    if 1 in dims:
        return "term" if rows == "zero" else None
    return rows
