"""torch's memory-efficient attention behind `fxpar::attention`, for CUDA tensors that flash does not take.

The kernel wants as many key and value heads as query heads, and keeps a padded row of lse per document: heads are
repeated and their gradients added up, and lse is laid out per token of the batch here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxpar.ops.attention_cpu import bshe
from fxpar.torch_api import kernels

_LSE_STEP = 32  # the kernel rounds the rows of lse of a document up to a multiple of this
_NO_MASK, _CAUSAL = 0, 1  # the kernel's names of masks


def fits(q: Tensor, v: Tensor, documents: int, longest: int) -> bool:
    """Whether the kernel computes plain or causal attention of these, and its lse takes no more than q does."""
    step = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}.get(q.dtype)
    B, _, S, E = q.shape
    return (
        step is not None
        and E % step == 0
        and v.shape[3] % step == 0
        and documents * longest <= B * S * E
        and 0 not in q.shape
        and 0 not in v.shape
    )


def _places(lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The document of each token, and its place there, from cumulative lengths."""
    numbers = torch.arange(lengths.shape[0] - 1, device=lengths.device)
    document = numbers.repeat_interleave(lengths.diff(), output_size=tokens)
    return document, torch.arange(tokens, device=lengths.device) - lengths[document]


def _rows(x: Tensor, heads: int, packed: bool) -> Tensor:
    """x [B, H or fewer, S, E] as [B, S, H, E], or as [1, B * S, H, E] if packed."""
    x = x.transpose(1, 2)
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], 2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.flatten(0, 1)[None] if packed else x


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Tensor | None, longest: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fxpar::attention`; cumulative `lengths` and `longest` of packed documents, None and Sq without."""
    B, H, S, _ = q.shape
    packed = lengths is not None
    rows = (_rows(x, H, packed) for x in (q, k, v))
    longest_key = longest if packed else k.shape[2]
    mask = _CAUSAL if causal else _NO_MASK
    out, kept, *_ = kernels.efficient_attention(
        *rows, None, lengths, lengths, longest, longest_key, 0.0, mask, True, scale=scale
    )
    if lengths is None:
        lse = kept[:, :, :S]
    else:
        document, place = _places(lengths, B * S)
        lse = kept[document, :, place].view(B, S, H).transpose(1, 2)
    return bshe(out.view(B, S, H, -1).transpose(1, 2)), lse.contiguous()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    lengths: Tensor | None,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `fxpar::attention`, likewise."""
    B, H, S, _ = q.shape
    packed = lengths is not None
    documents = B if lengths is None else lengths.shape[0] - 1
    # Rows past the end of a document weigh nothing: exp(score - inf) is 0.
    kept = lse.new_full((documents, H, math.ceil(longest / _LSE_STEP) * _LSE_STEP), torch.inf)
    if lengths is None:
        kept[:, :, :S] = lse
    else:
        document, place = _places(lengths, B * S)
        kept[document, :, place] = lse.transpose(1, 2).flatten(0, 1)
    longest_key = longest if packed else k.shape[2]
    wide_out = _rows(out, H, packed)
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    grad, *inputs = (_rows(x, H, packed) for x in (dout, q, k, v))
    dq, dk, dv, _ = kernels.efficient_attention_backward(
        grad,
        *inputs,
        None,
        wide_out,
        lengths,
        lengths,
        longest,
        longest_key,
        kept,
        0.0,
        no_dropout,
        no_dropout,
        _CAUSAL if causal else _NO_MASK,
        False,
        scale=scale,
    )
    return _heads(dq, q), _heads(dk, k), _heads(dv, v)


def _heads(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient of `of` [B, Hkv, S, E] from that of its repeated heads."""
    B, Hkv, S, E = of.shape
    return bshe(grad.reshape(B, S, Hkv, -1, E).sum(3).transpose(1, 2))
