"""`fxpar::dropout`: dropout whose mask depends on the global position of an element, not on a rank.

The mask is a function of (seed, salt, linear index of the element in the global tensor) alone. A
rank that holds a slice of x is given, per dim, what that dim's indices contribute to the global
linear index; any slicing, replication or recomputation then yields exactly the mask of one device.

The function is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; the constants are Stafford's "Mix13"): element i takes the i-th output of the stream
that starts at a key made of seed and salt. It is written in wrapping int64 ATen ops, whose bits are
the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import OpInputError

_CPU_BLOCK = 1 << 17  # elements whose two int64 temporaries, 2 MiB, stay in an L2 cache
_GPU_BLOCK = 1 << 24

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define(
    "dropout(Tensor x, Tensor seed, Tensor[] offsets, float p, int salt) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _signed(bits: int) -> int:
    """64 bits as the int64 that holds them."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27)


def dropout(x: Tensor, p: float, seed: Tensor, salt: int, numbers: Mapping[int, Tensor] | None = None) -> Tensor:
    """x with each element zeroed with probability p and the others divided by 1 - p.

    x: any shape, taken as the global tensor. seed: one int64, for example one per step. salt:
    tells apart the dropouts of a model that share a seed. Equal (shape, p, seed, salt) give equal
    masks, so two dropouts of one step need different salts. The mask at an index does not depend on the sizes, so
    padding a batch at its end leaves it as it was. `numbers` gives the indices of a dim other numbers than 0, 1, ...:
    by dim, int64 [size].
    """
    given = numbers or {}
    offsets = [
        (given[d] if d in given else torch.arange(size, device=x.device)) * stride
        for d, (size, stride) in enumerate(zip(x.shape, index_strides(x.dim()), strict=True))
    ]
    return torch.ops.fxpar.dropout.default(x, seed, offsets, p, salt)


def token_numbers(sequences: Iterable[tuple[int, int]]) -> Tensor:
    """Numbers of the tokens of a row, int64 [1, T], from (index in the mini-batch, length) of each of its sequences.

    A token's number depends on its sequence and its place in it alone, not on the row or on what else is in it.
    """
    rows = [torch.arange(length) + _mix_int(_signed((index + 1) * _GAMMA)) for index, length in sequences]
    return torch.cat(rows)[None]


def uniform_numbers(count: int, seed: int) -> Tensor:
    """Numbers between -1 and 1, float64 [count], of 31 bits of the stream of `seed` each: the same everywhere."""
    state = torch.arange(count) * _GAMMA + _mix_int(_signed((seed + 1) * _GAMMA))
    return (_mix(state) >> 33).double().mul_(2.0**-30)


def index_strides(rank: int) -> list[int]:
    """What one step along each dim adds to an element's number: odd multipliers, so that wrap-around sums are as good
    as distinct whatever the sizes are.
    """
    return [_mix_int(_signed((d + 1) * _GAMMA)) | 1 for d in range(rank)]


def _mix_int(z: int) -> int:
    """`_mix` on a Python int."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        z = _signed((z ^ ((z & ((1 << 64) - 1)) >> shift)) * multiplier)
    return z


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's mixing function on int64, less its last step.

    That step, `z ^= z >> 31`, leaves the top 31 bits alone, and those decide what is kept.
    """
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        # int64 shifts copy the sign bit down; the mask makes it a shift of 64 plain bits.
        shifted = (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z = shifted.bitwise_xor_(z).mul_(multiplier)
    return z


def _key(seed: Tensor, salt: int) -> Tensor | int:
    """Where the stream of (seed, salt) starts; stays on the seed's device."""
    if seed.device.type == "cpu":
        return _mix_int(_signed(int(seed) + _mix_int(_signed((salt + 1) * _GAMMA))))
    return _mix(seed.reshape(()) + _mix_int(_signed((salt + 1) * _GAMMA)))


def _drop(x: Tensor, streams: list[Tensor], p: float, out: Tensor) -> None:
    """Write the dropout of x to out; streams: per dim, its share of the SplitMix64 state."""
    limit = _CPU_BLOCK * torch.get_num_threads() if x.device.type == "cpu" else _GPU_BLOCK
    if x.numel() > limit:  # cut along the first dim that can be cut
        dim = next(d for d, size in enumerate(x.shape) if size > 1)
        size = max(1, limit * x.shape[dim] // x.numel())
        for start in range(0, x.shape[dim], size):
            length = min(size, x.shape[dim] - start)
            cut = streams.copy()
            cut[dim] = streams[dim].narrow(0, start, length)
            _drop(x.narrow(dim, start, length), cut, p, out.narrow(dim, start, length))
        return
    state = streams[-1]
    for stream in reversed(streams[:-1]):
        state = stream.view(-1, *(1,) * state.dim()) + state
    # Drop the lowest p of the 2**64 values.
    dropped = _mix(state) < round(p * 2**64) - 2**63
    torch.mul(x, 1.0 / (1.0 - p), out=out)
    out.masked_fill_(dropped.view(x.shape), 0.0)


def _forward(x: Tensor, seed: Tensor, offsets: list[Tensor], p: float, salt: int) -> Tensor:
    if not 0.0 <= p <= 1.0:
        raise OpInputError("dropout", f"p is a probability, got {p}")
    if [o.shape for o in offsets] != [(size,) for size in x.shape]:
        raise OpInputError(
            "dropout",
            f"x {tuple(x.shape)} needs one offset per index of each dim, got {[tuple(o.shape) for o in offsets]}",
        )
    out = torch.empty_like(x)
    if p == 0.0:
        return out.copy_(x)
    if p == 1.0:
        return out.zero_()
    if x.numel() == 0:
        return out
    # Adding i times gamma to the key is linear in i, so it is done on the 1-D parts.
    key = _key(seed, salt)
    streams = [o * _GAMMA for o in offsets] or [torch.zeros(1, dtype=torch.int64, device=x.device)]
    streams[-1].add_(key)
    _drop(x, streams, p, out)
    return out


def _fake(x: Tensor, seed: Tensor, offsets: list[Tensor], p: float, salt: int) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, offsets, ctx.p, ctx.salt = inputs
    ctx.save_for_backward(seed, *offsets)


def _autograd(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    seed, *offsets = ctx.saved_tensors
    dx = torch.ops.fxpar.dropout.default(dout, seed, offsets, ctx.p, ctx.salt)
    return dx, None, [None] * len(offsets), None, None


for _device in ("CPU", "CUDA"):
    _LIB.impl("dropout", _forward, _device)
torch.library.register_fake("fxpar::dropout", _fake, lib=_LIB)
torch.library.register_autograd("fxpar::dropout", _autograd, setup_context=_setup_context, lib=_LIB)
