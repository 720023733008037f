"""Kernels of `fxpar::attention` on CUDA: ATen's flash and memory-efficient kernels, else blocks of plain ATen calls.

- **flash**: plain, causal and windowed attention in bf16 or fp16 with heads of up to 256, on [B, S, H, E]; packed
  documents on [B * S, H, E] with cumulative lengths, the call that `torch.nn.attention.varlen` makes
- **efficient** (`attention_efficient`): plain and causal attention, packed or not, in fp32, and with head sizes that
  are too large for flash or differ between keys and values
- a mask, a soft cap, a window in fp32, fp64, ids that come back after another id: blocks of query rows
  (`attention_cpu.forward_blocks`), whose memory is bounded whatever S is

The packed kernels' grid and scratch memory grow with the number of documents that they are told of,
so padding the lengths up to one document per token is out of the question. The lengths are read on
the host instead: one synchronisation per `document_ids` tensor, not per call, because all layers
and the backward share the tensor and the answer is kept as long as the tensor lives unchanged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxpar.ops import attention_efficient
from fxpar.ops.attention_cpu import MaskRule, backward_blocks, bshe, forward_blocks
from fxpar.torch_api import kernels

_MAX_FLASH_HEAD = 256


class _Packing(NamedTuple):
    """Where documents begin and end in the B * S tokens of a batch; None lengths: not in runs."""

    version: int  # of the ids tensor when it was read
    batch: int
    lengths: Tensor | None  # cumulative, int32 [documents + 1]
    longest: int


_PACKINGS = WeakTensorKeyDictionary()


def _read_packing(ids: Tensor, batch: int) -> tuple[Tensor | None, int]:
    """Cumulative document lengths and the longest one, from ids [B or 1, S]; synchronises."""
    ids = ids.expand(batch, -1)
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    starts = torch.cat([first, ids[:, 1:] != ids[:, :-1]], dim=1)
    ordered = ids.sort(dim=1).values
    distinct = batch + (ordered[:, 1:] != ordered[:, :-1]).sum()
    begins = starts.flatten().nonzero().squeeze(1)
    ends = torch.cat([begins, begins.new_full((1,), ids.numel())])
    count, longest = torch.stack([distinct, ends.diff().max()]).tolist()
    if count != begins.shape[0]:
        return None, 0
    return ends.to(torch.int32), longest


def _packing(ids: Tensor, batch: int) -> _Packing:
    """`_read_packing`, kept with the tensor until it is written to or freed."""
    if ids.is_inference():  # counts no writes
        return _Packing(0, batch, *_read_packing(ids, batch))
    known = _PACKINGS.get(ids)
    if known is None or known.version != ids._version or known.batch != batch:
        known = _Packing(ids._version, batch, *_read_packing(ids, batch))
        _PACKINGS[ids] = known
    return known


@lru_cache
def _device_has_flash(index: int) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(index)[0] >= 8


def _flash_fits(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> bool:
    """Whether ATen's flash kernels compute this call."""
    E = q.shape[3]
    return (
        rule.mask is None
        and rule.softcap == 0.0
        and not rule.offset
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[3] == E
        and E % 8 == 0
        and E <= _MAX_FLASH_HEAD
        and 0 not in q.shape
        and 0 not in k.shape
        and _device_has_flash(q.device.index)
        and (rule.ids is None or _packing(rule.ids, q.shape[0]).lengths is not None)
    )


@lru_cache
def _device_has_efficient(index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index)[0] >= 8


def _efficient_fits(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> bool:
    """Whether ATen's memory-efficient kernels compute this call."""
    if rule.mask is not None or rule.softcap or rule.window > 0 or 0 in k.shape:
        return False
    if not _device_has_efficient(q.device.index):
        return False
    if rule.ids is None:
        return attention_efficient.fits(q, v, q.shape[0], q.shape[2])
    lengths, longest = _packing(rule.ids, q.shape[0])[2:]
    return lengths is not None and attention_efficient.fits(q, v, lengths.shape[0] - 1, longest)


def _rows(x: Tensor, packed: bool) -> Tensor:
    """x [B, H, S, E] as [B, S, H, E], or as [B * S, H, E] if packed; rows of E in one stretch."""
    x = x.transpose(1, 2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.flatten(0, 1) if packed else x


def _window(rule: MaskRule) -> tuple[int, int]:
    """Flash's (keys to the left, keys to the right); -1 means all."""
    if rule.window > 0:
        return rule.window - 1, 0 if rule.causal else rule.window - 1
    return -1, 0 if rule.causal else -1


def _lengths(q: Tensor, k: Tensor, rule: MaskRule) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Flash's (cumulative query lengths, key lengths, longest query, longest key)."""
    if rule.ids is None:
        return None, None, q.shape[2], k.shape[2]
    packing = _packing(rule.ids, q.shape[0])
    return packing.lengths, packing.lengths, packing.longest, packing.longest


def forward(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fxpar::attention` on CUDA."""
    if not _flash_fits(q, k, v, rule):
        if not _efficient_fits(q, k, v, rule):
            return forward_blocks(q, k, v, rule)
        lengths, _, longest, _ = _lengths(q, k, rule)
        return attention_efficient.forward(q, k, v, rule.causal, rule.scale, lengths, longest)
    packed = rule.ids is not None
    left, right = _window(rule)
    out, lse, *_ = kernels.flash_attention_cuda(
        *(_rows(x, packed) for x in (q, k, v)),
        *_lengths(q, k, rule),
        0.0,
        rule.causal and rule.window <= 0,
        False,
        scale=rule.scale,
        window_size_left=left,
        window_size_right=right,
    )
    if packed:  # lse [H, B * S]
        lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
    B, H, S, _ = q.shape
    return bshe(out.view(B, S, H, -1).transpose(1, 2)), lse.contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `fxpar::attention` on CUDA."""
    if not _flash_fits(q, k, v, rule):
        if not _efficient_fits(q, k, v, rule):
            return backward_blocks(dout, q, k, v, out, lse, rule)
        lengths, _, longest, _ = _lengths(q, k, rule)
        return attention_efficient.backward(dout, q, k, v, out, lse, rule.causal, rule.scale, lengths, longest)
    packed = rule.ids is not None
    left, right = _window(rule)
    if packed:
        lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    dq, dk, dv = kernels.flash_attention_cuda_backward(
        *(_rows(x, packed) for x in (dout, q, k, v, out)),
        lse.contiguous(),
        *_lengths(q, k, rule),
        0.0,
        rule.causal and rule.window <= 0,
        # Random state of the dropout, which is off.
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
        scale=rule.scale,
        window_size_left=left,
        window_size_right=right,
    )
    dq, dk, dv = (bshe(g.reshape(x.transpose(1, 2).shape).transpose(1, 2)) for g, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv
