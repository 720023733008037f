"""What one call of an op costs: floating-point operations, and bytes that it reads and writes.

Read off shapes: local ones where a graph has placements, global ones where it has none. Nothing runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import CostModelError, OpContractError
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import Size, TensorMeta
from fxpar.ir.node_meta import is_gradient, local_meta
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.serialize import OpOverload
from fxpar.ops.recurrence import CHUNK, CHUNK_BY_ROW
from fxpar.ops.traits import (
    ADDED_PRODUCTS,
    ATTENTION,
    CONVOLUTIONS,
    DOCUMENTS_AT,
    EXPERT_PRODUCTS,
    EXPERT_PRODUCTS_BACKWARD,
    MATRIX_PRODUCTS,
    READS_ROWS,
    RECURRENCES,
    RING_STEPS,
    Flops,
    ask,
    declared,
    is_attention,
    is_view,
)

aten = torch.ops.aten
# Five products instead of two (Dao, "FlashAttention-2", arXiv 2307.08691, section 4.1).
_BACKWARD_FACTOR = Fraction(5, 2)
# Ops and their gradients -> a position, which is behind that of the gradient.
_GRADIENTS = ATTENTION | RING_STEPS | RECURRENCES
# Calls that do nothing on the device, besides views.
_NO_KERNEL = {operator.getitem, torch.ops._c10d_functional.wait_tensor.default}
Shape = tuple[int, ...]
SizesOf = Callable[[TensorMeta], Shape]


@dataclass
class SizesAt:
    """Sizes of a TensorMeta with the dynamic dims at `dims`."""

    dims: Mapping[sympy.Symbol, int]
    _known: dict[Size, Any] = field(default_factory=dict)

    def __call__(self, meta: TensorMeta) -> Shape:
        return tuple(size if isinstance(size, int) else self.size(size) for size in meta.shape)

    def size(self, size: Any) -> int:
        """A dynamic size as a number."""
        if size not in self._known:
            self._known[size] = int(size.subs(self.dims))
        return self._known[size]


def flops(node: fx.Node, shape: SizesOf, block: float = 0) -> Fraction | int:
    """Floating-point operations (2 per multiply-add) of a product, a convolution or attention, and of an op that
    another package declares them for; 0 for any other op.

    Attention over one document is 4 * B * H * Sq * Skv * E forward, half of that if causal, and 2.5 times that backward
    (Dao, "FlashAttention-2", section 4.1). A window counts in full: documents that are shorter than it cost less. With
    kernels that take `block` keys at once, a query computes with half a block of keys more that it does not see. A step
    in a ring is that over its own queries and keys: of causal ones half are seen, in the mean over all steps.

    Raises CostModelError for a declared count that is negative or not finite, OpContractError for what is no number.
    """
    if is_attention(node.target):
        return _attention(node, shape, block)
    if node.target in EXPERT_PRODUCTS_BACKWARD:
        return 2 * math.prod(shape(_meta(node.args[0]))) * shape(_meta(node))[1]
    if node.target in MATRIX_PRODUCTS or node.target in ADDED_PRODUCTS or node.target in EXPERT_PRODUCTS:
        first = shape(_meta(node.args[int(node.target in ADDED_PRODUCTS)]))
        return 2 * first[-1] * math.prod(shape(_meta(node)))
    if node.target in CONVOLUTIONS:
        return _convolution(node, shape)
    if node.target in RECURRENCES:
        return _recurrence(node, shape)
    if node.target is torch.ops.fxpar.hash_rows.default:
        return _hashes(node, shape)
    count = declared(node.target).flops
    return 0 if count is None else _declared(node, count, shape)


def in_backward(node: fx.Node) -> bool:
    """Whether a kernel has the figures of `Device.in_backward`: not what is recomputed there."""
    position = _GRADIENTS.get(node.target)  # type: ignore[arg-type]
    return is_gradient(node) if position is None else position > 0


def is_plain(target: Any) -> bool:
    """Whether `flops` of a call follow from the shapes of its result and of its first two tensors alone."""
    read = is_attention(target) or target in CONVOLUTIONS or target in RECURRENCES
    return not read and target is not torch.ops.fxpar.hash_rows.default and declared(target).flops is None


def _attention(node: fx.Node, shape: SizesOf, block: float) -> Fraction:
    args: Any = node.args
    if node.target in RING_STEPS:
        first = RING_STEPS[node.target]  # type: ignore[index]
        q, (_, tokens, _, width) = (shape(_meta(operand)) for operand in args[first : first + 2])
        widths, steps, (causal, window) = width, args[first + 8], args[first + 9 : first + 11]
    else:
        first = ATTENTION[node.target]  # type: ignore[index]
        q, (_, _, tokens, _), v = (shape(_meta(operand)) for operand in args[first : first + 3])
        _, _, causal, window, *_ = args[DOCUMENTS_AT[node.target] :]
        widths, steps = q[3] + v[3], 1
    if window:
        keys = Fraction(window if causal else 2 * window, steps)
    else:
        keys = Fraction(tokens, 2 if causal else 1)
    keys += Fraction(block) / 2
    forward = 2 * math.prod(q[:3]) * keys * widths
    return forward * _BACKWARD_FACTOR if first else forward


def _hashes(node: fx.Node, shape: SizesOf) -> int:
    """A product of each token with the vectors of all hashes; a token is hashed once for all of its experts."""
    x, hashes, columns, *_ = node.args
    sizes = shape(_meta(x))
    return 2 * math.prod(sizes) // (sizes[-2] if len(sizes) > 2 else 1) * hashes * columns  # type: ignore[operator]


def _declared(node: fx.Node, given: Flops, shape: SizesOf) -> Fraction:
    operands = [shape(_meta(operand)) for operand in tensor_operands(node)]
    count = ask(node.target, "flops", given, operands, [shape(meta) for meta in local_metas(node)])
    if not isinstance(count, int | float | Fraction):
        raise OpContractError(str(node.target), f"its flops= returned {count!r}, no number of operations")
    if not 0 <= count < math.inf:  # no NaN either
        raise CostModelError(f"operations of {node.target}", float(count))
    return Fraction(count)


def _recurrence(node: fx.Node, shape: SizesOf) -> int:
    """Scores inside a chunk and their use, the state read and written; the delta rule makes scores of keys too, reads
    the state with them, and solves for what is written. Backward: states again, then two products for one.
    """
    first = RECURRENCES[node.target]  # type: ignore[index]
    (B, T, _, K), _, (_, _, H, V), (*_, rows) = (shape(_meta(a)) for a in node.args[first : first + 4])
    chunk = CHUNK if rows == 1 else CHUNK_BY_ROW
    delta = int(bool(node.args[-1]))
    per_token = chunk * ((1 + delta) * K + V) + (2 + delta) * K * V + delta * chunk * V // 2
    forward = 2 * B * T * H * per_token
    return 4 * forward if first else forward


def _convolution(node: fx.Node, shape: SizesOf) -> int:
    args: Any = node.args
    if node.target is aten.convolution.default:
        result = args[0] if args[6] else node  # transposed: each input element meets the weights
        return 2 * math.prod(shape(_meta(result))) * math.prod(shape(_meta(args[1]))[1:])
    result = args[1] if args[7] else args[0]
    products = sum(args[10][:2])  # dx and dweight, as the mask says
    return 2 * products * math.prod(shape(_meta(result))) * math.prod(shape(_meta(args[2]))[1:])


def touched(node: fx.Node) -> Iterator[TensorMeta]:
    """The tensors that an op reads and writes, as one rank has them."""
    others = [node] if node.target in READS_ROWS else node.all_input_nodes
    return (meta for value in (node, *others) for meta in local_metas(value))


def touched_bytes(node: fx.Node, shape: SizesOf) -> int:
    """Bytes of the tensors that an op reads and writes."""
    return sum(math.prod(shape(meta)) * meta.dtype.itemsize for meta in touched(node))


def is_kernel(node: fx.Node) -> bool:
    """Whether a call computes on the device: no view, no collective."""
    if node.op != "call_function" or collective_kind(node):
        return False
    idle = (_is_idle if isinstance(node.target, OpOverload) else _is_idle.__wrapped__)(node.target)
    return not idle and any(True for _ in local_metas(node))


@functools.cache  # of ops alone, as a method would keep what it is bound to
def _is_idle(op: Any) -> bool:
    return is_view(op) or op in _NO_KERNEL


def local_metas(value: Any) -> Iterator[TensorMeta]:
    """The tensors of a node's result, as one rank has them; none of what is no node."""
    meta = local_meta(value) if isinstance(value, fx.Node) else None
    found = meta if isinstance(meta, tuple) else (meta,)
    return (one for one in found if isinstance(one, TensorMeta))


def _meta(value: Any) -> TensorMeta:
    return next(local_metas(value))
