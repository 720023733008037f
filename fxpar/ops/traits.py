"""What an op is, besides how it may be cut: one place for each fact, whoever asks.

What torch says of its ops (tags, schemas) is asked of torch; the sets below hold what it does not say, DECLARED what
other packages say of theirs (`fxpar.rules.table.register_op`). An op in none of them is not known to be harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fxpar.errors import FxparError, OpContractError

aten, own = torch.ops.aten, torch.ops.fxpar

Computes = Literal["low", "fp32", "norm", "softmax", "loss", "loss_backward", "moves"]
"""What an op computes in under mixed precision: the low dtype; fp32, always; fp32 like norms, softmax or the loss,
unless the precision says otherwise ("loss": the loss begins here, "loss_backward": its gradient begins behind this);
whatever its readers want, as it only moves values.
"""

Flops = Callable[[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], int]
"""(shapes of the tensor operands, shapes of the results) -> floating-point operations of one call."""

Statement = Callable[[Any], Any]
"""`fxpar.flow.statements.Statement`: (a call with the flows of its operands) -> the flows of its results, or None."""


@dataclass(frozen=True)
class OpTraits:
    """What a package declares of its op; None where it says nothing.

    `flops`: its work. `flow`: how tokens flow through it. `computes`: what it computes in under mixed precision.
    """

    flops: Flops | None = None
    flow: Statement | None = None
    computes: Computes | None = None


DECLARED: dict[Any, OpTraits] = {}
"""Op -> what another package declares of it."""

# ---------------------------------------------------------------------------------------------------- values that move
RELABELS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
"""Results have the elements of operand 0, one to one, in its memory or in a copy of it."""

HOST_COPIES = {own.to_host.default, own.from_host.default}
"""Copies over the link between a device and its host."""

KEEPS_ALL = (RELABELS | HOST_COPIES) | {
    aten.expand.default,
    aten.repeat.default,
    aten.clone.default,
    aten.flip.default,
    aten.roll.default,
}
"""Results have the elements of operand 0, all of them and no others."""

TAKES = KEEPS_ALL | {
    aten.slice.Tensor,
    aten.select.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
"""Results have elements of operand 0 and no others."""

MOVES = TAKES | {
    aten.cat.default,
    aten.stack.default,
    aten.constant_pad_nd.default,
    aten.slice_backward.default,
    aten.select_backward.default,
}
"""Results have elements of the operands, and numbers of the call's own: nothing is computed."""

# Not tagged pointwise by torch although each result element depends on the operands' same element only.
LOOKS_ELEMENTWISE = (
    aten._to_copy.default,
    aten.alias.default,
    aten._conj.default,
    aten.resolve_conj.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.hardtanh_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.log_sigmoid_backward.default,
    aten.floor_divide.default,
    aten.polar.default,
    aten.copy.default,
)

SIZES: dict[Any, int] = {
    aten.view.default: 1,
    aten.reshape.default: 1,
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.new_empty.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}
"""Op -> position of the list of sizes in its arguments."""

FACTORIES = {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
"""They make a constant of numbers alone, in a dtype that the call may name."""

# ------------------------------------------------------------------------------------------------------------ products
MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
"""The products of operands 0 and 1."""

BATCHED_PRODUCTS = {aten.bmm.default, aten.baddbmm.default, aten.baddbmm_.default}
"""A product per entry of the first dim."""

ADDED_PRODUCTS = {
    aten.addmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.addmm_.default,
    aten.baddbmm_.default,
}
"""Operand 0 and the product of operands 1 and 2."""

EXPERT_PRODUCTS = {own.expert_mm.default, own.grouped_mm.default}
"""Rows, operand 0, times the weight of each row's expert, operand 1."""

EXPERT_PRODUCTS_BACKWARD = {own.expert_mm_backward.default, own.grouped_mm_backward.default}
"""The weights' gradients, of the gradients of rows, operand 0, and the rows, operand 1."""

BY_EXPERT = EXPERT_PRODUCTS | EXPERT_PRODUCTS_BACKWARD

CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}

ATTENTION = {own.attention.default: 0, own.attention_backward.default: 1}
"""Attention and its gradient -> position of q in the arguments; k and v are behind it."""

RING_STEPS = {own.attention_block.default: 0, own.attention_block_backward.default: 1}
"""A step of attention in a ring, and its gradient -> position of q in the arguments; keys and values are behind it.
Five places behind it stand the positions of the tokens.
"""

RECURRENCES = {own.recurrence.default: 0, own.recurrence_backward.default: 1}
"""Recurrences over tokens, and their gradient -> position of q in the arguments; k, v, decay and beta are behind it."""

DOCUMENTS_AT: dict[Any, int] = {
    own.attention.default: 3,
    own.attention_backward.default: 6,
    own.recurrence.default: 5,
    own.recurrence_backward.default: 6,
    own.causal_conv.default: 3,
    own.causal_conv_backward.default: 3,
}
"""Ops that may be told the documents of a row, so that these stay apart -> position of that argument, None without."""

EMBEDDINGS = {own.embedding.default, aten.embedding.default}
"""Operand 1 has numbers of rows of the table, operand 0."""

LABEL_LOSSES = {own.cross_entropy.default, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
"""Losses: operand 1 has numbers of classes, which are along dim 1 of operand 0."""

CHOICES = {own.cluster_rows.default}
"""What results are is a choice, which operands that were rounded in another way may turn: it is made once."""

READS_ROWS = EMBEDDINGS | {aten.index.Tensor, aten.index_select.default, aten.gather.default}
"""They read about as much as they return, not all of operand 0."""

SWEEPS: dict[object, int] = {own.cross_entropy.default: 6, own.cross_entropy_backward.default: 3}
"""Ops made of several kernels -> how often these read or write what the op reads and writes once."""

# ------------------------------------------------------------------------------------------------------ dtype classes
_NORMS = (
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
)
_SOFTMAXES = (
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._safe_softmax.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.logsumexp.default,
)
# Their running statistics are written, and averages stand still once a step rounds away.
_BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten.batch_norm_backward.default,
)
INDEX_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
"""They add rows into one place if a flag says so, else they only write."""
# These add row by row into one place, in the dtype of the result. Measured on 2,000 equal tokens, the gradient of a
# bf16 embedding was off by 29 %, the sum of the same rows by 0.2 % (sums run in fp32 inside).
_ACCUMULATING = (
    own.embedding_backward.default,
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    *INDEX_PUTS,
)
# Pairs of low-precision numbers are no complex dtype; what follows, such as a rotation by complex tables, is then wide.
_PAIRS = (aten.view_as_complex.default, aten.polar.default)
_LOSSES = (
    *LABEL_LOSSES,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)
_LOSSES_BACKWARD = (
    own.cross_entropy_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
    aten.soft_margin_loss_backward.default,
)
_COMPUTES: dict[Any, Any] = {
    **dict.fromkeys(MOVES, "moves"),
    **dict.fromkeys(_NORMS, "norm"),
    **dict.fromkeys(_SOFTMAXES, "softmax"),
    **dict.fromkeys((*_BATCH_NORMS, *_ACCUMULATING, *_PAIRS), "fp32"),
    **dict.fromkeys(_LOSSES, "loss"),
    **dict.fromkeys(_LOSSES_BACKWARD, "loss_backward"),
}

# ------------------------------------------------------------------------------------------------- padding, and memory
KEEPS_ZERO = (
    KEEPS_ALL
    | MATRIX_PRODUCTS
    | EXPERT_PRODUCTS
    | EXPERT_PRODUCTS_BACKWARD
    | {
        aten.neg.default,
        aten.silu.default,
        aten.gelu.default,
        aten.relu.default,
        aten.tanh.default,
        aten.sin.default,
        aten.abs.default,
        aten._to_copy.default,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.silu_backward.default,
        aten.gelu_backward.default,
        aten.tanh_backward.default,
        aten.threshold_backward.default,
        aten.sigmoid_backward.default,
        aten.sum.dim_IntList,
        own.dropout.default,
    }
)
"""Where all operands are zero, so is the result."""

IN_PLACE: dict[Any, Any] = {
    aten.addmm.default: aten.addmm_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.log.default: aten.log_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.reciprocal.default: aten.reciprocal_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.relu.default: aten.relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
}
"""Op that is elementwise in its first operand -> the one that writes over it, with the same operands."""

OUT: dict[Any, tuple[Any, str]] = {
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
}
"""Elementwise op -> (the one that writes into a given tensor, the name of that operand)."""


def is_attention(op: Any) -> bool:
    """Whether an op is attention, or a step of it in a ring."""
    return op in ATTENTION or op in RING_STEPS


def is_view(op: Any) -> bool:
    """Whether results lie in the memory of an operand; a reshape may copy, which is cheap enough."""
    return bool(getattr(op, "is_view", False)) or op is aten._unsafe_view.default


def is_elementwise(op: Any) -> bool:
    """Whether each element of the result depends on the same element of the operands only."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op in LOOKS_ELEMENTWISE


def is_random(op: Any) -> bool:
    """Whether the op draws other numbers each time. `fxpar::dropout` does not: its numbers are those of its seed."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def is_product(op: Any) -> bool:
    """Whether an op other than attention is limited by arithmetic: its work is worth cutting."""
    return op in _PRODUCTS or declared(op).flops is not None


def computes(op: Any) -> Computes:
    """What an op computes in under mixed precision."""
    return declared(op).computes or _COMPUTES.get(op, "low")


def declared(op: Any) -> OpTraits:
    """What another package declares of an op."""
    return DECLARED.get(op, _NOTHING)


def ask(op: Any, argument: str, function: Callable[..., Any], *given: Any) -> Any:
    """What another package's function says of its op. Raises OpContractError for what it raises."""
    try:
        return function(*given)
    except FxparError:
        raise
    except Exception as error:
        raise OpContractError(str(op), f"its {argument}= raised {type(error).__name__}: {error}") from error


_NOTHING = OpTraits()
_EXPERTS = EXPERT_PRODUCTS | EXPERT_PRODUCTS_BACKWARD
_PRODUCTS = MATRIX_PRODUCTS | ADDED_PRODUCTS | CONVOLUTIONS | set(RECURRENCES) | set(_EXPERTS)
