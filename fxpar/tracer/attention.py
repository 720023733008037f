"""Scaled dot product attention as `fxpar::attention`, or as plain math where the op does not apply."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar import ops
from fxpar.torch_api.symbolic import known_equal
from fxpar.tracer.context import MaskRule
from fxpar.tracer.dropout import dropout

aten = torch.ops.aten
assert ops  # importing it registers torch.ops.fxpar


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees, and how scores are made; the words are those of `fxpar.ops.attention`."""

    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_p: float = 0.0


def attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of q [B, H, S, E] over k [B, Hkv, S, E], v [B, Hkv, S, Ev] -> [B, H, S, Ev].

    Under autocast the inputs are cast first, as ATen does for its own attention.
    """
    q, k, v = autocast(q, k, v)
    scale = rule.scale if rule.scale is not None else 1.0 / math.sqrt(q.shape[-1])
    mask = None if rule.mask is None else _full_mask(rule.mask, q, k)
    learned = mask is not None and mask.requires_grad
    # With fewer queries than keys the op has no causal order; ATen aligns them at the first query.
    uneven = (rule.causal or rule.window > 0) and not known_equal(q.shape[2], k.shape[2])
    if rule.dropout_p > 0.0 or learned or uneven:
        return _attend_by_math(q, k, v, mask, scale, rule)
    out, _ = torch.ops.fxpar.attention(
        q, k, v, rule.document_ids, mask, rule.causal, rule.window, float(scale), rule.softcap
    )
    return out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    document_ids: Tensor | None = None,
    rule: MaskRule | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` for any number of leading dims: query [..., H, S, E], mask [..., S, Skv].

    `rule` says what the mask would have hidden, if there was one of known meaning.
    """
    q, k, v = _at_least_4d(query), _at_least_4d(key), _at_least_4d(value)
    leading = _broadcast([t.shape[:-3] for t in (q, k, v)])
    heads = (q.shape[-3], k.shape[-3], v.shape[-3])
    if not enable_gqa:
        heads = (max(heads, key=_not_one),) * 3
    q, k, v = (_expand(t, [*leading, h, *t.shape[-2:]]) for t, h in zip((q, k, v), heads, strict=True))
    mask = attn_mask
    if len(leading) != 1:  # more dims before the heads: fold them into one
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, len(leading) - 1)
        q, k, v = (t.flatten(0, len(leading) - 1) for t in (q, k, v))
    causal, window = (is_causal, 0) if rule is None else (rule.causal, rule.window)
    out = attend(q, k, v, AttentionRule(causal, window, 0.0, scale, mask, document_ids, dropout_p))
    if len(leading) != 1:
        out = out.unflatten(0, leading)
    return out.reshape(*out.shape[-max(query.dim(), key.dim(), value.dim()) :])


def _attend_by_math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, rule: AttentionRule) -> Tensor:
    """The same in plain ATen, for what needs the probabilities themselves."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if rule.softcap > 0:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    hidden = _hidden(q, k, rule)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if rule.document_ids is not None or mask is not None:
        probabilities = aten._safe_softmax.default(wide, -1)  # zeros for a query that sees no key, as the op has
    else:
        probabilities = torch.softmax(wide, -1)
    return torch.matmul(dropout(probabilities.to(q.dtype), rule.dropout_p), v)


def _hidden(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor | None:
    """[1 or B, 1, Sq, Skv]: True where causality, window or documents hide a key."""
    hidden = None
    if rule.causal or rule.window > 0:
        back = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None, :]
        hidden = back < 0 if rule.causal else back <= -rule.window
        if rule.window > 0:
            hidden = hidden | (back >= rule.window)
        hidden = hidden[None, None]
    if rule.document_ids is not None:
        other = rule.document_ids[:, None, :, None] != rule.document_ids[:, None, None, :]
        hidden = other if hidden is None else hidden | other
    return hidden


def _full_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as [B or 1, H or 1, Sq, Skv]; integer masks are not defined by ATen, floats get q's dtype."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    return _expand(mask, [*mask.shape[:2], q.shape[2], k.shape[2]])


def _expand(x: Tensor, shape: list[int | torch.SymInt]) -> Tensor:
    """x expanded to `shape`, or x itself if it has that shape."""
    same = len(shape) == x.dim() and all(known_equal(a, b) for a, b in zip(x.shape, shape, strict=True))
    return x if same else x.expand(*shape)


def _at_least_4d(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def _not_one(size: int | torch.SymInt) -> bool:
    return not known_equal(size, 1)


def _broadcast(shapes: list[torch.Size]) -> list[int | torch.SymInt]:
    """The common shape of leading dims that are equal or 1."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [max(sizes, key=_not_one) for sizes in zip(*padded, strict=True)]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the surrounding autocast, if there is one."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype.is_floating_point and t.dtype != torch.float64 else t for t in tensors)
