"""Graphs as JSON values, and back. Nothing of what is read is executed: ops and classes are found by name in tables.

A value that JSON has stays as it is. Any other is a list that begins with a tag:

    ["l", ...] list    ["t", ...] tuple    ["d", [key, value], ...] dict    ["n", i] node i of the same graph
    ["x", i] tensor i    ["f", "inf"] a float that JSON lacks    ["torch", name] dtype, layout, memory format
    ["device", name]    ["q", p, q] a number of sympy    ["s", name] a dynamic dim    ["e", name, ...] an expression
    ["c", class, [field, value], ...] a dataclass of CLASSES    ["g", node, ...] an fx graph
    ["p", i] entry i of the pool

The pool holds each placement, type, expression ... once: an 8B model has ten thousand nodes with a few hundred of them.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

import fxpar.ops  # noqa: F401 - registers fxpar's own ops, which graphs are made of
from fxpar.dist_config import AxisShard, DistConfig, Partial, Replicate, Shard
from fxpar.errors import GraphFormatError
from fxpar.exec_graph import ExecGraph, Part, Stored
from fxpar.graph import AnnotatedGraph, Dim, Input, LogicalGraph, Output, TensorMeta, dim_symbol
from fxpar.mesh import Mesh
from fxpar.pipeline_graph import PipelineGraph, StageProgram
from fxpar.serialize import OpOverload, target_from_name, target_name
from fxpar.strategy import Pipeline, Remat, Strategy
from fxpar.torch_api.expressions import expression_classes

# Equal values of these are stored once.
POOLED = (Mesh, AxisShard, DistConfig, Replicate, Shard, Partial, TensorMeta, Dim, Input, Output, Stored, Strategy)
CLASSES = {
    cls.__name__: cls
    for cls in (*POOLED, Remat, Pipeline, Part, LogicalGraph, AnnotatedGraph, ExecGraph, StageProgram, PipelineGraph)
}
_OWN_MODULES, _ARITHMETIC = ("fxpar.ops.", "fxpar.markers", "fxpar.collectives"), ("operator", "math")
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_EXPRESSIONS = expression_classes()
_EXPRESSION_NAMES = {cls: name for name, cls in _EXPRESSIONS.items()}


class Encoder:
    """Collects the pool and the tensors of the values that it is given."""

    def __init__(self) -> None:
        self.pool: list[Any] = []
        self.tensors: list[Tensor] = []
        self._known: dict[Any, int] = {}
        self._nodes: dict[fx.Node, int] = {}

    def encode(self, value: Any) -> Any:
        """`value` as JSON. Raises GraphFormatError for what the format does not know."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else ["f", str(value)]
        if isinstance(value, fx.Node):
            return ["n", self._nodes[value]]
        if isinstance(value, tuple | list):
            return ["t" if isinstance(value, tuple) else "l", *map(self.encode, value)]
        if isinstance(value, dict):
            return ["d", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if isinstance(value, (*POOLED, sympy.Basic)):
            key = (type(value), value)
            if key not in self._known:
                self.pool.append(self._whole(value))  # what it holds comes before it
                self._known[key] = len(self.pool) - 1
            return ["p", self._known[key]]
        return self._whole(value)

    def _whole(self, value: Any) -> Any:
        if isinstance(value, _TORCH):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, sympy.Basic):
            return self._expression(value)
        if isinstance(value, fx.GraphModule):
            return self._graph(value.graph)
        if isinstance(value, fx.Graph):
            return self._graph(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return ["x", len(self.tensors) - 1]
        name = type(value).__name__
        if is_dataclass(value) and CLASSES.get(name) is type(value):
            return ["c", name, *([f.name, self.encode(getattr(value, f.name))] for f in fields(value))]
        raise GraphFormatError(f"a graph file has no form for {value!r} of class {type(value).__qualname__}")

    def _expression(self, value: sympy.Basic) -> Any:
        if isinstance(value, sympy.Rational):
            return ["q", int(value.p), int(value.q)]
        if isinstance(value, sympy.Symbol):
            return ["s", value.name]
        if value.func not in _EXPRESSION_NAMES:
            raise GraphFormatError(f"a graph file has no form for {value.func.__name__} in the size {value}")
        return ["e", _EXPRESSION_NAMES[value.func], *map(self.encode, value.args)]

    def _graph(self, graph: fx.Graph) -> Any:
        outer, self._nodes = self._nodes, {node: i for i, node in enumerate(graph.nodes)}
        nodes = [self._node(node) for node in graph.nodes]
        self._nodes = outer
        return ["g", *nodes]

    def _node(self, node: fx.Node) -> list[Any]:
        target = target_name(node.target) if node.op == "call_function" else str(node.target)
        meta = [[key, self.encode(value)] for key, value in node.meta.items()]
        return [node.op, node.name, target, self.encode(node.args), self.encode(dict(node.kwargs)), meta]


class Decoder:
    """Inverse of `Encoder`; values come back equal, those of the pool as one object each."""

    def __init__(self, pool: list[Any], tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._targets: dict[str, Any] = {}
        self._nodes: list[fx.Node] = []
        self.pool: list[Any] = []
        for entry in pool:
            self.pool.append(self.decode(entry))

    def decode(self, value: Any) -> Any:
        """The value. Raises GraphFormatError for a tag, class or op that this version does not know."""
        if not isinstance(value, list):
            return value
        match value[0]:
            case "p":
                return self.pool[value[1]]
            case "n":
                return self._nodes[value[1]]
            case "t":
                return tuple([self.decode(v) for v in value[1:]])
            case "l":
                return [self.decode(v) for v in value[1:]]
            case "d":
                return {self.decode(k): self.decode(v) for k, v in value[1:]}
            case "f":
                return float(value[1])
            case "torch":
                return self._torch(value[1])
            case "device":
                return torch.device(value[1])
            case "x":
                return self.tensors[value[1]]
            case "s":
                return dim_symbol(value[1])
            case "q":
                return sympy.Rational(value[1], value[2])
            case "e":
                return self._named(_EXPRESSIONS, value[1])(*(self.decode(v) for v in value[2:]))
            case "c":
                return self._dataclass(value[1], {k: self.decode(v) for k, v in value[2:]})
            case "g":
                return self._graph(value[1:])
            case tag:
                raise GraphFormatError(f"the tag {tag!r} is not known")

    def _torch(self, name: str) -> Any:
        found = getattr(torch, name, None)
        if not isinstance(found, _TORCH):
            raise GraphFormatError(f"torch.{name} is no dtype, layout or memory format")
        return found

    def _named(self, table: dict[str, Any], name: str) -> Any:
        if name not in table:
            raise GraphFormatError(f"the name {name!r} is not known")
        return table[name]

    def _dataclass(self, name: str, values: dict[str, Any]) -> Any:
        cls = self._named(CLASSES, name)
        if cls is LogicalGraph:
            values["gm"] = fx.GraphModule(nn.Module(), values["gm"])
        try:
            return cls(**values)
        except TypeError as error:
            raise GraphFormatError(f"the fields of {name} are others: {error}") from error

    def _graph(self, records: list[list[Any]]) -> fx.Graph:
        outer, self._nodes = self._nodes, []
        graph = fx.Graph()
        for op, name, target, args, kwargs, meta in records:
            found = self._target(target) if op == "call_function" else target
            node = graph.create_node(op, found, self.decode(args), self.decode(kwargs), name=name)
            node.meta.update((key, self.decode(value)) for key, value in meta)
            self._nodes.append(node)
        self._nodes = outer
        return graph

    def _target(self, name: str) -> Any:
        """The op or function: an op of torch, arithmetic, or one of fxpar's own. A file may be anybody's, and `check`
        runs what it holds.
        """
        if name not in self._targets:
            module, _, function = name.partition(":")
            own = module.startswith(_OWN_MODULES) or module in _ARITHMETIC or name.startswith("torch:sym_")
            if function and not own:
                raise GraphFormatError(f"function {name!r} is none that graphs are made of")
            found = target_from_name(name)
            if module.startswith(_OWN_MODULES) and getattr(found, "__module__", "") != module:
                raise GraphFormatError(f"{name!r} is no function of fxpar")
            if not function and not isinstance(found, OpOverload):
                raise GraphFormatError(f"{name!r} is no op of torch")
            self._targets[name] = found
        return self._targets[name]
