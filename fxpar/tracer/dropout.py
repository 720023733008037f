"""Dropout as `fxpar::dropout`: a mask from the graph's seed, the same whenever the same call runs again.

Where the graph has token numbers (see `fxpar.tracer.signature`), the mask of a token depends on its sequence and its
place in it, not on the row: a dim of the size of the token dim is counted by them. A value without such a dim belongs
to the row, and takes the number of the row's first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from fxpar.ops.dropout import dropout as fxpar_dropout
from fxpar.torch_api.symbolic import known_equal
from fxpar.tracer.context import current


def salt(name: str) -> int:
    """A stable 62-bit number for the dropout that `Provenance.next_call` calls `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def dropout(x: Tensor, p: float) -> Tensor:
    """x with a share p of its elements dropped (by torch's generator outside of a capture)."""
    context = current()
    if p == 0.0 or context is None:
        return F.dropout(x, p) if p else x
    name, seed, numbers = salt(context.provenance.next_call()), context.seed, context.token_numbers
    if numbers is None:
        return fxpar_dropout(x, float(p), seed, name)
    row = numbers.reshape(-1)
    by_dim = {d: row for d, size in enumerate(x.shape) if known_equal(size, row.shape[0])}
    return fxpar_dropout(x, float(p), seed if by_dim else seed + row[0], name, by_dim)


def functional_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout`; an in-place one writes its result back."""
    if not training or p == 0.0:
        return input
    out = dropout(input, p)
    return input.copy_(out) if inplace else out


def channel_dropout(rank: int) -> Callable[..., Tensor]:
    """`F.dropout1d`, `2d`, `3d`: drop whole channels of [N, C, ...]. An input of fewer than `rank` dims has no N."""

    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        x = input if input.dim() >= rank else input.unsqueeze(0)
        kept = dropout(x.new_ones(x.shape[:2]), p)
        out = (x * kept.view(*kept.shape, *(1,) * (x.dim() - 2))).view(input.shape)
        return input.copy_(out) if inplace else out

    return drop
