"""Widen a logical graph: compute in float64 what the model computes in a narrower float.

Many models cast to float32 inside (norms, softmax, rotary tables). In a float64 check the rounding of such an island,
not a mistake, would be the largest difference between two orders of summation. Widened, every float is a float64, and
two correct programs agree to 1e-10.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpar.ir.copies import copy_graph
from fxpar.ir.graph import LogicalGraph, TensorMeta
from fxpar.ir.node_meta import whole_meta
from fxpar.torch_api.modules import lazy_module

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def widen(logical: LogicalGraph) -> LogicalGraph:
    """A copy of `logical` in which all floats are float64: inputs, casts, constants. Exact where it was float64
    already.
    """
    graph = copy_graph(logical.gm.graph)
    for node in graph.nodes:
        node.args = _wide_args(node.args)
        node.kwargs = {key: _wide_args(value) for key, value in node.kwargs.items()}
        if whole_meta(node) is not None:
            node.meta = {**node.meta, "tensor": _wide_meta(whole_meta(node))}
    inputs = tuple(replace(info, meta=_wide_meta(info.meta)) for info in logical.inputs)
    constants = {name: wide_tensor(value) for name, value in logical.constants.items()}
    return replace(logical, gm=lazy_module(logical.gm, graph), inputs=inputs, constants=constants)


def wide_tensor(value: torch.Tensor) -> torch.Tensor:
    """A float tensor as float64; any other as it is."""
    return value.double() if value.is_floating_point() else value


def _wide_args(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if isinstance(value, tuple | list):
        return type(value)(_wide_args(v) for v in value)
    return value


def _wide_meta(meta: Any) -> Any:
    if isinstance(meta, tuple):
        return tuple(_wide_meta(m) for m in meta)
    if isinstance(meta, TensorMeta) and meta.dtype in _NARROW:
        return TensorMeta(meta.shape, torch.float64)
    return meta
