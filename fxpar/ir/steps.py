"""From one placement of a tensor to another, in collectives that each work on one mesh axis.

Axes that shard one dim nest: only the innermost cut of a dim can be undone, and a new cut goes inside the others. Steps
are taken in an order that respects this; where there is none, the axis in the way is gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxpar.errors import PlacementError
from fxpar.ir import collectives as c
from fxpar.ir.axes import whole_axis
from fxpar.ir.dist_config import AxisShard, DistConfig, Partial
from fxpar.ir.mesh import Mesh

Step = tuple[object, tuple, DistConfig]  # op, its arguments after x, the placement it makes


def steps(source: DistConfig, target: DistConfig, shape: Sequence[Any]) -> list[Step]:
    """The single-axis steps from `source` to `target`, two placements of a tensor of `shape`. Raises PlacementError
    where there is no way (R -> P).
    """
    names = {name for dist in (source, target) for name in (*dist.shard_axes, *(axis for axis, _ in dist.partial))}
    if not any(":" in name for name in names):
        return _single_steps(source, target)
    padded = {
        whole_axis(name)
        for dist in (source, target)
        for d, entries in enumerate(dist.dims)
        if not dist.divides(d, shape[d])
        for entry in entries
        for name in entry.axis.split(".")
    }
    parts = source.mesh.parts(part for name in names for part in name.split("."))
    parts = [part for part in parts if whole_axis(part) not in padded]  # whose parts would pad otherwise
    begin = source.in_parts(parts)
    found = _together(begin, _single_steps(begin, target.in_parts(parts)), shape)
    return [(op, args, dist.whole(shape)) for op, args, dist in found[:-1]] + [
        (*last[:2], target) for last in found[-1:]
    ]


def _together(begin: DistConfig, steps: list[Step], shape: Sequence[Any]) -> list[Step]:
    """Steps that do the same on neighbouring parts of an axis, one after the other, as one on both, where the dim that
    they are about divides by all: its padding would lie otherwise.
    """
    found: list[Step] = []
    before = begin  # of the last step that was found
    for op, args, dist in steps:
        alike = bool(found) and found[-1][0] is op and found[-1][1][1:] == args[1:]
        joint = None
        if alike and op in _DIM:
            last, dim = found[-1][1][0], args[_DIM[op]]
            # A gather undoes the innermost cut first; what cuts or scatters makes the outermost first.
            outer, inner, finer = (args[0], last, before) if op is c.all_gather else (last, args[0], dist)
            joint = begin.mesh.joint(outer, inner) if finer.divides(dim, shape[dim]) else None
        if joint:
            found[-1] = (op, (joint, *args[1:]), dist)
            continue
        before = found[-1][2] if found else begin
        found.append((op, (_joined(begin.mesh, args[0]), *args[1:]) if op is c.all_reduce else args, dist))
    return found


_DIM = {
    c.all_gather: 1,
    c.shard: 1,
    c.reduce_scatter: 2,
}  # which argument is the dim, of steps on one that may be joined


def _joined(mesh: Mesh, names: str) -> str:
    """Axes joined by '.', with neighbouring parts of one axis as one."""
    found: list[str] = []
    for name in sorted(names.split("."), key=mesh.place):
        joint = mesh.joint(found[-1], name) if found else None
        found = [*found[:-1], joint] if joint else [*found, name]
    return ".".join(found)


def _single_steps(source: DistConfig, target: DistConfig) -> list[Step]:
    found: list[Step] = []
    current = source
    while (current.dims, current.partial) != (target.dims, target.partial):
        step = next(filter(None, (way(current, target) for way in _WAYS)), None)
        if step is None:
            raise PlacementError(f"no collective turns {source} into {target}")
        found.append(step)
        current = step[2]
    return found


def _reduce(current: DistConfig, target: DistConfig) -> Step | None:
    """Partial sums become a shard in one reduce-scatter where the target wants that, else they are all-reduced."""
    pending = {axis: op for axis, op in current.partial if (axis, op) not in target.partial}
    if not pending:
        return None
    for d, entries in enumerate(target.dims):
        have = current.dims[d]
        if len(entries) > len(have) and entries[: len(have)] == have:
            entry = entries[len(have)]
            ops = {pending.get(axis) for axis in entry.axis.split(".")}
            if len(ops) == 1 and ops <= {"sum", "avg"}:
                dims = (*current.dims[:d], (*have, entry), *current.dims[d + 1 :])
                left = tuple(p for p in current.partial if p[0] not in entry.axis.split("."))
                (op,) = ops
                return (
                    c.reduce_scatter,
                    (entry.axis, op, d, entry.sections),
                    replace(current, dims=dims, partial=left),
                )
    op = next(iter(pending.values()))
    axes = tuple(axis for axis, other in pending.items() if other == op)
    # A sum that is to be scattered over some axes is reduced over the others first, when it is largest last.
    wanted = {name for entries in target.dims for e in entries for name in e.axis.split(".")}
    axes = tuple(a for a in axes if a not in wanted) or axes
    left = tuple(p for p in current.partial if p[0] not in axes)
    return c.all_reduce, (".".join(axes), op), replace(current, partial=left)


def _move(current: DistConfig, target: DistConfig) -> Step | None:
    """All-to-all: the innermost cut of a dim moves inside the cuts of another dim."""
    for d, entries in enumerate(current.dims):
        if not entries or entries == target.dims[d][: len(entries)]:
            continue
        last = entries[-1]
        for to, wanted in enumerate(target.dims):
            have = current.dims[to]
            fits = to != d and len(wanted) > len(have) and wanted[: len(have)] == have
            if fits and wanted[len(have)].axis == last.axis:
                entry = wanted[len(have)]
                dims = list(current.dims)
                dims[d], dims[to] = entries[:-1], (*have, entry)
                args = (last.axis, d, last.sections, to, entry.sections)
                return c.all_to_all, args, replace(current, dims=tuple(dims))
    return None


def _slice(current: DistConfig, target: DistConfig) -> Step | None:
    """A cut that is wanted on an axis that replicates now."""
    for d, wanted in enumerate(target.dims):
        have = current.dims[d]
        if len(wanted) > len(have) and wanted[: len(have)] == have:
            entry = wanted[len(have)]
            if not _uses(current, entry.axis):
                dims = (*current.dims[:d], (*have, entry), *current.dims[d + 1 :])
                return c.shard, (entry.axis, d, entry.sections), replace(current, dims=dims)
    return None


def _gather(current: DistConfig, target: DistConfig) -> Step | None:
    """Undo the innermost cut of a dim that does not lie as wanted."""
    for d, entries in enumerate(current.dims):
        if entries and entries != target.dims[d][: len(entries)]:
            last: AxisShard = entries[-1]
            dims = (*current.dims[:d], entries[:-1], *current.dims[d + 1 :])
            return c.all_gather, (last.axis, d, last.sections), replace(current, dims=dims)
    return None


def _partial(current: DistConfig, target: DistConfig) -> Step | None:
    """A replicated value becomes one term of a sum, to be added to partial sums before these are reduced."""
    for axis, op in target.partial:
        if (axis, op) not in current.partial and not _uses(current, axis) and op == "sum":
            return c.partial, (axis,), current.with_placement(axis, Partial(op))
    return None


def _uses(current: DistConfig, axis: str) -> bool:
    """Whether a tensor is cut or partial over part of these joined axes."""
    used = [name for entries in current.dims for e in entries for name in e.axis.split(".")]
    used += [name for name, _ in current.partial]
    return any(current.mesh.overlap(one, other) for one in used for other in axis.split("."))


_WAYS = (_reduce, _move, _slice, _gather, _partial)  # in order of preference
