"""Rules of ops that cut a dim in parts, join parts, or pick elements.

A cut along the sliced dim is only exact when each part is cut by itself: the whole is sharded in *sections*, one per
part, and every part is sharded plainly.
"""

from __future__ import annotations

import torch

from fxpar.errors import PlacementError
from fxpar.ir.dist_config import Shard, normalize_sections
from fxpar.ir.runs import section_sizes
from fxpar.rules.option import Factor, Option, OpView, Seed, divides, from_factors

aten = torch.ops.aten


def _bounds(op: OpView, at: int, size: int) -> tuple[int, int, int]:
    """(start, end, step) of a slice whose arguments begin at position `at`."""
    start, end, step = op.arg(at, "start"), op.arg(at + 1, "end"), op.arg(at + 2, "step", 1)
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end, step


def _part_sections(size: int, sections: tuple[int, ...], start: int, end: int) -> tuple[int, ...] | None:
    """Sections of the part [start, end) of a dim sharded in `sections`; None if the part splits a section."""
    try:
        sizes = section_sizes(size, sections)
    except PlacementError:
        return None
    inside, offset = [], 0
    for part in sizes:
        if start <= offset and offset + part <= end:
            inside.append(part)
        elif offset < end and offset + part > start:
            return None
        offset += part
    return normalize_sections(inside) if inside else None


def slice_(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """aten.slice(x, dim, start, end, step): [.., N, ..] -> [.., end - start, ..]."""
    return _slice(op, degree, seed, shard, whole=op.inputs[0], at=1, backward=False)


def slice_backward(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """aten.slice_backward(grad, input_sizes, dim, start, end, step)."""
    return _slice(op, degree, seed, shard, whole=op.outputs[0], at=2, backward=True)


def _slice(
    op: OpView, degree: int, seed: Seed, shard: Shard, *, whole: tuple[int, ...], at: int, backward: bool
) -> list[Option]:
    dim = op.dim(op.arg(at, "dim", 0), len(whole))
    start, end, step = _bounds(op, at + 1, whole[dim])
    if shard.dim == dim and op.moving and not _is_all(op, dim, (start, end, step), whole, backward):
        return []  # what the bounds leave of a rank's piece depends on the batch; so would the sections
    if shard.dim != dim or (start == 0 and end == whole[dim] and step == 1):
        factors = [Factor((d,), (d,)) for d in range(len(whole))]
        return from_factors(factors, op, degree, seed, shard)
    if step != 1:
        return []
    of_whole = seed[0] == backward  # the seed is a placement of the whole
    if of_whole:
        part = _part_sections(whole[dim], shard.sections, start, end)
        if part is None:
            return []
        pair = shard, Shard(dim, part)
    else:
        if shard.sections:
            return []
        pieces = [p for p in (start, end - start, whole[dim] - end) if p]
        pair = Shard(dim, normalize_sections(pieces)), shard
    whole_shard, part_shard = pair
    if not divides(whole[dim], degree, whole_shard.sections, False):
        return []
    if not divides(end - start, degree, part_shard.sections, False):
        return []
    option = Option((part_shard,), (whole_shard,)) if backward else Option((whole_shard,), (part_shard,))
    return [option]


def _is_all(op: OpView, dim: int, bounds: tuple[int, int, int], whole: tuple[int, ...], backward: bool) -> bool:
    """Whether a slice takes all of a dim in every batch: a dim of a fixed size ends before some number of tokens."""
    dims = op.dynamic[len(op.inputs) if backward else 0]
    return bounds == (0, whole[dim], 1) and dim in dims


def split(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """aten.split / split_with_sizes(x, sizes, dim): every result sharded plainly, x in sections."""
    position = 2
    dim = op.dim(op.arg(position, "dim", 0))
    parts = [shape[dim] for shape in op.outputs]
    if shard.dim != dim:
        factors = [Factor((d,), (d,) * len(parts)) for d in range(len(op.inputs[0])) if d != dim]
        return from_factors(factors, op, degree, seed, shard)
    inside = _parts(op.inputs[0][dim], parts, degree, shard if not seed[0] else None)
    if inside is None or (seed[0] and shard.sections):
        return []
    whole = shard.sections if not seed[0] else normalize_sections(parts)
    return [Option((Shard(dim, whole),), tuple(Shard(dim, s) for s in inside))]


def cat(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """aten.cat(tensors, dim): every operand sharded plainly, the result in sections."""
    dim = op.dim(op.arg(1, "dim", 0), len(op.outputs[0]))
    parts = [shape[dim] for shape in op.inputs]
    if shard.dim != dim:
        factors = [Factor((d,) * len(parts), (d,)) for d in range(len(op.outputs[0])) if d != dim]
        return from_factors(factors, op, degree, seed, shard)
    inside = _parts(op.outputs[0][dim], parts, degree, shard if seed[0] else None)
    if inside is None or (not seed[0] and shard.sections):
        return []
    whole = shard.sections if seed[0] else normalize_sections(parts)
    return [Option(tuple(Shard(dim, s) for s in inside), (Shard(dim, whole),))]


def _parts(size: int, parts: list[int], degree: int, whole: Shard | None) -> list[tuple[int, ...]] | None:
    """Sections of each part, for the whole sharded as `whole` (None: every part plainly)."""
    if any(part % degree for part in parts):
        return None
    if whole is None:
        return [()] * len(parts)
    sections, offset = [], 0
    for part in parts:
        inside = _part_sections(size, whole.sections, offset, offset + part)
        if inside is None or not divides(part, degree, inside, False):
            return None
        sections.append(inside)
        offset += part
    return sections


def select_factors(op: OpView) -> list[Factor]:
    """aten.select(x, dim, index) and unbind(x, dim): the picked dim disappears."""
    dim = op.dim(op.arg(1, "dim", 0))
    count = len(op.outputs)
    kept = [d for d in range(len(op.inputs[0])) if d != dim]
    return [Factor((d,), (i,) * count) for i, d in enumerate(kept)]


def select_backward_factors(op: OpView) -> list[Factor]:
    """aten.select_backward(grad, input_sizes, dim, index)."""
    dim = op.dim(op.arg(2, "dim"), len(op.outputs[0]))
    kept = [d for d in range(len(op.outputs[0])) if d != dim]
    return [Factor((i,), (d,)) for i, d in enumerate(kept)]


def stack_factors(op: OpView) -> list[Factor]:
    """aten.stack(tensors, dim)."""
    dim = op.dim(op.arg(1, "dim", 0), len(op.outputs[0]))
    count = len(op.inputs)
    return [Factor((d,) * count, (d + (d >= dim),)) for d in range(len(op.inputs[0]))]


def index_factors(op: OpView) -> list[Factor]:
    """aten.index(x, indices): one run of index tensors of one shape; their dims and the dims not indexed."""
    indices = op.arg(1, "indices")
    used = [i for i, entry in enumerate(indices) if entry is not None]
    shapes = {op.inputs[indices[i].index] for i in used}
    contiguous = used == list(range(used[0], used[0] + len(used)))
    if len(shapes) != 1 or not contiguous:
        return []
    (shape,), first, count = shapes, used[0], len(used)
    rank = len(op.inputs[0])
    nothing = (None,) * len(used)
    factors = [Factor((None, *(d,) * count), (first + d,)) for d in range(len(shape))]
    factors += [Factor((d, *nothing), (d,)) for d in range(first)]
    shift = len(shape) - count
    return factors + [Factor((d, *nothing), (d + shift,)) for d in range(first + count, rank)]


def gather_factors(op: OpView) -> list[Factor]:
    """aten.gather(x, dim, index): dims other than `dim` that agree; along `dim` each index looks up the whole x."""
    dim = op.dim(op.arg(1, "dim"))
    x, index = op.inputs[0], op.inputs[1]
    agree = [Factor((d, d), (d,)) for d in range(len(x)) if d != dim and x[d] == index[d]]
    return [*agree, Factor((None, dim), (dim,), pad=False)]


def index_select_factors(op: OpView) -> list[Factor]:
    """aten.index_select(x, dim, index)."""
    dim = op.dim(op.arg(1, "dim"))
    factors = [Factor((d, None), (d,)) for d in range(len(op.inputs[0])) if d != dim]
    return [*factors, Factor((None, 0), (dim,))]


def scatter_factors(op: OpView) -> list[Factor]:
    """aten.scatter*(x, dim, index, src): dims other than `dim` that agree on all operands."""
    dim = op.dim(op.arg(1, "dim"))
    rank, count = len(op.inputs[0]), len(op.inputs)
    agree = [d for d in range(rank) if d != dim and len({shape[d] for shape in op.inputs}) == 1]
    return [Factor((d,) * count, (d,)) for d in agree]


def slice_scatter_factors(op: OpView) -> list[Factor]:
    """aten.slice_scatter(x, src, dim, start, end, step): every dim but `dim`."""
    dim = op.dim(op.arg(2, "dim", 0))
    return [Factor((d, d), (d,)) for d in range(len(op.inputs[0])) if d != dim]


def select_scatter_factors(op: OpView) -> list[Factor]:
    """aten.select_scatter(x, src, dim, index): every dim but `dim`, which src lacks."""
    dim = op.dim(op.arg(2, "dim"))
    return [Factor((d, d - (d > dim)), (d,)) for d in range(len(op.inputs[0])) if d != dim]


def other_dims_factors(op: OpView, *dims: int) -> list[Factor]:
    """Every dim but `dims`, unchanged in the results."""
    return [Factor((d,), (d,) * len(op.outputs)) for d in range(len(op.inputs[0])) if d not in dims]


def pad_factors(op: OpView) -> list[Factor]:
    """aten.constant_pad_nd(x, pad): dims that are not padded."""
    pad, rank = op.arg(1, "pad"), len(op.inputs[0])
    touched = [rank - 1 - i // 2 for i, amount in enumerate(pad) if amount]
    return other_dims_factors(op, *touched)


def roll_factors(op: OpView) -> list[Factor]:
    """aten.roll(x, shifts, dims) and flip(x, dims): dims that stay in place."""
    dims = op.arg(2 if op.target is aten.roll.default else 1, "dims", ())
    return other_dims_factors(op, *(op.dim(d) for d in dims)) if dims else []


def triangle_factors(op: OpView) -> list[Factor]:
    """aten.tril, triu: batch dims."""
    rank = len(op.inputs[0])
    return other_dims_factors(op, rank - 1, rank - 2)


def sort_factors(op: OpView) -> list[Factor]:
    """aten.sort, topk, argsort: every dim but the sorted one."""
    position = 2 if op.target is aten.topk.default else 1
    return other_dims_factors(op, op.dim(op.arg(position, "dim", -1)))


__all__ = [
    "cat",
    "gather_factors",
    "index_factors",
    "index_select_factors",
    "pad_factors",
    "roll_factors",
    "scatter_factors",
    "select_backward_factors",
    "select_factors",
    "select_scatter_factors",
    "slice_",
    "slice_backward",
    "slice_scatter_factors",
    "sort_factors",
    "split",
    "stack_factors",
    "triangle_factors",
]
