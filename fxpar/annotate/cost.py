"""What the placement search minimises, in bytes on the wire of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpar.ir.dist_config import OuterShard, Partial, Placement, R, Replicate, Shard

LAUNCH_BYTES = 16 * 1024  # what one more collective is worth; breaks ties between equal volumes
COPY_FRACTION = 1e-3  # a local slice costs next to nothing, but not nothing


@dataclass(frozen=True)
class Cost:
    """`moved_bytes` on the wire of one rank, each collective counted as LAUNCH_BYTES more; `penalty_bytes` is what the
    policy of the axis adds for work and memory that are not cut.
    """

    moved_bytes: float = 0.0
    penalty_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """What the search minimises."""
        return self.moved_bytes + self.penalty_bytes

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.moved_bytes - other.moved_bytes, self.penalty_bytes - other.penalty_bytes)


def reshard_bytes(nbytes: int, source: Placement, target: Placement, degree: int) -> float:
    """Cost of changing the placement of a tensor of `nbytes` (whole) on an axis of `degree`; inf if there is no way.

    Ring algorithms: all-reduce 2 (k-1)/k, all-gather and reduce-scatter (k-1)/k, all-to-all (k-1)/k^2 of the whole.
    """
    if source == target:
        return 0.0
    if isinstance(source, OuterShard) or isinstance(target, OuterShard):
        return _on_sub_axes_bytes(nbytes, source, target, degree)
    ring = nbytes * (degree - 1) / degree
    match source, target:
        case Partial(op), Replicate():
            return (2 * ring if op != "logsumexp" else degree * ring) + LAUNCH_BYTES
        case Partial("sum" | "avg"), Shard():
            return ring + LAUNCH_BYTES
        case Shard(), Replicate():
            return ring + LAUNCH_BYTES
        case Shard(), Shard():
            if source.dim == target.dim:  # other sections: through the whole tensor
                return ring + LAUNCH_BYTES + COPY_FRACTION * nbytes
            return ring / degree + LAUNCH_BYTES
        case Replicate(), Shard():
            return COPY_FRACTION * nbytes / degree
        case Replicate(), Partial("sum"):
            return COPY_FRACTION * nbytes
        case _:
            return math.inf


def _on_sub_axes_bytes(nbytes: int, source: Placement, target: Placement, degree: int) -> float:
    """Inner sub-axis, then outer one: from one cut to the same, or to the whole and on from there."""
    if isinstance(source, OuterShard) and isinstance(target, OuterShard) and _cut(source) == _cut(target):
        return reshard_bytes(nbytes // source.degree, source.inner, target.inner, degree // source.degree)
    if isinstance(source, OuterShard):
        settled = reshard_bytes(nbytes // source.degree, source.inner, R, degree // source.degree)
        gathered = reshard_bytes(nbytes, Shard(source.dim), R, source.degree)
        return settled + gathered + reshard_bytes(nbytes, R, target, degree)
    assert isinstance(target, OuterShard)
    cut = COPY_FRACTION * nbytes / target.degree
    terms = reshard_bytes(nbytes // target.degree, R, target.inner, degree // target.degree)
    return reshard_bytes(nbytes, source, R, degree) + cut + terms


def _cut(placement: OuterShard) -> tuple[int, int]:
    return placement.dim, placement.degree
