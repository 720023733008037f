"""Random numbers by element number: an element has the same value wherever, and beside whatever others, it is drawn.

Philox4x32-10, a counter-based generator: J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011. The key is the hash of a name, the counter the number of the element in its whole
tensor, row by row. Values are worked out in float64 and cast once, so they are equal bit by bit on one kind of device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]  # (start, stop) per dim
Words = tuple[Tensor, Tensor, Tensor, Tensor]  # int64, below 2**32
Draw = Callable[[Words], Tensor]  # float64 values of as many elements

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)  # of the key, from round to round
_ROUNDS = 10
# Elements at a time: they fit into a cache, and log and cos always see as many, so that no element is worked out as the
# rest of a vector here and within one there.
_BLOCK = 1 << 15


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words per counter; both are four and two words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap around in int64; shifted and masked, their 64 bits are right nevertheless.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _STEPS[0]) & _WORD, (k1 + _STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(low: float, high: float) -> Draw:
    """Uniform between two numbers."""
    return lambda words: _unit(words[0], words[1]).mul_(high - low).add_(low)


def normal(mean: float, std: float) -> Draw:
    """Normal (G. E. P. Box and M. E. Muller, 1958)."""

    def draw(words: Words) -> Tensor:
        radius = _unit(words[0], words[1]).log_().mul_(-2.0).sqrt_()
        return radius.mul_(_unit(words[2], words[3]).mul_(2.0 * math.pi).cos_()).mul_(std).add_(mean)

    return draw


def truncated_normal(mean: float, std: float, low: float, high: float) -> Draw:
    """Normal, given that it lies between two numbers: the inverse of its distribution function."""
    a, b = (low - mean) / std, (high - mean) / std
    sign = -1.0 if a > 0 else 1.0  # the lower tail, where small probabilities keep their digits
    a, b = (-b, -a) if a > 0 else (a, b)
    least, most = (0.5 * math.erfc(-x / math.sqrt(2.0)) for x in (a, b))

    def draw(words: Words) -> Tensor:
        share = _unit(words[0], words[1]).mul_(most - least).add_(least)
        return torch.special.ndtri(share).clamp_(a, b).mul_(sign * std).add_(mean).clamp_(low, high)

    return draw


def fill(target: Tensor, box: Box, shape: Sequence[int], name: str, draw: Draw) -> None:
    """Write the part `box` of a random tensor of `shape` to `target` (contiguous); `name` says which one it is."""
    digest = hashlib.sha256(name.encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    flat = target.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        local = torch.arange(start, start + _BLOCK, device=target.device)
        number = _numbers(local, box, shape)
        none = torch.zeros_like(number)
        values = draw(philox((number & _WORD, number >> 32, none, none), key))
        into = flat[start : start + _BLOCK]
        into.copy_(values[: into.numel()])


def _numbers(local: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Element numbers in the whole of elements of the box; past its end any numbers."""
    number, stride, left = torch.zeros_like(local), 1, local
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        width = stop - start
        number += (left % width + start) * stride
        left, stride = left // width, stride * size
    return number & ((1 << 62) - 1)


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """Float64 numbers in (0, 1) from 52 of the 64 bits: the middles of 2**52 equal parts."""
    return (((high << 20) | (low >> 12)).double() + 0.5).mul_(2.0**-52)
