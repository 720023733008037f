"""Data movement around a collective, in plain torch ops: which part of a tensor goes to which rank.

Collectives work on `[K, ...]` buffers, row i for (or from) rank i of the group of K. Sizes are read from the tensors at
run time, so one graph serves every length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _padded(x: Tensor, degree: int, dim: int) -> Tensor:
    missing = -x.shape[dim] % degree
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def pack(x: Tensor, degree: int, dim: int, sections: tuple[int, ...] = ()) -> Tensor:
    """[..., N, ...] -> [K, ..., N/K, ...]: chunk i (of each section) of dim `dim` in row i; zero-padded if uneven."""
    if not sections:
        x = _padded(x, degree, dim)
        return x.unflatten(dim, (degree, x.shape[dim] // degree)).movedim(dim, 0).contiguous()
    if len(set(sections)) == 1:
        count = len(sections)
        x = x.unflatten(dim, (count, degree, x.shape[dim] // (count * degree)))
        return x.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()
    unit = x.shape[dim] // sum(sections)
    parts = x.split([s * unit for s in sections], dim)
    return torch.cat([pack(part, degree, dim) for part in parts], dim + 1)


def unpack(rows: Tensor, dim: int, sections: tuple[int, ...] = (), size: int = -1) -> Tensor:
    """Inverse of `pack`; `size` >= 0 drops padding beyond it."""
    if not sections:
        whole = rows.movedim(0, dim).flatten(dim, dim + 1)
        return whole if size < 0 else whole.narrow(dim, 0, size)
    if len(set(sections)) == 1:
        count = len(sections)
        rows = rows.unflatten(dim + 1, (count, rows.shape[dim + 1] // count))
        return rows.movedim(0, dim + 1).flatten(dim, dim + 2)
    unit = rows.shape[dim + 1] // sum(sections)
    parts = rows.split([s * unit for s in sections], dim + 1)
    return torch.cat([unpack(part, dim) for part in parts], dim)


def take(x: Tensor, degree: int, dim: int, sections: tuple[int, ...], index: int) -> Tensor:
    """Row `index` of `pack(x)`, without making the others.

    Contiguous, as the rows of `pack` are: torch's layer norm on the CPU reads its statistics as if they were (2.13).
    """
    return _take(x, degree, dim, sections, index).contiguous()


def _take(x: Tensor, degree: int, dim: int, sections: tuple[int, ...], index: int) -> Tensor:
    if not sections:
        width = -(-x.shape[dim] // degree)
        start = min(index * width, x.shape[dim])
        piece = x.narrow(dim, start, min(width, x.shape[dim] - start))
        missing = width - piece.shape[dim]
        if not missing:
            return piece
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([piece, x.new_zeros(shape)], dim)
    if len(set(sections)) == 1:
        count = len(sections)
        x = x.unflatten(dim, (count, degree, x.shape[dim] // (count * degree)))
        return x.select(dim + 1, index).flatten(dim, dim + 1)
    unit = x.shape[dim] // sum(sections)
    parts = x.split([s * unit for s in sections], dim)
    return torch.cat([_take(part, degree, dim, (), index) for part in parts], dim)


def keep_on_first(x: Tensor, index: int) -> Tensor:
    """x where `index` is 0, zeros elsewhere: one term of a sum whose others are nothing."""
    return x if index == 0 else torch.zeros_like(x)


def lift(x: Tensor) -> Tensor:
    """[...] -> [1, ...], contiguous: this rank's row."""
    return x.unsqueeze(0).contiguous()


def repeat(row: Tensor, degree: int) -> Tensor:
    """[1, ...] -> [K, ...]: the same row for every rank."""
    return row.expand(degree, *row.shape[1:]).contiguous()


def lower(row: Tensor) -> Tensor:
    """[1, ...] -> [...]."""
    return row.squeeze(0)


def fuse(rows: list[Tensor]) -> Tensor:
    """Several [K, ...] -> one [K, total]."""
    return torch.cat([r.reshape(r.shape[0], -1) for r in rows], 1)


def unfuse(fused: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """[K, total] -> tensors of shapes [K, *shape]."""
    sizes = []
    for shape in shapes:
        count = 1
        for s in shape:
            count *= s
        sizes.append(count)
    parts = fused.split(sizes, 1)
    return [part.reshape(fused.shape[0], *shape) for part, shape in zip(parts, shapes, strict=True)]


def shift(x: Tensor, degree: int, index: int, group: str, places: Sequence[int] = ()) -> Tensor:
    """x of the rank before in a ring of `degree`, not waited for; `index` is this rank's place there. `places` are
    where the ranks of the ring stand in the group, which has them in ascending order; () where the ring has so too.
    """
    before, behind = ((places or range(degree))[(index + step) % degree] for step in (-1, 1))
    come, go = ([x.shape[0] * (i == peer) for i in range(degree)] for peer in (before, behind))
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), come, go, group)


def zero_padding(x: Tensor, dim: int, size: int, index: int) -> Tensor:
    """Set what lies beyond the global `size` of an unevenly cut dim to zero on this rank (piece `index`)."""
    width = x.shape[dim]
    valid = min(max(size - index * width, 0), width)
    if valid == width:
        return x
    shape = list(x.shape)
    shape[dim] = width - valid
    return torch.cat([x.narrow(dim, 0, valid), x.new_zeros(shape)], dim)
