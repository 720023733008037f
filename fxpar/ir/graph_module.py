"""A foreign `torch.fx.GraphModule` as an `AnnotatedGraph`, so that passes run on graphs that fxpar did not make."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.strategy import SINGLE

c10d = torch.ops._c10d_functional
# Collective -> position of its process group among the arguments.
_GROUP = {
    c10d.all_reduce.default: 2,
    c10d.all_reduce_.default: 2,
    c10d.all_gather_into_tensor.default: 2,
    c10d.reduce_scatter_tensor.default: 3,
    c10d.all_to_all_single.default: 3,
}


def from_graph_module(gm: fx.GraphModule) -> AnnotatedGraph:
    """Wrap `gm` (changed in place by passes): shapes come from `meta["val"]`, everything counts as body, nothing is
    sharded.

    This is what torchtitan's graph_trainer hands to its passes: a graph of local tensors with functional collectives.
    """
    strategy = SINGLE
    for node in gm.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, int | torch.SymInt):
            node.meta.setdefault("sym", value)
            continue
        meta = _meta(value)
        node.meta.setdefault("tensor", meta)
        node.meta.setdefault("local", meta)
        node.meta.setdefault("phase", "body")
        if isinstance(meta, TensorMeta):
            node.meta.setdefault("dist", DistConfig.replicated(strategy.mesh, len(meta.shape), meta.dtype))
        if node.target in _GROUP:
            sent: Any = node.args[0]
            group = node.args[_GROUP[node.target]]
            node.meta.setdefault("comm", (str(group), local_tensor(sent)))
    return AnnotatedGraph(gm.graph, (), (), (), strategy)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = tuple(s if isinstance(s, int) else s.node.expr for s in value.shape)
        return TensorMeta(shape, value.dtype)
    if isinstance(value, tuple | list):
        return tuple(_meta(v) for v in value)
    return None
