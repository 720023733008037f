"""What mesh axes are called, and what each is used for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Use = Literal["replicas", "stages", "tokens", "weights"]
# What each axis is used for. Only this file and the policies of axes (`fxpar.annotate.policy`) know axes by name.
USES: dict[str, Use] = {
    "dp": "replicas",
    "pp": "stages",
    "cp": "tokens",
    "ring": "tokens",
    "tp": "weights",
    "rows": "tokens",
    "ep": "tokens",
}
AXES = tuple(USES)
REPLICAS, STAGES = "dp", "pp"
RANKS = "ranks"  # the one axis of a mesh that is no grid: of pipeline stages with meshes of their own
ROLE_AXES = ("tp", "cp", "ring", "rows", "ep")  # inside of a replica, in the order in which placements are searched
BINS = "rows"  # the axis that cuts tokens between documents: a replica packs a bin for each of its coordinates
EXPERTS = "ep"  # as rows, and each of its ranks has some of the experts, to which tokens travel
RING = "ring"  # the axis that cuts tokens in attention too, along which keys and values travel


def whole_axis(name: str) -> str:
    """Of an axis or a sub-axis (`tp:(1)2`) the axis."""
    return name.partition(":")[0]


def data_axes(axes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Of axes with degrees those over which parameters are replicated, degree > 1 only."""
    return tuple(name for name, size in axes if USES.get(name) in ("replicas", "tokens") and size > 1)
