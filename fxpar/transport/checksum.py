"""Checksums of slices: 64 bits each, bit-exact, and different if elements change places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.errors import ChecksumError
from fxpar.switch.plan import Box

# Odd constants of the finaliser of MurmurHash3 (public domain), as signed 64-bit numbers.
_MIX = -0x00AE502812AA7333
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class Where:
    """What a check is about: the tensors of a view, one box of each."""

    phase: str
    fqns: Sequence[str]
    box: Box
    src: int
    dst: int


def text_of(box: Box) -> str:
    """`[0:4, 8:16]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def checksums(view: Tensor, dtype: torch.dtype) -> Tensor:
    """[M] int64 of a view `[M, ...]`, as its elements would be in `dtype`, whatever its strides."""
    flat = torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view).view(view.shape[0], -1)
    raw = flat.view(torch.uint8)
    missing = -raw.shape[1] % 8
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing))
    words = raw.contiguous().view(torch.int64)
    place = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device) * _STEP
    # A product by an odd number keeps all 64 bits apart; the shift carries high bits into the sum's low ones, so that
    # a change of place shows although sums commute.
    mixed = (words ^ place) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _STEP
    return (mixed ^ (mixed >> 32)).sum(1)


def write_sums(trailer: Tensor, view: Tensor, dtype: torch.dtype) -> None:
    """Put the checksums of what is sent behind the message."""
    trailer.copy_(checksums(view, dtype))


def compare(trailer: Tensor, view: Tensor, dtype: torch.dtype, where: Where) -> None:
    """Raise ChecksumError for the first tensor of `view` whose checksum is not the one that came with it."""
    _compare(trailer, checksums(view, dtype), where)


def compare_copy(src: Tensor, dst: Tensor, where: Where) -> None:
    """The same for a copy at home."""
    _compare(checksums(src, dst.dtype), checksums(dst, dst.dtype), where)


def _compare(sent: Tensor, found: Tensor, where: Where) -> None:
    wrong = (sent != found).nonzero()
    if len(wrong):
        raise ChecksumError(where.phase, where.fqns[int(wrong[0])], text_of(where.box), where.src, where.dst)
