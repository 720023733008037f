"""`ParamLayout`: which rank holds what of every parameter under one strategy, as data.

A parameter lies in one or more *blocks* of consecutive ranks: a block is one copy of the tensor, placed on a mesh whose
rank 0 is the block's first rank. A pipeline stage is a block; a tied embedding lies in two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fxpar.dist_config import DistConfig
from fxpar.errors import LayoutError
from fxpar.exec_graph import Program
from fxpar.graph import AnnotatedGraph, TensorMeta
from fxpar.passes.zero_shard import shard_over


@dataclass(frozen=True)
class Block:
    """One copy of a tensor over the ranks `first_rank .. first_rank + dist.mesh.size`."""

    first_rank: int
    dist: DistConfig

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.dist.mesh.size)


@dataclass(frozen=True)
class PlacedParam:
    """Global shape, dtype on the wire, and where the tensor lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ParamLayout:
    """Parameters by FQN in the order of their definition; `world` is the number of ranks. Raises LayoutError."""

    name: str
    world: int
    params: Mapping[str, PlacedParam]

    def __post_init__(self) -> None:
        for fqn, param in self.params.items():
            for block in param.blocks:
                if block.dist.is_partial:
                    raise LayoutError(self.name, f"{fqn} is a partial sum, {block.dist}; reduce it before a switch")
                if block.ranks.stop > self.world:
                    raise LayoutError(self.name, f"{fqn} lies on ranks up to {block.ranks.stop - 1} of {self.world}")
                block.dist.local_shape(param.shape)  # raises PlacementError where a strided shard does not divide

    def with_dtype(self, dtype: torch.dtype) -> ParamLayout:
        """The same layout with all tensors in `dtype`."""
        return replace(self, params={fqn: replace(p, dtype=dtype) for fqn, p in self.params.items()})

    def scattered(self) -> ParamLayout:
        """The layout of gradients after a reduce-scatter: dim 0 also cut by the replicas' axes (as ZeRO stores)."""
        params = {}
        for fqn, param in self.params.items():
            blocks = tuple(replace(b, dist=_scatter(b.dist)) if param.shape else b for b in param.blocks)
            # A tied gradient is summed over its stages; the first one keeps it.
            params[fqn] = replace(param, blocks=blocks[:1])
        return replace(self, name=f"{self.name} gradients", params=params)

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes that `rank` holds, padding included."""
        total = 0
        for param in self.params.values():
            for block in param.blocks:
                if rank in block.ranks:
                    local = TensorMeta(block.dist.local_shape(param.shape), param.dtype)
                    total += local.numel({}) * param.dtype.itemsize
        return total

    def max_bytes(self) -> int:
        """Bytes of the fullest rank; ranks of one block hold equal sizes, so one rank per block start is asked."""
        starts = {block.first_rank for param in self.params.values() for block in param.blocks}
        return max((self.bytes_of_rank(rank) for rank in starts), default=0)


def _scatter(dist: DistConfig) -> DistConfig:
    axes = [name for name, size in dist.mesh.axes if name in ("dp", "cp") and size > 1 and name not in _used(dist)]
    return shard_over(dist, ".".join(axes)) if axes else dist


def _used(dist: DistConfig) -> set[str]:
    return {name for axis in dist.shard_axes for name in axis.split(".")}


def layout_of(graph: Program | AnnotatedGraph, name: str | None = None) -> ParamLayout:
    """The layout that a graph stores its parameters in: one block over all ranks, or one per pipeline stage that has
    the parameter.
    """
    blocks: dict[str, dict[Block, None]] = defaultdict(dict)
    metas: dict[str, TensorMeta] = {}
    for fqn, meta, block in _stored(graph):
        metas[fqn] = meta
        blocks[fqn][block] = None
    params = {
        fqn: PlacedParam(tuple(int(s) for s in metas[fqn].shape), metas[fqn].dtype, tuple(blocks[fqn]))
        for info in graph.inputs
        if info.kind == "param"
        for fqn in (info.fqn,)
    }
    return ParamLayout(name or str(graph.strategy), graph.strategy.world, params)


def _stored(graph: Program | AnnotatedGraph) -> Iterator[tuple[str, TensorMeta, Block]]:
    """Every parameter of every part of the graph."""
    if isinstance(graph, Program):
        for first, part in graph.placed:
            for info, stored in zip(part.inputs, part.stored_inputs, strict=True):
                if info.kind == "param":
                    yield info.fqn, stored.meta, Block(first, stored.dist)
    else:
        for info, node in zip(graph.inputs, graph.placeholders, strict=True):
            if info.kind == "param":
                yield info.fqn, info.meta, Block(0, node.meta["dist"])
