"""`torch.nn.attention.varlen.varlen_attn` as `fxpar::attention` over documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor

from fxpar.tracer.attention import autocast
from fxpar.tracer.context import CaptureContext, current
from fxpar.tracer.documents import document_ids_from_cu_seqlens, remembered

assert torch_varlen


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *inference_only: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Self-attention of packed tokens: query [T, H, E], key, value [T, Hkv, E] -> ([T, H, E], lse [H, T], unused)."""
    context = current()
    assert context is not None
    if any(option is not None for option in inference_only):
        raise context.unsupported("varlen_attn with a cache", "Leave seqused_k, block_table and num_splits out.")
    if cu_seq_k is not None and cu_seq_k is not cu_seq_q:
        raise context.unsupported("varlen_attn between different sequences", "Pass the same tensor as both cu_seq.")
    causal, window = _window(window_size or [-1, -1], is_causal, context)
    ids = remembered(context, cu_seq_q, lambda bounds: document_ids_from_cu_seqlens(bounds, query.shape[0]))
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in autocast(query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.ops.fxpar.attention(q, k, v, ids, None, causal, window, float(scale), 0.0)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), query.new_empty(0)


def _window(size: list[int], causal: bool, context: CaptureContext) -> tuple[bool, int]:
    """(causal, window) of fxpar's op; torch counts the tokens beside a query, fxpar the query too."""
    left, right = size
    if right == 0:
        return True, left + 1 if left >= 0 else 0
    if left == right:
        return causal, left + 1 if left >= 0 else 0
    raise context.unsupported(f"varlen_attn with window_size={tuple(size)}", "Use (-1, -1), (W, W) or (W, 0).")
