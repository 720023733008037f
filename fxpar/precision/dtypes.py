"""Which dtypes an op returns for operands of given dtypes: asked of torch's own fake kernels, once per combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import is_size, size_of, tensor_metas, tensor_of, whole_meta
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.torch_api.tracing import evaluate


def _nowhere() -> None:
    return None


@dataclass
class ResultDtypes:
    """`dims` are sizes of the dynamic dims to ask with."""

    dims: Mapping[sympy.Symbol, int]
    _world: FakeWorld = field(default_factory=lambda: FakeWorld(_nowhere))
    _known: dict[Any, tuple[torch.dtype | None, ...]] = field(default_factory=dict)

    def retyped(self, node: fx.Node) -> Any:
        """The `meta["tensor"]` of a call, for operands with the dtypes of theirs; shapes stay."""
        meta = whole_meta(node)
        key = (node.target, _abstract(node.args), tuple((k, _abstract(v)) for k, v in sorted(node.kwargs.items())))
        if key not in self._known:
            self._known[key] = self._ask(node)
        found = self._known[key]
        if isinstance(meta, tuple):
            # An op with a list as its result has as many of them as it is cut into, all of one dtype.
            dtypes = found if len(found) == len(meta) else found[:1] * len(meta)
            return tuple(_as(m, dtype) for m, dtype in zip(meta, dtypes, strict=True))
        return _as(meta, found[0])

    def _ask(self, node: fx.Node) -> tuple[torch.dtype | None, ...]:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._fake)
        result: Any = evaluate(self._world, node.target, args, kwargs)  # type: ignore[arg-type]
        results = result if isinstance(result, tuple | list) else (result,)
        return tuple(r.dtype if isinstance(r, torch.Tensor) else None for r in results)

    def _fake(self, node: fx.Node) -> Any:
        if is_size(node):
            return self._size(size_of(node))
        meta = whole_meta(node)
        if isinstance(meta, tuple):
            return tuple(None if m is None else self._empty(m) for m in meta)
        return self._empty(tensor_of(node))

    def _empty(self, meta: TensorMeta) -> torch.Tensor:
        return self._world.empty([self._size(s) for s in meta.shape], meta.dtype)

    def _size(self, size: Any) -> int:
        return size if isinstance(size, int) else int(size.subs(self.dims))


def _as(meta: TensorMeta | None, dtype: torch.dtype | None) -> TensorMeta | None:
    return meta if meta is None or dtype is None else replace(meta, dtype=dtype)


def _abstract(value: Any) -> Any:
    """What of an argument the dtype of a result may depend on; sizes and numbers are not among it."""
    if isinstance(value, fx.Node):
        return tuple(m and (m.dtype, not m.shape) for m in tensor_metas(value))
    if isinstance(value, tuple | list):
        return tuple(_abstract(v) for v in value)
    if value is None or isinstance(value, bool | torch.dtype | str):
        return value
    return type(value)
