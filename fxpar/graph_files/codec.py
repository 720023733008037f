"""Graphs as JSON values, and back. Nothing of what is read is executed: ops and classes are found by name in tables,
and what a graph says is checked as it is read (`fxpar.graph_files.vocabulary`, `fxpar.graph_files.structure`).

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
import re
import unicodedata
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

import fxpar.ops  # noqa: F401 - registers fxpar's own ops, which graphs are made of
from fxpar.errors import FxparError, GraphFormatError
from fxpar.graph_files.structure import check_fields, check_meta, check_value
from fxpar.graph_files.vocabulary import check_call, check_identifier, check_target, find_target, shown
from fxpar.ir.counts import RunCount
from fxpar.ir.dist_config import AxisShard, DistConfig, Partial, Replicate, Shard
from fxpar.ir.exec_graph import ExecGraph, Part, Stored
from fxpar.ir.graph import AnnotatedGraph, Averaged, Dim, Input, LogicalGraph, Output, TensorMeta, dim_symbol
from fxpar.ir.mesh import Mesh
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, TeamsGraph
from fxpar.ir.remat import Remat
from fxpar.ir.serialize import target_name
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import Pipeline
from fxpar.torch_api.expressions import expression_classes
from fxpar.torch_api.modules import lazy_module

# Equal values of these are stored once.
POOLED = (Mesh, AxisShard, DistConfig, Replicate, Shard, Partial, TensorMeta, Dim, Input, Output, Stored, Strategy)
GRAPHS = (LogicalGraph, AnnotatedGraph, ExecGraph, StageProgram, PipelineGraph, TeamsGraph)
CLASSES = {cls.__name__: cls for cls in (*POOLED, Averaged, ModuleRule, Remat, Pipeline, Part, *GRAPHS)}
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_TORCH_NAMES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, _TORCH)}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DEVICE = re.compile(r"(cpu|cuda|meta)(:\d{1,3})?", re.ASCII)
_LARGEST_INT, _LONGEST_TEXT = 2**63, 2**16
# Parts of a size, were its powers written out; those of real models have tens. sympy compares what it chooses the
# largest from pair by pair, and takes cubic time for remainders of remainders.
_LARGEST_EXPRESSION, _MOST_CHOICES = 200, 16
_CHOICES = tuple(cls for name, cls in expression_classes().items() if name.removeprefix("torch.") in ("Max", "Min"))
_POWERS = (sympy.Pow, *(cls for name, cls in expression_classes().items() if "Pow" in name))
_EXPRESSIONS = {**expression_classes(), "RunCount": RunCount}
_EXPRESSION_NAMES = {cls: name for name, cls in _EXPRESSIONS.items()}


class Encoder:
    """Collects the pool and the tensors of the values that it is given."""

    def __init__(self) -> None:
        self.pool: list[Any] = []
        self.tensors: list[Tensor] = []
        self._known: dict[Any, list[Any]] = {}
        self._seen: dict[int, tuple[Any, list[Any]]] = {}
        """Of the pool by `id`: looking at a placement takes longer than all else. They are held, so ids stay theirs."""
        self._targets: dict[Any, str] = {}
        self._nodes: dict[fx.Node, int] = {}

    def encode(self, value: Any) -> Any:
        """`value` as JSON. Raises GraphFormatError for what the format does not know."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return _plain(value)
        if isinstance(value, fx.Node):
            return ["n", self._nodes[value]]
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if isinstance(value, float):
            return value if math.isfinite(value) else ["f", str(value)]
        if isinstance(value, tuple | list):
            return ["t" if isinstance(value, tuple) else "l", *map(self.encode, value)]
        if isinstance(value, dict):
            return ["d", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if isinstance(value, (*POOLED, sympy.Basic)):
            key = (type(value), value)
            if key not in self._known:
                self.pool.append(self._whole(value))  # what it holds comes before it
                self._known[key] = ["p", len(self.pool) - 1]
            self._seen[id(value)] = value, self._known[key]
            return self._known[key]
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
        target = str(node.target)
        if node.op == "call_function":
            if node.target not in self._targets:
                check_target(node.target)  # what is written can be read
                self._targets[node.target] = target_name(node.target)
            target = self._targets[node.target]
            check_call(node.target, node.args, node.kwargs)
        meta = [[key, self.encode(value)] for key, value in node.meta.items()]
        return [node.op, node.name, target, self.encode(node.args), self.encode(dict(node.kwargs)), meta]


class Decoder:
    """Inverse of `Encoder`; values come back equal, those of the pool as one object each.

    All of it may be anybody's. Raises GraphFormatError for what an Encoder does not write; other errors mean the same.
    """

    def __init__(self, pool: list[Any], tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._targets: dict[str, Any] = {}
        self._nodes: list[fx.Node] = []
        self._sizes: dict[sympy.Basic, tuple[int, int]] = {}  # parts of an expression, and of them those to choose from
        self.pool: list[Any] = []
        for entry in pool:
            found = self.decode(entry)
            # An entry that could hold another of its kind would double what it stands for, entry by entry.
            if not isinstance(found, (*POOLED, sympy.Basic)):
                raise GraphFormatError(f"{shown(entry)} does not belong into the pool")
            self.pool.append(found)

    def decode(self, value: Any) -> Any:
        """The value. Raises GraphFormatError for a tag, class, op or call that this version does not know."""
        if not isinstance(value, list):
            return _plain(value)
        match value:
            case ["p", int() as index]:
                return _at(self.pool, index, "entry of the pool")
            case ["n", int() as index]:
                return _at(self._nodes, index, "node before this one")
            case ["t", *items]:
                return tuple([self.decode(v) for v in items])
            case ["l", *items]:
                return [self.decode(v) for v in items]
            case ["d", *pairs]:
                return self._dict(pairs)
            case ["c", str() as name, *pairs]:
                return self._dataclass(name, self._dict(pairs))
            case ["x", int() as index]:
                return _at(self.tensors, index, "tensor")
            case ["f", str() as name]:
                return _named(_FLOATS, name)
            case ["torch", str() as name]:
                if name not in _TORCH_NAMES:
                    raise GraphFormatError(f"torch.{name[:60]} is not a dtype, layout or memory format")
                return _TORCH_NAMES[name]
            case ["device", str() as name]:
                if not _DEVICE.fullmatch(name):
                    raise GraphFormatError(f"{shown(name)} is not a device of a graph")
                return torch.device(name)
            case ["s", str() as name]:
                return dim_symbol(check_identifier(name))
            case ["q", int() as above, int() as below] if below > 0:
                return sympy.Rational(_plain(above), _plain(below))
            case ["e", str() as name, *args]:
                return self._expression(_named(_EXPRESSIONS, name), [self.decode(v) for v in args])
            case ["g", *records]:
                return self._graph(records)
        tag = value[0] if value else None
        raise GraphFormatError(f"the tag {shown(tag)} is not known, or not with what follows it")

    def _dict(self, pairs: list[Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            key = self.decode(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
            if not isinstance(key, str | int | float | tuple) or key in found:
                raise GraphFormatError(f"{shown(pair)} is not a new key with a value")
            found[key] = self.decode(pair[1])
        return found

    def _expression(self, cls: type[sympy.Basic], args: list[Any]) -> sympy.Basic:
        for arg in args:
            if not isinstance(arg, sympy.Expr | int):
                raise GraphFormatError(f"{shown(arg)} is not part of a size")
        if cls in _POWERS and not (len(args) == 2 and isinstance(args[1], int | sympy.Integer) and -1 <= args[1] <= 16):
            raise GraphFormatError(f"{shown(args)} is not a power of a size")
        known = [self._sizes.get(arg, (1, 0)) for arg in args]
        size = (1 + sum(parts for parts, _ in known)) * (1 + abs(int(args[1])) if cls in _POWERS else 1)
        choices = sum(some for _, some in known) + (len(args) if cls in _CHOICES else 0)
        if size > _LARGEST_EXPRESSION or choices > _MOST_CHOICES:
            most = f"{_LARGEST_EXPRESSION} parts" if size > _LARGEST_EXPRESSION else f"{_MOST_CHOICES} to choose from"
            raise GraphFormatError(f"the expression of a size has more than {most}")
        found = cls(*args)
        if not isinstance(found, sympy.Expr):
            raise GraphFormatError(f"{shown(found)} is not a size")
        if found.is_Integer:
            _plain(int(found))
        self._sizes[found] = size, choices
        return found

    def _dataclass(self, name: str, values: dict[Any, Any]) -> Any:
        cls: Any = _named(CLASSES, name)
        if cls is LogicalGraph and isinstance(values.get("gm"), fx.Graph):
            values["gm"] = lazy_module(nn.Module(), values["gm"])
        check_fields(cls, values)
        try:
            found = cls(**values)
            check_value(found)
        except TypeError as error:
            raise GraphFormatError(f"the fields of {name} are others: {error}") from error
        except FxparError as error:  # of the class itself: a placement that cannot be, a strategy
            raise GraphFormatError(f"{name}: {error}") from error
        return found

    def _graph(self, records: list[Any]) -> fx.Graph:
        outer, self._nodes = self._nodes, []
        graph, names = fx.Graph(), set()
        for record in records:
            if not isinstance(record, list) or len(record) != 6:
                raise GraphFormatError(f"{shown(record)} is not a node")
            node = self._node(graph, *record)
            for name in {node.name, node.target if node.op == "placeholder" else node.name}:
                if name in names:
                    raise GraphFormatError(f"two values have the name {name!r}")
                names.add(name)
            self._nodes.append(node)
        if not self._nodes or [n for n in self._nodes if n.op == "output"] != self._nodes[-1:]:
            raise GraphFormatError("a graph does not end with its results")
        self._nodes = outer
        return graph

    def _node(
        self, graph: fx.Graph, op: Any, name: Any, target: Any, arg_values: Any, kwarg_values: Any, meta: Any
    ) -> fx.Node:
        args, kwargs = self.decode(arg_values), self.decode(kwarg_values)
        if op == "call_function":
            if not (isinstance(target, str) and isinstance(args, tuple) and isinstance(kwargs, dict)):
                raise GraphFormatError(f"{shown(name)} is not a call")
            if target not in self._targets:
                self._targets[target] = find_target(target)
            found = self._targets[target]
            check_call(found, args, kwargs)
        elif op == "placeholder" and args == () and kwargs == {}:
            found = check_identifier(target)
        elif op == "output" and target == "output" and _are_results(args) and kwargs == {}:
            found = target
        else:
            raise GraphFormatError(f"a node of the kind {shown(op)} does not belong into a graph, or not like this")
        node = graph.create_node(op, found, name=check_identifier(name))
        node.args, node.kwargs = args, kwargs  # afterwards, as in `copy_node`
        if node.name != name:
            raise GraphFormatError(f"{name!r} cannot be the name of a value here")
        node.meta.update(self._dict(meta if isinstance(meta, list) else [meta]))
        check_meta(node)
        return node


def _are_results(args: Any) -> bool:
    """One tuple of nodes."""
    alone = isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], tuple)
    return alone and all(isinstance(node, fx.Node) for node in args[0])


def _plain(value: Any) -> Any:
    """A value that JSON has. Raises GraphFormatError: numbers are of 64 bits, texts can be shown."""
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise GraphFormatError(f"a text of {len(value):,} characters is too long")
        if not value.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for c in value):
            raise GraphFormatError(f"the text {shown(value)} holds control characters")
    elif isinstance(value, int):
        if abs(value) > _LARGEST_INT:
            raise GraphFormatError(f"a number of {value.bit_length()} bits is too large")
    elif isinstance(value, dict) or (isinstance(value, float) and not math.isfinite(value)):
        raise GraphFormatError(f"{shown(value)} is not a value of a graph file")
    return value


def _named(table: dict[str, Any], name: str) -> Any:
    if name not in table:
        raise GraphFormatError(f"the name {shown(name)} is not known")
    return table[name]


def _at(found: list[Any], index: int, what: str) -> Any:
    if not 0 <= index < len(found):
        raise GraphFormatError(f"there is no {what} with the number {index}")
    return found[index]
