"""Rules of views: how a cut of one dim looks after the dims are regrouped."""

from __future__ import annotations

import math

import torch

from fxpar.ir.dist_config import Shard
from fxpar.rules.option import Factor, Option, OpView, Seed, Shape, divides

aten = torch.ops.aten
MAX_SECTIONS = 1000  # a dynamic dim in front of the cut is no number of sections (it is probed with a larger one)


def map_shard(source: Shape, target: Shape, shard: Shard, degree: int) -> Shard | None:
    """The placement after viewing `source` as `target` that describes the same local data, or None.

    Dims are regrouped in runs of equal product. In a run, a cut is known by the number of equal parts in front of it
    (sizes of earlier dims times its own sections); the target dim that contains that boundary is cut in the rest.
    """
    group = _group_of(source, target, shard.dim)
    if group is None:
        return None
    from_dims, to_dims = group
    wide_from = [d for d in from_dims if source[d] != 1]
    wide_to = [d for d in to_dims if target[d] != 1]
    if len(wide_from) == len(wide_to) == 1 and wide_from[0] == shard.dim:
        mapped = Shard(wide_to[0], shard.sections)
        return mapped if divides(target[mapped.dim], degree, mapped.sections, True) else None
    if len(set(shard.sections)) > 1 or not divides(source[shard.dim], degree, shard.sections, False):
        return None
    before = math.prod(source[d] for d in from_dims if d < shard.dim) * max(1, len(shard.sections))
    passed = 1
    for d in to_dims:
        if passed * target[d] > before:
            sections, rest = divmod(before, passed)
            if sections > MAX_SECTIONS:
                return None
            mapped = Shard(d, (1,) * sections if sections > 1 else ())
            fits = not rest and divides(target[d], degree, mapped.sections, False)
            return mapped if fits else None
        passed *= target[d]
    return None


def _group_of(source: Shape, target: Shape, dim: int) -> tuple[list[int], list[int]] | None:
    """The run of source dims that contains `dim`, and the run of target dims it becomes."""
    i = j = 0
    while i < len(source) or j < len(target):
        from_dims, to_dims = [], []
        left = right = 1
        while True:
            if left <= right and i < len(source) and (left < right or not from_dims):
                left *= source[i]
                from_dims.append(i)
                i += 1
            elif j < len(target) and (right < left or not to_dims):
                right *= target[j]
                to_dims.append(j)
                j += 1
            else:
                break
            if left == right and from_dims and to_dims:
                break
        while i < len(source) and source[i] == 1 and left == right:
            from_dims.append(i)
            i += 1
        while j < len(target) and target[j] == 1 and left == right:
            to_dims.append(j)
            j += 1
        if left != right:
            return None
        if dim in from_dims:
            return from_dims, to_dims
        if not from_dims and not to_dims:
            return None
    return None


def view(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """aten.view(x, size)."""
    is_result, _ = seed
    source, target = op.inputs[0], op.outputs[0]
    if is_result:
        mapped = map_shard(target, source, shard, degree)
        option = None if mapped is None else Option((mapped,), (shard,))
    else:
        mapped = map_shard(source, target, shard, degree)
        option = None if mapped is None else Option((shard,), (mapped,))
    return [option] if option else []


def permute_factors(op: OpView) -> list[Factor]:
    """aten.permute(x, dims)."""
    rank = len(op.inputs[0])
    return [Factor((op.dim(d),), (i,)) for i, d in enumerate(op.arg(1, "dims"))] if rank else []


def transpose_factors(op: OpView) -> list[Factor]:
    """aten.transpose(x, a, b) and aten.t(x)."""
    rank = len(op.inputs[0])
    order = list(range(rank))
    if op.target is aten.t.default:
        order.reverse()
    else:
        a, b = op.dim(op.arg(1, "dim0")), op.dim(op.arg(2, "dim1"))
        order[a], order[b] = order[b], order[a]
    return [Factor((d,), (i,)) for i, d in enumerate(order)]


def unsqueeze_factors(op: OpView) -> list[Factor]:
    rank = len(op.inputs[0])
    new = op.dim(op.arg(1, "dim"), rank + 1)
    return [Factor((d,), (d + (d >= new),)) for d in range(rank)]


def squeeze_factors(op: OpView) -> list[Factor]:
    """Size-1 dims that are named (or all of them) disappear."""
    rank = len(op.inputs[0])
    named = op.arg(1, "dim", tuple(range(rank)))
    named = (named,) if isinstance(named, int) else named
    gone = {op.dim(d) for d in named if op.inputs[0][op.dim(d)] == 1}
    kept = [d for d in range(rank) if d not in gone]
    return [Factor((d,), (i,)) for i, d in enumerate(kept)]


def expand_factors(op: OpView) -> list[Factor]:
    """aten.expand(x, size): a broadcast dim may be cut in the result alone."""
    source, target = op.inputs[0], op.outputs[0]
    shift = len(target) - len(source)
    factors = []
    for d, size in enumerate(target):
        own = d - shift
        same = own >= 0 and source[own] == size
        factors.append(Factor((own if same else None,), (d,)))
    return factors


def repeat_factors(op: OpView) -> list[Factor]:
    """aten.repeat(x, repeats): dims that are not repeated."""
    repeats = op.arg(1, "repeats")
    shift = len(repeats) - len(op.inputs[0])
    return [Factor((d,), (d + shift,)) for d in range(len(op.inputs[0])) if repeats[d + shift] == 1]


def complex_factors(op: OpView) -> list[Factor]:
    """aten.view_as_complex, aten.view_as_real: all dims but the pair (real, imaginary), which only one side has."""
    return [Factor((d,), (d,)) for d in range(min(len(op.inputs[0]), len(op.outputs[0])))]


def factory_factors(op: OpView) -> list[Factor]:
    """Constants from nothing (full, zeros, ones): each rank makes its part. Operands (new_zeros) are not read."""
    rank = len(op.outputs[0])
    return [Factor((None,) * len(op.inputs), (d,)) for d in range(rank)]


__all__ = [
    "complex_factors",
    "expand_factors",
    "factory_factors",
    "map_shard",
    "permute_factors",
    "repeat_factors",
    "squeeze_factors",
    "transpose_factors",
    "unsqueeze_factors",
    "view",
]
