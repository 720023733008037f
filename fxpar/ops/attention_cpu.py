"""Kernels of `fxpar::attention` made of plain ATen calls: CPU flash, and blocks on any device.

Two ways to compute one piece of attention:

- **flash**: ATen's CPU flash kernel, for plain or causal attention. It reads grouped heads itself.
- **blocks**: a block of query rows at a time over the keys that the block can see, so memory is
  bounded whatever S is. It takes every option and runs on every device: CUDA falls back on it.

Packed documents whose ids form one run each are cut into one piece per document; ids that come
back after another id go through the blocks with a comparison of ids as the mask.

All pieces compute in fp32 (fp64 for fp64 inputs), also for bf16 and fp16 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxpar.torch_api import kernels

_CPU_BLOCK_SCORES = 1 << 20  # scores held at once: 4 MiB in fp32, about an L2 cache
_GPU_BLOCK_SCORES = 1 << 27
_CPU_BLOCK_ROWS = 64
_GPU_BLOCK_ROWS = 512
_MIN_BLOCK_ROWS = 32  # of all heads that share keys; fewer would leave a matrix product starving


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query sees, and how scores are made (`fxpar.ops.attention`). Query i stands at key i + offset."""

    ids: Tensor | None
    mask: Tensor | None
    causal: bool
    window: int
    scale: float
    softcap: float
    offset: int = 0

    def narrow(self, b0: int, b1: int, h0: int, h1: int) -> MaskRule:
        """The rule for batch rows b0:b1 and query heads h0:h1."""
        ids, mask = self.ids, self.mask
        if ids is not None and ids.shape[0] > 1:
            ids = ids[b0:b1]
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[b0:b1]
            mask = mask if mask.shape[1] == 1 else mask[:, h0:h1]
        return replace(self, ids=ids, mask=mask)

    def without_ids(self) -> MaskRule:
        """The rule where there is one document only."""
        return self if self.ids is None else replace(self, ids=None)

    def document(self, rows: slice, tokens: slice) -> MaskRule:
        """The rule (without ids) inside the document at these tokens of these batch rows."""
        if self.mask is None:
            return self
        mask = self.mask if self.mask.shape[0] == 1 else self.mask[rows]
        return replace(self, mask=mask[:, :, tokens, tokens])

    def keys(self, i0: int, i1: int, n_keys: int) -> tuple[int, int]:
        """The range of keys outside of which queries i0:i1 see nothing."""
        low, high, i0, i1 = 0, n_keys, i0 + self.offset, i1 + self.offset
        if self.window > 0:
            low = max(0, i0 - self.window + 1)
            high = min(n_keys, i1 - 1 + self.window)
        high = min(high, i1) if self.causal else high
        return (low, high) if low < high else (0, 1)  # a kernel needs a key, which `hide_` hides

    def hide_(self, scores: Tensor, i0: int, i1: int, j0: int, j1: int) -> None:
        """Apply mask, ids, causality and window in place to scores [b, h, i1 - i0, j1 - j0]."""
        if self.mask is not None:
            mask = self.mask[:, :, i0:i1, j0:j1]
            scores.add_(_bias(mask, scores.dtype) if mask.dtype == torch.bool else mask)
        if self.ids is not None:
            same = self.ids[:, None, i0:i1, None] == self.ids[:, None, None, j0:j1]
            scores.add_(_bias(same, scores.dtype))
        if self.window > 0 or self.causal:
            first = j0 if self.window > 0 else max(j0, i0)  # without a window, earlier keys are seen
            queries = torch.arange(i0, i1, device=scores.device)[:, None] + self.offset
            back = queries - torch.arange(first, j1, device=scores.device)
            seen = back >= 0 if self.causal else back > -self.window
            if self.window > 0:
                seen &= back < self.window
            scores[..., first - j0 :].add_(_bias(seen, scores.dtype))


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, -inf elsewhere: 1 - 1 / seen.

    On CPU adding this is several times faster than `masked_fill`, which does not vectorise.
    """
    return seen.to(dtype).reciprocal_().neg_().add_(1.0)


def _exp_(x: Tensor) -> Tensor:
    """exp of x <= 0 in place, where what is next to nothing (1.8e-35 in fp32) becomes 0.

    On CPU exp is 10 to 100 times slower where its result is 0 or denormal, as in hidden scores.
    """
    low = -700.0 if x.dtype == torch.float64 else -80.0
    x.clamp_(min=low).exp_()
    return torch.threshold_(x, 1.01 * math.exp(low), 0.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bshe(x: Tensor) -> Tensor:
    """x [B, H, S, E] with its memory laid out as [B, S, H, E]; a copy only if it is not already."""
    inner = x.transpose(1, 2)
    return x if inner.is_contiguous() else inner.contiguous().transpose(1, 2)


def empty_bshe(like: Tensor, H: int, E: int) -> Tensor:
    """An empty [B, H, S, E], of B and S of `like` [B, ..., S, ...], with its memory laid out as [B, S, H, E]."""
    return like.new_empty(like.shape[0], like.shape[2], H, E).transpose(1, 2)


# ------------------------------------------------------------------------------------- documents
def document_runs(ids: Tensor) -> list[list[int]] | None:
    """Per row of ids [B, S]: where each run of equal ids ends; None if an id comes back later.

    Reads the ids on the host. Rows that are all alike are given once.
    """
    rows: list[list[int]] = []
    for row in ids:
        values, lengths = torch.unique_consecutive(row, return_counts=True)
        if values.shape[0] > 1 and torch.unique(values).shape[0] < values.shape[0]:
            return None
        rows.append(lengths.cumsum(0).tolist())
    return rows[:1] if all(row == rows[0] for row in rows) else rows


@dataclass(frozen=True)
class _Runs:
    """What `document_runs` found in an ids tensor when it was at `version`."""

    version: int
    ends: list[list[int]] | None


_RUNS = WeakTensorKeyDictionary()


def _known_runs(ids: Tensor) -> list[list[int]] | None:
    """`document_runs`, kept with the tensor until it is written to or freed: all layers and the backward ask."""
    if ids.is_inference():  # counts no writes
        return document_runs(ids)
    known = _RUNS.get(ids)
    if known is None or known.version != ids._version:
        known = _Runs(ids._version, document_runs(ids))
        _RUNS[ids] = known
    return known.ends


def _documents(runs: list[list[int]], tensors: tuple[Tensor, ...]) -> Iterator[tuple[slice, slice, tuple[Tensor, ...]]]:
    """(batch rows, tokens, pieces of the tensors [B, H, S, ...]) of each document."""
    for b, ends in enumerate(runs):
        rows = slice(None) if len(runs) == 1 else slice(b, b + 1)
        starts = [0, *ends[:-1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        # One call cuts a tensor into all its pieces: a slice each takes longer than a short document's copy.
        cut = [(x if len(runs) == 1 else x[rows]).split(lengths, 2) for x in tensors]
        for start, end, pieces in zip(starts, ends, zip(*cut, strict=True), strict=True):
            yield rows, slice(start, end), pieces


def forward(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fxpar::attention` on CPU."""
    if rule.ids is None or q.numel() == 0:
        return _arranged_forward(q, k, v, rule.without_ids())
    runs = _known_runs(rule.ids)
    if runs is None:
        return forward_blocks(q, k, v, rule)
    if len(runs) == 1 and len(runs[0]) == 1:
        return _arranged_forward(q, k, v, rule.without_ids())
    out = empty_bshe(q, q.shape[1], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    inside = rule.without_ids()
    for rows, tokens, (qs, ks, vs, o, ls) in _documents(runs, (q, k, v, out, lse)):
        piece, piece_lse = _forward_piece(qs, ks, vs, inside.document(rows, tokens))
        o.copy_(piece)
        ls.copy_(piece_lse)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `fxpar::attention` on CPU."""
    if rule.ids is None or q.numel() == 0:
        return _arranged_backward(dout, q, k, v, out, lse, rule.without_ids())
    runs = _known_runs(rule.ids)
    if runs is None:
        return backward_blocks(dout, q, k, v, out, lse, rule)
    if len(runs) == 1 and len(runs[0]) == 1:
        return _arranged_backward(dout, q, k, v, out, lse, rule.without_ids())
    dq, dk, dv = (empty_bshe(x, x.shape[1], x.shape[3]) for x in (q, k, v))
    inside = rule.without_ids()
    for rows, tokens, pieces in _documents(runs, (dout, q, k, v, out, lse, dq, dk, dv)):
        g, qs, ks, vs, o, ls, *targets = pieces
        made = _backward_piece(g, qs, ks, vs, o, ls, inside.document(rows, tokens))
        for target, piece in zip(targets, made, strict=True):
            target.copy_(piece)
    return dq, dk, dv


# ----------------------------------------------------------------------------------------- flash
def _flash_fits(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> bool:
    """Whether ATen's CPU flash kernel computes this piece."""
    plain = rule.mask is None and rule.softcap == 0.0 and not rule.offset and not 0 < rule.window < k.shape[2]
    return plain and q.shape[3] == v.shape[3] and 0 not in q.shape and 0 not in k.shape


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the compute dtype, each row of E elements in one stretch of memory."""
    tensors = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    if tensors[0].dtype in (torch.float32, torch.float64):  # each call costs a microsecond
        return tensors
    return tuple(x.float() for x in tensors)


def _narrow(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of like."""
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _forward_piece(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """(out, lse) of one document, laid out as the kernel leaves them, in its dtype."""
    if not _flash_fits(q, k, v, rule):
        return forward_blocks(q, k, v, rule)
    return kernels.flash_attention_cpu(*_wide(q, k, v), 0.0, rule.causal, scale=rule.scale)


def _backward_piece(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one document, laid out as the kernel leaves them, in its dtype."""
    if not _flash_fits(q, k, v, rule):
        return backward_blocks(dout, q, k, v, out, lse, rule)
    wide = _wide(dout, q, k, v, out)
    return kernels.flash_attention_cpu_backward(*wide, lse, 0.0, rule.causal, scale=rule.scale)


def _arranged_forward(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    out, lse = _forward_piece(q, k, v, rule)
    return bshe(_narrow(out, q)), lse.contiguous()


def _arranged_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward_piece(dout, q, k, v, out, lse, rule)
    return bshe(_narrow(dq, q)), bshe(_narrow(dk, q)), bshe(_narrow(dv, q))


# ---------------------------------------------------------------------------------------- blocks
@dataclass(frozen=True)
class _Part:
    """Batch rows b0:b1 and key/value heads h0:h1, worked on in blocks of `rows` queries."""

    b0: int
    b1: int
    h0: int
    h1: int
    group: int
    rows: int

    def heads(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """x [B, H, S, E] of query heads -> [b * hkv, group, S, E] of this part, wide, scaled."""
        x = x[self.b0 : self.b1, self.h0 * self.group : self.h1 * self.group]
        wide = x.to(compute_dtype(x.dtype))
        wide = wide if scale == 1.0 else wide * scale
        return wide.reshape(-1, self.group, *x.shape[2:])

    def kv(self, x: Tensor) -> Tensor:
        """x [B, Hkv, S, E] of key/value heads -> [b * hkv, S, E] of this part, wide."""
        x = x[self.b0 : self.b1, self.h0 : self.h1]
        return x.to(compute_dtype(x.dtype)).reshape(-1, *x.shape[2:])

    def into(self, whole: Tensor, i0: int, i1: int, block: Tensor) -> None:
        """Write a block [b * hkv, group * rows, ...] to rows i0:i1 of whole [B, H, S, ...]."""
        target = whole[self.b0 : self.b1, self.h0 * self.group : self.h1 * self.group, i0:i1]
        target.copy_(block.view(target.shape))

    def into_kv(self, whole: Tensor, x: Tensor) -> None:
        """Write x [b * hkv, S, E] to whole [B, Hkv, S, E]."""
        target = whole[self.b0 : self.b1, self.h0 : self.h1]
        target.copy_(x.view(target.shape))

    def blocks(self, n_queries: int, n_keys: int, rule: MaskRule) -> Iterator[tuple[int, int, int, int]]:
        """(first query, end, first key, end) of each block."""
        for i0 in range(0, n_queries, self.rows):
            i1 = min(n_queries, i0 + self.rows)
            yield i0, i1, *rule.keys(i0, i1, n_keys)


def _parts(q: Tensor, k: Tensor, rule: MaskRule) -> Iterator[_Part]:
    """Cut batch and heads so that the scores of one block of rows stay within a fixed size.

    Only for one key/value head of very long keys may they be more: then a block has few rows.
    """
    on_cpu = q.device.type == "cpu"
    budget = _CPU_BLOCK_SCORES if on_cpu else _GPU_BLOCK_SCORES
    B, Hkv, Sk = k.shape[:3]
    if 0 in q.shape[:3]:
        return
    group = q.shape[1] // Hkv
    rows = min(q.shape[2], _CPU_BLOCK_ROWS if on_cpu else _GPU_BLOCK_ROWS)
    keys = min(Sk, 2 * rule.window + rows) if rule.window > 0 else Sk
    rows = min(rows, max(budget // (group * keys), -(-_MIN_BLOCK_ROWS // group)))
    heads = max(1, budget // (group * rows * keys))
    if heads >= Hkv:
        step = heads // Hkv
        for b in range(0, B, step):
            yield _Part(b, min(B, b + step), 0, Hkv, group, rows)
        return
    for b in range(B):
        for h in range(0, Hkv, heads):
            yield _Part(b, b + 1, h, min(Hkv, h + heads), group, rows)


def _scores(
    q: Tensor, k: Tensor, rule: MaskRule, batch: int, block: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor | None]:
    """Final scores [n, group * rows, keys] of a block, and the slope of the soft cap if any.

    q [n, group * rows, E] is scaled already; k [n, keys, E]; n = batch * key/value heads.
    """
    scores, slope = torch.bmm(q, k.mT), None
    if rule.softcap > 0.0:
        scores.div_(rule.softcap).tanh_()
        slope = scores.square().neg_().add_(1.0)
        scores.mul_(rule.softcap)
    i0, i1, _, _ = block
    rule.hide_(scores.view(batch, -1, i1 - i0, scores.shape[2]), *block)
    return scores, slope


def forward_blocks(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fxpar::attention` in blocks of query rows, on any device."""
    out = empty_bshe(q, q.shape[1], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    limits = torch.finfo(lse.dtype)
    if 0 in k.shape[:3]:
        return out.zero_(), lse.fill_(-torch.inf)
    for part in _parts(q, k, rule):
        near = rule.narrow(part.b0, part.b1, part.h0 * part.group, part.h1 * part.group)
        qs, ks, vs = part.heads(q, rule.scale), part.kv(k), part.kv(v)
        for block in part.blocks(q.shape[2], k.shape[2], rule):
            i0, i1, j0, j1 = block
            rows = qs[:, :, i0:i1].flatten(1, 2)
            scores, _ = _scores(rows, ks[:, j0:j1], near, part.b1 - part.b0, block)
            # A row that sees nothing has the maximum -inf; the clamp keeps -inf - -inf away.
            top = scores.amax(-1, keepdim=True).clamp_(min=limits.min)
            weights = _exp_(scores.sub_(top))
            total = weights.sum(-1, keepdim=True)
            part.into(lse, i0, i1, total.log().add_(top))
            found = torch.bmm(weights, vs[:, j0:j1]).div_(total.clamp_(min=limits.tiny))
            part.into(out, i0, i1, found)
    return out, lse


def backward_blocks(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `fxpar::attention` in blocks of query rows, on any device."""
    dq, dk, dv = (empty_bshe(x, x.shape[1], x.shape[3]) for x in (q, k, v))
    if 0 in q.shape[:3] or 0 in k.shape[:3]:
        return dq.zero_(), dk.zero_(), dv.zero_()
    for part in _parts(q, k, rule):
        near = rule.narrow(part.b0, part.b1, part.h0 * part.group, part.h1 * part.group)
        qs, ks, vs = part.heads(q, rule.scale), part.kv(k), part.kv(v)
        gs, dks, dvs = part.heads(dout), torch.zeros_like(ks), torch.zeros_like(vs)
        shift = part.heads(lse[..., None]).clamp(min=torch.finfo(lse.dtype).min)
        inner = (gs * part.heads(out)).sum(-1, keepdim=True)
        for block in part.blocks(q.shape[2], k.shape[2], rule):
            i0, i1, j0, j1 = block
            rows, g, row_shift, row_inner = (x[:, :, i0:i1].flatten(1, 2) for x in (qs, gs, shift, inner))
            scores, slope = _scores(rows, ks[:, j0:j1], near, part.b1 - part.b0, block)
            weights = _exp_(scores.sub_(row_shift))
            dvs[:, j0:j1].baddbmm_(weights.mT, g)
            dscores = torch.bmm(g, vs[:, j0:j1].mT).sub_(row_inner).mul_(weights)
            if slope is not None:
                dscores.mul_(slope)
            dks[:, j0:j1].baddbmm_(dscores.mT, rows)
            part.into(dq, i0, i1, torch.bmm(dscores, ks[:, j0:j1]).mul_(rule.scale))
        part.into_kv(dk, dks)
        part.into_kv(dv, dvs)
    return dq, dk, dv
