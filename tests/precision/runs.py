"""Run a graph node by node and compare what it computes with what its metadata says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.checking.widen import widen
from fxpar.ir.graph import LogicalGraph, TensorMeta
from fxpar.models import load
from fxpar.models.loaded import LoadedModel
from fxpar.precision import Precision, with_precision
from fxpar.runtime.micro import as_one_sequence
from fxpar.torch_api import kernels
from fxpar.tracer import capture
from tests import captured

BF16 = Precision(torch.bfloat16)
LOW, WIDE = torch.bfloat16, torch.float32
EVERYTHING_LOW = Precision(torch.bfloat16, norms=False, softmax=False, loss=False)
MODELS = ("llama", "gpt", "vit", "mlp", "hf:llama", "hf:gpt2", "hf:gemma2", "hf:qwen2")
EVERY_RUN = (*MODELS[:4], "hf:gemma2")  # the others are nightly


@dataclass
class Watch(fx.Interpreter):
    """An interpreter that notes each value whose dtype is not what its node says."""

    graph_module: fx.GraphModule
    wrong: list[str] = field(default_factory=list)
    seen: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.graph_module)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output" or "sym" in n.meta:
            return value
        meta = n.meta["tensor"]
        for said, made in zip(_list(meta), _list(value), strict=True):
            if isinstance(made, Tensor):
                self.seen += 1
                if made.dtype != said.dtype or made.dim() != len(said.shape):
                    self.wrong.append(f"{n.name} ({n.target}): {said} is {made.dtype}{list(made.shape)}")
        return value


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def arguments(graph: LogicalGraph, params: Mapping, buffers: Mapping, batch: Mapping) -> list[Tensor]:
    """What the graph takes, in its dtypes."""
    numbered = as_one_sequence(graph.inputs, batch, 0)
    sources = {"param": params, "buffer": buffers, "batch": numbered, "constant": graph.constants}
    values = []
    for info in graph.inputs:
        if info.kind == "scale":
            value = torch.ones(())
        elif info.kind == "seed":
            value = torch.tensor(3)
        else:
            value = sources[info.kind][info.fqn].detach()
        values.append(value.to(info.meta.dtype))
    return values


def run(graph: LogicalGraph, params: Mapping, buffers: Mapping, batch: Mapping) -> list[Tensor]:
    """All results; every node has the dtype that it says."""
    watch = Watch(graph.gm)
    with torch.no_grad():
        results = list(watch.run(*arguments(graph, params, buffers, batch)))
    assert watch.seen > 10
    assert watch.wrong == []
    return results


def l2_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in the l2 norm."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def gradients(graph: LogicalGraph, results: list[Tensor]) -> dict[str, Tensor]:
    return {out.fqn: r for out, r in zip(graph.outputs, results, strict=True) if out.kind == "grad"}


def together(grads: Mapping[str, Tensor]) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([g.double().flatten() for g in grads.values()])


@dataclass(frozen=True)
class Case:
    """A model captured in fp32, and its true loss and gradients."""

    loaded: LoadedModel
    graph: LogicalGraph

    def run(self, graph: LogicalGraph) -> tuple[Tensor, dict[str, Tensor]]:
        results = run(graph, self.loaded.params(), self.loaded.buffers(), self.loaded.example_batch)
        return results[0], gradients(graph, results)

    @functools.cached_property
    def truth(self) -> tuple[Tensor, dict[str, Tensor]]:
        """In float64."""
        return self.run(widen(self.graph))

    @functools.cached_property
    def bf16(self) -> LogicalGraph:
        return with_precision(self.graph, BF16)


@functools.cache
def case(spec: str) -> Case:
    if spec.startswith("hf:"):
        import pytest

        pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    loaded = load(spec, options={"layers": "1"} if spec == "vit" else {})
    return Case(loaded, capture(loaded.model, loaded.loss_fn, loaded.example_batch, name=loaded.name))


def calls(graph: LogicalGraph, *targets) -> list:
    return [n for n in graph.gm.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]


def casts(graph: LogicalGraph) -> list:
    return calls(graph, kernels.to_copy)


def floats(node) -> set[torch.dtype]:
    meta = node.meta.get("tensor")
    metas = meta if isinstance(meta, tuple) else (meta,)
    return {m.dtype for m in metas if isinstance(m, TensorMeta) and m.dtype.is_floating_point}


def param_dtypes(graph: LogicalGraph) -> dict[str, torch.dtype]:
    return {info.fqn: info.meta.dtype for info in graph.params()}


def capture_small(model: nn.Module, dtype: torch.dtype = WIDE, loss=captured.squared) -> captured.Captured:
    width = next(model.parameters()).shape[-1]
    with torch.no_grad():
        out = model(torch.randn(3, width)).shape[-1]
    return captured.take(model, loss, captured.vectors(width, out, 5), dtype)
