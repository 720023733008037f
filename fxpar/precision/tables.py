"""Which ops need the captured dtype, which only move values, and which take some operands as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fxpar.ops  # noqa: F401 - registers torch.ops.fxpar
from fxpar.torch_api import kernels

aten = torch.ops.aten
own = torch.ops.fxpar

# Last parts of the FQN of a module that normalises, in lower case.
NORM_NAMES = ("*norm*", "ln", "ln_*", "*_ln", "ln[0-9]*")

NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
    }
)
# Their running statistics are written, and averages stand still once a step rounds away.
BATCH_NORMS = frozenset(
    {
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten.batch_norm_backward.default,
    }
)
SOFTMAXES = frozenset(
    {
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._safe_softmax.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.logsumexp.default,
    }
)
# Pairs of low-precision numbers are no complex dtype; what follows, such as a rotation by complex tables, is then wide.
PAIRS = frozenset({aten.view_as_complex.default})
INDEX_PUTS = frozenset({aten.index_put.default, aten._unsafe_index_put.default})
# These add row by row into one place, in the dtype of the result. Measured on 2,000 equal tokens, the gradient of a
# bf16 embedding was off by 29 %, the sum of the same rows by 0.2 % (sums run in fp32 inside).
ACCUMULATING = frozenset(
    {
        own.embedding_backward.default,
        aten.embedding_dense_backward.default,
        aten.index_add.default,
        *INDEX_PUTS,
    }
)
LOSSES = frozenset(
    {
        own.cross_entropy.default,
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.nll_loss_forward.default,
        aten.nll_loss2d_forward.default,
        aten.soft_margin_loss.default,
    }
)
LOSSES_BACKWARD = frozenset(
    {
        own.cross_entropy_backward.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
        aten.binary_cross_entropy_backward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_backward.default,
        aten.soft_margin_loss_backward.default,
    }
)
# What makes a model of parameters and activations: no loss goes on behind one of these.
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.mv.default,
        aten.dot.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        own.attention.default,
        own.attention_backward.default,
        own.embedding.default,
        own.embedding_backward.default,
    }
)
# Move values, compute nothing: they run in whatever dtype their readers want.
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        kernels.unsafe_view,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.repeat.default,
        aten.clone.default,
        aten.slice.Tensor,
        aten.slice_backward.default,
        aten.select.int,
        aten.select_backward.default,
        aten.unbind.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.cat.default,
        aten.stack.default,
        aten.flip.default,
        aten.roll.default,
        aten.constant_pad_nd.default,
    }
)
# Positions of operands that are taken as they come. Own ops compute in fp32 inside whatever they are given, and a mask
# or a logsumexp is never worth a copy; uncast logits save the [T, V] copy.
AS_THEY_COME: Mapping[Any, tuple[int, ...]] = {
    own.attention.default: (4,),
    own.attention_backward.default: (5, 7),
    own.cross_entropy.default: (0,),
    own.cross_entropy_backward.default: (2, 5),
}
# Operand -> the operand whose dtype it must have.
LIKE: Mapping[Any, Mapping[int, int]] = {own.cross_entropy_backward.default: {0: 5, 1: 5}}
# A constant is made in the wanted dtype instead of cast.
FACTORIES = frozenset({aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default})
