"""What a tensor holds, as one number: to tell whether ranks hold the same without sending it."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements at a time, so that nothing of the size of a tensor is made
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
# Of a product modulo 2**64 the highest bits of a word would reach only those above them: words are half as wide.
_WORDS = {1: torch.uint8, 2: torch.int16}


def content(value: Tensor) -> Tensor:
    """An int64 on the tensor's device that depends on every bit and on its place, whatever the strides.

    Sums of products by odd numbers, modulo 2**64: the order of the sum does not matter, and one element that differs
    always shows.
    """
    flat = value.detach().resolve_conj().resolve_neg().contiguous().flatten()
    words = flat.view(_WORDS.get(flat.dtype.itemsize, torch.int32))
    weights = _weights(min(len(words), _CHUNK), words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK) if len(words) else ():
        total = total * _STEP + (chunk * weights[: len(chunk)]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers, the first of them 1, in no regular order: of regular ones many places have the same sum."""
    mixed = torch.arange(count, dtype=torch.int64, device=device) * _STEP
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _STEP | 1
