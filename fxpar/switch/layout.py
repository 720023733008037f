"""`ParamLayout`: which rank holds what of every parameter under one strategy, as data.

A parameter has one or more *copies*, each placed on a mesh of its own: one on the ranks of its pipeline stage; a tied
embedding, which two stages have, has two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from fxpar.errors import LayoutError
from fxpar.ir.axes import data_axes
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import TensorMeta
from fxpar.ir.pass_base import shard_over
from fxpar.ir.pipeline_graph import side_by_side


@dataclass(frozen=True)
class PlacedParam:
    """Global shape, dtype on the wire, and where each copy of the tensor lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: tuple[DistConfig, ...]


@dataclass(frozen=True)
class ParamLayout:
    """Parameters by FQN in the order of their definition; `world` is the number of ranks. Raises LayoutError."""

    name: str
    world: int
    params: Mapping[str, PlacedParam]

    def __post_init__(self) -> None:
        different: dict[int, tuple[str, PlacedParam]] = {}  # many tensors share one description
        for fqn, param in self.params.items():
            different.setdefault(id(param), (fqn, param))
        for fqn, param in different.values():
            for dist in param.copies:
                if dist.is_partial:
                    raise LayoutError(self.name, f"{fqn} is a partial sum, {dist}; reduce it before a switch")
                if dist.mesh.last >= self.world:
                    raise LayoutError(self.name, f"{fqn} is placed on ranks up to {dist.mesh.last} of {self.world}")
                dist.local_shape(param.shape)  # raises PlacementError where a strided shard does not divide

    def only(self, names: Collection[str]) -> ParamLayout:
        """Of the parameters with these FQNs."""
        return replace(self, params={fqn: param for fqn, param in self.params.items() if fqn in names})

    def with_dtype(self, dtype: torch.dtype) -> ParamLayout:
        """The same layout with all tensors in `dtype`."""
        return replace(self, params={fqn: replace(p, dtype=dtype) for fqn, p in self.params.items()})

    def scattered(self) -> ParamLayout:
        """The layout of gradients after a reduce-scatter: dim 0 also cut by the replicas' axes (as ZeRO stores)."""
        params = {}
        for fqn, param in self.params.items():
            # A tied gradient is summed over its stages; the first one keeps it.
            first = param.copies[0]
            params[fqn] = replace(param, copies=(_scatter(first, param.shape) if param.shape else first,))
        return replace(self, name=f"{self.name} gradients", params=params)

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes that `rank` holds, padding included."""
        total = 0
        for param in self.params.values():
            for dist in param.copies:
                if rank in dist.mesh:
                    local = TensorMeta(dist.local_shape(param.shape), param.dtype)
                    total += local.numel({}) * param.dtype.itemsize
        return total

    def max_bytes(self) -> int:
        """Bytes of the fullest rank; ranks of one mesh hold equal sizes, so one of each is asked."""
        starts = {dist.mesh.offset for param in self.params.values() for dist in param.copies}
        return max((self.bytes_of_rank(rank) for rank in starts), default=0)


def _scatter(dist: DistConfig, shape: tuple[int, ...]) -> DistConfig:
    axes = [a for a in data_axes(dist.mesh.axes) if not any(dist.mesh.overlap(a, used) for used in _used(dist))]
    return shard_over(dist, ".".join(dist.mesh.in_order(axes)), shape) if axes else dist


def _used(dist: DistConfig) -> set[str]:
    return {name for axis in dist.shard_axes for name in axis.split(".")}


def layout_of(program: Program, name: str | None = None) -> ParamLayout:
    """The layout that a program takes its parameters in: one copy over all ranks, or one per pipeline stage that has
    the parameter. They are in the order of use, which is the order in which they come; to all stages side by side.
    """
    copies: dict[str, dict[DistConfig, None]] = defaultdict(dict)
    metas: dict[str, TensorMeta] = {}
    for part in program.storing:
        for info, stored in zip(part.inputs, part.stored_inputs, strict=True):
            if info.kind == "param":
                metas[info.fqn] = stored.meta
                copies[info.fqn][stored.dist] = None
    params = {
        fqn: PlacedParam(tuple(int(s) for s in metas[fqn].shape), metas[fqn].dtype, tuple(copies[fqn]))
        for fqn in side_by_side(program, lambda part: [info.fqn for info in part.inputs if info.kind == "param"])
    }
    return ParamLayout(name or str(program.strategy), program.mesh.last + 1, params)
