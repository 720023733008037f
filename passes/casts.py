"""Casts: parameters are stored in one dtype and computed with in another; gradients come back in the stored one.

Before: a parameter's placeholder has the dtype that the model was captured in. After: it has `storage` dtype, a cast in
the prologue (on this rank's piece, before any gather, so the gather moves the narrow dtype) makes what the body uses,
and every gradient is cast to `storage` at the end of the body, so that micro-batches accumulate in it.

    %w : bf16[F, D] = param("up.weight")        %w   : f32[F, D]  = param("up.weight")
                                                %w_c : bf16[F, D] = _to_copy(%w, dtype=bf16)

Cost: one local copy of the parameters per mini-batch, one of the gradients per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph, Input, TensorMeta
from fxpar.ir.node_meta import dist_of, tensor_of
from fxpar.ir.pass_base import Phase, Tier, insert, right_behind, set_results
from fxpar.torch_api import kernels

_TO = kernels.to_copy


@dataclass(frozen=True)
class Casts:
    """`storage`: dtype of floating-point parameters outside the body; None leaves them as captured. `gradients`: the
    narrowest dtype in which gradients leave the body, whatever the parameters' is.
    """

    storage: torch.dtype | None = None
    gradients: torch.dtype | None = None
    name: ClassVar[str] = "casts"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        if self.storage is not None:
            self._cast_params(graph, self.storage)
        if self.gradients is not None:
            self._widen_gradients(graph, self.gradients)

    def _cast_params(self, graph: AnnotatedGraph, storage: torch.dtype) -> None:
        changed = set()
        inputs: list[Input] = []
        for node, info in zip(graph.placeholders, graph.inputs, strict=True):
            if info.kind == "param" and info.meta.dtype.is_floating_point and info.meta.dtype != storage:
                changed.add(info.fqn)
                info = replace(info, meta=_as(info.meta, storage))
                _cast_param(graph.graph, node, storage)
            inputs.append(info)
        graph.inputs = tuple(inputs)
        _cast_gradients(graph, {fqn: storage for fqn in changed})

    def _widen_gradients(self, graph: AnnotatedGraph, least: torch.dtype) -> None:
        narrow = {}
        for node, out in zip(graph.results, graph.outputs, strict=True):
            dtype = tensor_of(node).dtype
            if out.kind == "grad" and dtype.is_floating_point and dtype.itemsize < least.itemsize:
                narrow[out.fqn] = least
        _cast_gradients(graph, narrow)


def _cast_gradients(graph: AnnotatedGraph, dtypes: dict[str, torch.dtype]) -> None:
    """Cast the gradients of these parameters at the end of the body."""
    (output,) = graph.graph.find_nodes(op="output")
    results = []
    for node, out in zip(graph.results, graph.outputs, strict=True):
        if out.kind == "grad" and out.fqn in dtypes:
            with right_behind(graph.graph, node):
                node = _cast(graph.graph, node, dtypes[out.fqn], "body", node)
        results.append(node)
    set_results(graph.graph, results)
    output.meta["dist_in"] = tuple(dist_of(node) for node in results)


def _as(meta: TensorMeta, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(meta.shape, dtype)


def _cast_param(graph: fx.Graph, node: fx.Node, storage: torch.dtype) -> None:
    users = list(node.users)
    compute = tensor_of(node).dtype
    node.meta["tensor"] = _as(tensor_of(node), storage)
    node.meta["dist"] = replace(dist_of(node), dtype=storage)
    with graph.inserting_before(_first_call(graph)):
        cast = _cast(graph, node, compute, "prologue", node)
    for user in users:
        user.replace_input_with(node, cast)


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op != "placeholder")


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, phase: Phase, like: fx.Node) -> fx.Node:
    cast = insert(
        graph,
        _TO,
        (node,),
        like=like,
        tensor=_as(tensor_of(node), dtype),
        dist=replace(dist_of(node), dtype=dtype),
        phase=phase,
    )
    cast.kwargs = {"dtype": dtype}
    return cast
