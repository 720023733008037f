"""fxpar's own ops. Importing this package registers them under `torch.ops.fxpar`.

Each op is functional, takes its tensors by position, has a fake kernel that works with symbolic
sizes, and a gradient that is again an op of a captured graph. A rank may run any of them on a slice
of the global tensors: what it must know about the slice is an argument.

    attention, attention_backward          softmax attention of every kind, `fxpar.ops.attention`
    attention_block, ..._backward          one step of it in a ring of ranks, `fxpar.ops.ring_steps`
    hash_rows, cluster_rows, ...           rows that reach their expert as one, `fxpar.ops.compress`
    cross_entropy, cross_entropy_backward  over a slice of the classes, `fxpar.ops.cross_entropy`
    recurrence, recurrence_backward        attention that is a recurrence over tokens, `fxpar.ops.recurrence`
    causal_conv, causal_conv_backward      a short convolution over tokens before, `fxpar.ops.causal_conv`
    dropout                                same mask under any slicing, `fxpar.ops.dropout`
    embedding, embedding_backward          in a slice of the table, `fxpar.ops.embedding`
    expert_mm, expert_mm_backward          products of experts, and their parts, `fxpar.ops.experts`
"""

from __future__ import annotations

from fxpar.ops import (
    attention,
    causal_conv,
    compress,
    cross_entropy,
    dropout,
    embedding,
    experts,
    host,
    recurrence,
    ring_steps,
)

__all__ = [
    "attention",
    "causal_conv",
    "compress",
    "cross_entropy",
    "dropout",
    "embedding",
    "experts",
    "host",
    "recurrence",
    "ring_steps",
]
