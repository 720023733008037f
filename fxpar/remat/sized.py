"""Storages of a graph at any number of tokens: traced once, then read off the shapes of the tensors.

Which values share memory follows from how a graph is written, not from how many tokens there are. A storage is as large
as the tensor that it was made for, whose shape is known in the dynamic dims, or of a size that no dim is in. Whether
that is so is looked at where a graph is traced; and sizes of one or none, under which any layout is contiguous, are not
taken for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import is_size, local_meta
from fxpar.remat.storages import Storages, trace_and_compare


@dataclass(frozen=True)
class SizedStorages:
    """`storages` and `differ` as `trace_and_compare` gives them at the sizes that the graph was traced at. `made[i]`:
    the tensor that storage i was made for, or its bytes at any sizes; () where that of some storage is not known.
    `sizes`: all sizes of the graph's tensors that are no numbers, as they were there.
    """

    storages: Storages
    differ: tuple[Mapping[str, int], ...]
    made: tuple[TensorMeta | int, ...]
    sizes: Mapping[sympy.Expr, int]

    def nbytes(self, dims: Mapping[sympy.Symbol, int]) -> tuple[int, ...] | None:
        """Bytes of each storage with the dynamic dims at `dims`; None where the graph has to be traced for them."""
        sizes = _at(self.sizes, dims)
        if not self.made or sizes is None or any((sizes[one] <= 1) != (n <= 1) for one, n in self.sizes.items()):
            return None
        known = {one: one if isinstance(one, int) else _nbytes(one, sizes) for one in set(self.made)}
        return tuple(known[one] for one in self.made)


def trace_sized(
    nodes: Iterable[fx.Node],
    dims: Mapping[sympy.Symbol, int],
    at: Mapping[str, int],
    others: Sequence[Mapping[str, int]],
    same: Mapping[fx.Node, fx.Node] | None = None,
) -> SizedStorages:
    """`trace_and_compare` of graphs that are not to be changed."""
    storages, differ = trace_and_compare(nodes, dims, at, others, same)
    metas = (meta for node in nodes for meta in _metas(node))
    sizes = _at({size for meta in metas for size in meta.shape if not isinstance(size, int)}, dims) or {}
    made: list[TensorMeta | int] = []
    for (node, place), nbytes in zip(storages.makers, storages.nbytes, strict=True):
        meta = next(iter(_metas(node)[place : place + 1]), None)
        if meta is not None and all(s in sizes or isinstance(s, int) for s in meta.shape):
            made += [meta] if _nbytes(meta, sizes) == nbytes else [nbytes] if _is_fixed(node) else []
    known = len(made) == len(storages.nbytes)
    return SizedStorages(storages, tuple(differ), tuple(made) if known else (), sizes)


def _is_fixed(node: fx.Node) -> bool:
    """Whether no dynamic dim is in the shapes of what a call takes and makes."""
    around = (node, *node.all_input_nodes)
    metas = (meta for one in around for meta in _metas(one))
    return not any(map(is_size, around)) and all(isinstance(size, int) for meta in metas for size in meta.shape)


def _metas(node: fx.Node) -> tuple[TensorMeta, ...]:
    found = local_meta(node)
    return tuple(meta for meta in (found if isinstance(found, tuple) else (found,)) if isinstance(meta, TensorMeta))


def _at(sizes: Iterable[sympy.Expr], dims: Mapping[sympy.Symbol, int]) -> dict[sympy.Expr, int] | None:
    """None where one is no whole number: not all ranks have as much then."""
    found: dict[sympy.Expr, Any] = {size: size.subs(dims) for size in sizes}  # type: ignore[arg-type]
    return {size: int(n) for size, n in found.items()} if all(n.is_Integer for n in found.values()) else None


def _nbytes(meta: TensorMeta, sizes: Mapping[sympy.Expr, int]) -> int:
    shape: Iterator[int] = (size if isinstance(size, int) else sizes[size] for size in meta.shape)
    return math.prod(shape) * meta.dtype.itemsize


__all__ = ["SizedStorages", "trace_sized"]
