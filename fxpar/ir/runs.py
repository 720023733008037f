"""Runs: what a rank holds of a dim, as pieces (local start, global start, length) without gaps; padding is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpar.errors import PlacementError

if TYPE_CHECKING:  # a strategy is read without torch
    import torch

Run = tuple[int, int, int]


def section_sizes(size: int, sections: tuple[int, ...]) -> tuple[int, ...]:
    """Absolute sizes of the sections of a dim of `size`."""
    if not sections:
        return (size,)
    unit, rest = divmod(size, sum(sections))
    if rest:
        raise PlacementError(f"a dim of size {size} is not a concatenation of parts in proportion {sections}")
    return tuple(s * unit for s in sections)


def cut(runs: list[Run], size: int, degree: int, index: int, sections: tuple[int, ...]) -> tuple[list[Run], int]:
    """Apply one shard to the runs of a local piece of `size`; returns the new runs and the new local size."""
    new, offset, local = [], 0, 0
    for part in section_sizes(size, sections):
        width = -(-part // degree)
        low, high = offset + index * width, min(offset + (index + 1) * width, offset + part)
        for start, origin, length in runs:
            a, b = max(start, low), min(start + length, high)
            if a < b:
                new.append((local + a - low, origin + a - start, b - a))
        offset += part
        local += width
    return merge(new), local


def merge(runs: list[Run]) -> list[Run]:
    """Join runs that touch both locally and globally."""
    merged: list[Run] = []
    for run in runs:
        if merged:
            start, origin, length = merged[-1]
            if start + length == run[0] and origin + length == run[1]:
                merged[-1] = (start, origin, length + run[2])
                continue
        merged.append(run)
    return merged


def put(whole: torch.Tensor, local: torch.Tensor, runs: list[list[Run]]) -> None:
    if whole.dim() == 0:
        whole.copy_(local)
        return
    index: list[tuple[slice, slice]] = []

    def walk(d: int) -> None:
        if d == whole.dim():
            to, here = zip(*index, strict=True)
            whole[to] = local[here]
            return
        for start, origin, length in runs[d]:
            index.append((slice(origin, origin + length), slice(start, start + length)))
            walk(d + 1)
            index.pop()

    walk(0)
