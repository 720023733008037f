"""Memory that a CPU kernel allocates for itself while it runs, beside its operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import local_meta
from fxpar.ops import copies
from fxpar.ops.traits import DOCUMENTS_AT

own = torch.ops.fxpar
Shape = tuple[int, ...]
Sizes = Callable[[Any], Shape]

_LOGITS_BLOCK = 1 << 18  # elements per thread that `fxpar::cross_entropy` works on at once
_DROPOUT_BLOCK = 1 << 17  # and `fxpar::dropout`
_SCORES_BLOCK = 1 << 20  # scores of one block of attention with a mask, window or soft cap,
_BLOCK_ROWS, _LEAST_ROWS = 64, 32  # of this many queries at most, and at least with all heads that share keys
_FLASH_KEYS = 512  # keys per block of ATen's CPU flash attention


@dataclass(frozen=True)
class Conditions:
    """Under which kernels run: threads of a rank, and tokens of the longest document if that is shorter than a row.
    `several`: rows have several documents, nobody knows how long.
    """

    threads: int = 1
    longest: int | None = None
    several: bool = False


def workspace_bytes(node: fx.Node, dims: Mapping[sympy.Symbol, int], conditions: Conditions) -> int:
    """Bytes at most at one time; 0 for an op that is not known to need any."""
    rule = _RULES.get(node.target)  # type: ignore[call-overload]
    if rule is None:
        return 0

    def shape(value: Any) -> tuple[int, ...]:
        return _meta(value).sizes(dims)

    return int(rule(node, shape, conditions))


def _meta(value: Any) -> TensorMeta:
    meta: Any = local_meta(value)
    return meta[0] if isinstance(meta, tuple) else meta


def _wide(dtype: torch.dtype) -> int:
    """Bytes of an element in the dtype that own kernels compute in."""
    return 8 if dtype == torch.float64 else 4


def _cross_entropy(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The exponentials of one block of logits, and one integer per token."""
    logits: Any = node.args[0]
    rows, columns = shape(logits)
    wide = _wide(_meta(logits).dtype)
    block = min(rows, max(1, _LOGITS_BLOCK * given.threads // max(1, columns))) * columns
    copies = 1 if _meta(logits).dtype.itemsize == wide else 2
    return copies * block * wide + 8 * rows


def _cross_entropy_backward(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    logits: Any = node.args[2]
    rows, columns = shape(logits)
    wide = _wide(_meta(logits).dtype)
    block = min(rows, max(1, _LOGITS_BLOCK * given.threads // max(1, columns))) * columns
    return 8 * rows + (0 if _meta(logits).dtype.itemsize == wide else block * wide)


def _dropout(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """Three int64 temporaries and a mask, of one block."""
    return min(math.prod(shape(node)), _DROPOUT_BLOCK * given.threads) * 25


def _attention_bytes(node: fx.Node, shape: Sizes, given: Conditions, first: int) -> int:
    """`first`: where q stands among the operands: 1 in the backward, behind the gradient."""
    args: Any = node.args
    q, k, v = (shape(a) for a in args[first : first + 3])
    dtype, wide = _meta(args[first]).dtype, _wide(_meta(args[first]).dtype)
    backward = first == 1
    ids, mask, _, window, _, softcap, *_ = args[DOCUMENTS_AT[node.target] :]
    whole, pieces = q[2], 0
    longest = whole - 1 if given.several else given.longest
    if ids is not None and longest is not None and longest < whole:
        # One document at a time, the results in tensors of their own.
        q, k, v = ((*x[:2], longest, x[3]) for x in (q, k, v))
        pieces = math.prod(q) + (math.prod(k) + math.prod(v) if backward else 0)
    if mask is not None or softcap or 0 < window < k[2]:
        own_bytes = _block_elements(q, k, v, window, bool(softcap), backward) * wide
    else:
        own_bytes = (_flash_elements(q, k, v, given.threads, backward) + _copies(q, k, v, dtype, backward)) * wide
    return own_bytes + pieces * dtype.itemsize


def _ring_bytes(node: fx.Node, shape: Sizes, given: Conditions, first: int) -> int:
    """That of attention over one block, and what it finds there, which is then added to the result."""
    args: Any = node.args
    q, kv = (shape(a) for a in args[first : first + 2])
    dtype, wide = _meta(args[first]).dtype, _wide(_meta(args[first]).dtype)
    (B, tokens, heads, width), (window, _, softcap) = kv, args[first + 10 : first + 13]
    k, v = ((B, heads, tokens, size) for size in (q[3], width - q[3]))
    found = math.prod(kv) + math.prod(q) if first else math.prod(q[:3]) * (v[3] + 3)
    if softcap or 0 < window < tokens:
        return (_block_elements(q, k, v, window, bool(softcap), bool(first)) + found) * wide
    return (_flash_elements(q, k, v, given.threads, bool(first)) + _copies(q, k, v, dtype, bool(first)) + found) * wide


def _copies(q: Shape, k: Shape, v: Shape, dtype: torch.dtype, backward: bool) -> int:
    """Elements of operands and results in the dtype that flash computes in, where that is another one."""
    if dtype.itemsize == _wide(dtype):
        return 0
    return (3 if backward else 1) * math.prod(q) + (2 if backward else 1) * _both(k, v)


def _both(k: Shape, v: Shape) -> int:
    return math.prod(k) + math.prod(v)


def _flash_elements(q: Shape, k: Shape, v: Shape, threads: int, backward: bool) -> int:
    """ATen's CPU flash: per thread a block of scores (two in the backward) and of results; two numbers per row."""
    rows = min(q[2], 256 if q[2] >= 768 else 64 if q[2] >= 192 else 32)
    columns = min(k[2], _FLASH_KEYS)
    return threads * rows * (columns * (2 if backward else 1) + q[3] + 2) + 2 * math.prod(q[:3])


def _block_elements(q: Shape, k: Shape, v: Shape, window: int, softcap: bool, backward: bool) -> int:
    """`forward_blocks` and `backward_blocks`: copies of the operands for some of the heads, and one block of scores."""
    group = q[1] // k[1]
    rows = min(q[2], _BLOCK_ROWS)
    columns = min(k[2], 2 * window + rows) if window else k[2]
    rows = min(rows, max(_SCORES_BLOCK // (group * columns), -(-_LEAST_ROWS // group)))
    at_once = min(q[0] * k[1], max(1, _SCORES_BLOCK // (group * rows * columns)))  # pairs of batch row and key head
    share = at_once / (q[0] * k[1])
    scores = at_once * group * rows * columns
    heads, keys = round(math.prod(q) * share), round(_both(k, v) * share)
    if not backward:
        return heads + keys + scores + 3 * rows * columns
    # First the product of two copies of results, then scores, their gradients, and the slope of a soft cap.
    return 2 * heads + 2 * keys + max(2 * heads, (3 if softcap else 2) * scores + 3 * rows * columns)


def _route_rows(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """Per row the expert it is sorted by, that expert in order, and two marks of which are there."""
    return 18 * math.prod(shape(node.args[0]))


def _dispatch(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The token of each row."""
    return 8 * shape(node)[0]


def _combine(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The rows in the order of tokens; the sum, one slot of it, and that times its weights."""
    rows, weights, _, ids = node.args
    placed = math.prod(shape(ids)) * shape(rows)[1] * _meta(rows).dtype.itemsize
    return placed if weights is None else placed + 3 * math.prod(shape(node)) * _wide(_meta(rows).dtype)


def _combine_backward(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The gradient once per row, as it is and wide, and its product with the rows."""
    rows: Any = node.args[1]
    dtype = _meta(rows).dtype
    wide = _wide(dtype) * (1 if dtype.itemsize == _wide(dtype) else 2)
    return math.prod(shape(rows)) * (dtype.itemsize + wide) + 8 * shape(rows)[0]


def _hash_rows(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The products, and these without signs; per hash an axis and a digit, and the code so far."""
    x, hashes, columns, *_ = node.args
    *rows, _ = shape(x)
    products = 2 * int(hashes * columns) * _meta(x).dtype.itemsize  # type: ignore[operator]
    return math.prod(rows) * (products + 17 * int(hashes) + 16)  # type: ignore[arg-type, call-overload]


def _cluster_rows(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """Per row its sort key and place, and of two levels digits, runs and sizes."""
    return 90 * math.prod(shape(node.args[1]))


def _means(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The sums, which are wide; where rows are not, those of one slot in that dtype too."""
    rows, dtype = shape(node.args[0]), _meta(node.args[0]).dtype
    copies = 0 if dtype.itemsize == _wide(dtype) else math.prod(rows) // (rows[-2] if len(rows) > 2 else 1)
    return (math.prod(shape(node)) + copies) * _wide(dtype)


def _of_clusters(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """What is read of the clusters, once per row."""
    return math.prod(shape(node)) * _meta(node).dtype.itemsize


def _over_sizes(node: fx.Node, shape: Sizes, given: Conditions) -> int:
    """The gradients of the means, each over as many rows as it has."""
    means: Any = node.args[0]
    return math.prod(shape(means)) * _meta(means).dtype.itemsize


_RULES: dict[Any, Callable[[fx.Node, Sizes, Conditions], float]] = {
    own.cross_entropy.default: _cross_entropy,
    own.hash_rows.default: _hash_rows,
    own.cluster_rows.default: _cluster_rows,
    own.cluster_mean.default: _means,
    own.cluster_restore_backward.default: _means,
    own.cluster_restore.default: _of_clusters,
    own.cluster_mean_backward.default: _over_sizes,
    own.cross_entropy_backward.default: _cross_entropy_backward,
    own.dropout.default: _dropout,
    own.route_rows.default: _route_rows,
    copies.own_rows: _route_rows,
    own.dispatch.default: _dispatch,
    own.combine.default: _combine,
    own.combine_backward.default: _combine_backward,
    own.attention.default: partial(_attention_bytes, first=0),
    own.attention_backward.default: partial(_attention_bytes, first=1),
    own.attention_block.default: partial(_ring_bytes, first=0),
    own.attention_block_backward.default: partial(_ring_bytes, first=1),
}
