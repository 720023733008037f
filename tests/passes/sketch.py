"""Small annotated graphs by hand, and graphs of captured models in the middle of the ladder, as short text."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.annotate import annotate
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.graph import AnnotatedGraph, Input, InputKind, LogicalGraph, Output, OutputKind, TensorMeta
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes

F64 = torch.float64


class Sketch:
    """Builds an `AnnotatedGraph` call by call. A placement is written per dim, "tp dp" for tp outside of dp."""

    def __init__(self, strategy: str) -> None:
        self.strategy = Strategy.parse(strategy)
        self.graph = fx.Graph()
        self.inputs: list[Input] = []

    def dist(self, dims: Sequence[str], partial: str = "", dtype: torch.dtype = F64) -> DistConfig:
        cuts = tuple(tuple(AxisShard(axis) for axis in dim.split()) for dim in dims)
        return DistConfig(self.strategy.mesh, cuts, tuple((axis, "sum") for axis in partial.split()), dtype)

    def place(
        self, name: str, shape: tuple, dims: Sequence[str] = (), kind: InputKind = "param", dtype: torch.dtype = F64
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        meta = TensorMeta(shape, dtype)
        node.meta.update(tensor=meta, dist=self.dist(dims or [""] * len(shape), dtype=dtype), fqn="", kind=kind)
        self.inputs.append(Input(kind, name, meta, kind == "param"))
        return node

    def call(
        self, target: Any, *args: Any, shape: tuple, dims: Sequence[str] = (), partial: str = "", **meta: Any
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        dtype = meta.pop("dtype", F64)
        node.meta.update(tensor=TensorMeta(shape, dtype), dist=self.dist(dims or [""] * len(shape), partial, dtype))
        node.meta.update({"fqn": "", "phase": "body", **meta})
        return node

    def done(self, *results: fx.Node, kinds: Sequence[tuple[OutputKind, str]] = ()) -> AnnotatedGraph:
        self.graph.output(results)
        outputs = [Output(*kind) for kind in kinds] or [Output("loss", "loss") for _ in results]
        return AnnotatedGraph(self.graph, tuple(self.inputs), tuple(outputs), (), self.strategy)


def before(logical: LogicalGraph, strategy: str, name: str, storage: torch.dtype | None = None) -> AnnotatedGraph:
    """The graph as the pass called `name` finds it."""
    graph = annotate(logical, Strategy.parse(strategy))
    for step in default_passes(storage):
        if step.name == name:
            return graph
        step(graph)
    raise AssertionError(f"no pass {name!r} in the ladder")


def text(graph: fx.Graph) -> str:
    """One line per call: name, placement, op and operands; `@phase` where it is not the body, `#bucket`."""
    return "\n".join(line(node) for node in graph.nodes if node.op == "call_function")


def line(node: fx.Node) -> str:
    target = node.target
    name = str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else target.__name__
    args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
    dist, meta = node.meta.get("dist"), node.meta.get("tensor")
    place = f" : {dist.describe(meta.shape)}" if isinstance(dist, DistConfig) else ""
    phase = "" if node.meta.get("phase", "body") == "body" else f" @{node.meta['phase']}"
    bucket = f" #{node.meta['bucket']}" if "bucket" in node.meta else ""
    return f"%{node.name}{place} = {name}({', '.join(args)}){phase}{bucket}"


def _arg(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_arg, value))}]"
    return str(value).removeprefix("torch.")


def names(graph: fx.Graph) -> list[str]:
    """Targets of all calls but `getitem`, in order, without overloads."""
    calls = [n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return [str(t).removesuffix(".default") if isinstance(t, torch._ops.OpOverload) else t.__name__ for t in calls]
