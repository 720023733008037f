"""From the nodes as traced to the form that all later passes rely on.

The new graph has named placeholders, sizes computed at its top, no fake tensors, no devices, no aliases, no views that
undo each other, no -1 in shapes, and no dead code.
"""

from __future__ import annotations

import builtins
import keyword
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.graph import Input, TensorMeta
from fxpar.ir.node_meta import tensor_of
from fxpar.torch_api.modules import lazy_module
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.torch_api.tracing import OpOverload
from fxpar.tracer.dynamic import DynamicDims
from fxpar.tracer.symints import SymInts

aten = torch.ops.aten

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_DEVICE_KEYS = ("device", "pin_memory", "layout")


def _argument(fqn: str, used: set[str]) -> str:
    """A Python name for an input that is not in `used` yet; it is put there."""
    name = "".join(c if c.isalnum() else "_" for c in fqn)
    while not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name) or name in used:
        name = f"_{name}"
    used.add(name)
    return name


def _origin(like: fx.Node, node: fx.Node) -> dict[str, Any]:
    """fqn, source and backward of `like`; what it does not know is taken from the operands of `node`."""
    operands = [n for n in node.all_input_nodes if n.op == "call_function"]
    origin = {}
    for key, default in (("fqn", ""), ("source", None), ("backward", False)):
        known = [like.meta.get(key), *(n.meta[key] for n in operands)]
        origin[key] = next((value for value in known if value is not None), default)
    return origin


@dataclass
class Canonical:
    """Copies a traced graph node by node into its canonical form."""

    raw: fx.GraphModule
    inputs: tuple[Input, ...]
    dims: DynamicDims
    world: FakeWorld
    graph: fx.Graph = field(default_factory=fx.Graph)

    def run(self, results: list[fx.Node]) -> fx.GraphModule:
        """The canonical graph of `results` (nodes of the raw graph)."""
        self.new: dict[fx.Node, Any] = {}
        self.root = torch.nn.Module()
        self._placeholders()
        for node in self.raw.graph.nodes:
            if node.op == "call_function":
                self._copy(node)
            elif node.op == "get_attr":
                self._constant(node)
        self.graph.output(tuple(self.new[node] for node in results))
        self.graph.eliminate_dead_code()
        return lazy_module(self.root, self.graph)

    def _placeholders(self) -> None:
        where: dict[str, tuple[fx.Node, int]] = {}
        old, used = self.raw.graph.find_nodes(op="placeholder"), set[str]()
        for found, node in zip(self.inputs, old, strict=True):
            new = self.graph.placeholder(_argument(found.fqn, used))
            owner = found.fqn.rpartition(".")[0] if found.kind in ("param", "buffer") else ""
            new.meta.update(tensor=found.meta, fqn=owner, source=None, backward=False)
            self.new[node] = new
            for d, name in self.dims.names.get(found.fqn, {}).items() if found.kind == "batch" else ():
                where.setdefault(name, (new, d))
        self.symints = SymInts(self.graph, self.world, where)

    def meta_of(self, value: Any) -> Any:
        """TensorMeta of a fake tensor; a tuple of them for several."""
        if isinstance(value, Tensor):
            return TensorMeta(tuple(self.symints.expression(s) for s in value.shape), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(self.meta_of(v) for v in value)
        return None

    def emit(self, like: fx.Node, target: Any, args: Any, kwargs: Any, meta: Any) -> fx.Node:
        """A new node that stands where `like` stood."""
        name = target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else None
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = _origin(like, node)
        node.meta["tensor"] = meta
        return node

    def _constant(self, node: fx.Node) -> None:
        name = str(node.target)
        value = getattr(self.raw, name)
        new = self.graph.create_node("get_attr", name)
        self.root.register_buffer(name, value.detach(), persistent=False)
        new.meta.update(tensor=self.meta_of(value), fqn="", source=None, backward=False)
        self.new[node] = new

    def _copy(self, node: fx.Node) -> None:
        value: Any = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            return  # made on demand by `self.symints`
        if node.target in _SAME:
            self.new[node] = self.new[node.all_input_nodes[0]]
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._operand)
        kwargs = {key: v for key, v in kwargs.items() if key not in _DEVICE_KEYS}
        if node.target is aten._to_copy.default and self._is_same(node, kwargs):
            self.new[node] = args[0]
            return
        meta = self.meta_of(value)
        target = aten.view.default if node.target is aten._unsafe_view.default else node.target
        if node.target in _VIEWS:
            args = (args[0], [self.symints.node(s) for s in value.shape], *args[2:])
        same = self._source_of(target, args, meta)
        self.new[node] = same if same is not None else self.emit(node, target, args, kwargs, meta)

    def _source_of(self, target: Any, args: tuple[Any, ...], meta: Any) -> fx.Node | None:
        """The node whose value this one has: it does nothing, or undoes the one before it."""
        if target is aten.t.default and args[0].target is aten.t.default:
            return args[0].args[0]
        if target is aten.copy.default:  # a copy into a tensor of the same shape and dtype
            return args[1] if tensor_of(args[1]) == meta else None
        if target not in _VIEWS:
            return None
        if tensor_of(args[0]) == meta:
            return args[0]
        if target is aten.view.default and args[0].target is target:
            before = args[0].args[0]
            return before if tensor_of(before) == meta else None
        return None

    def _operand(self, node: fx.Node) -> Any:
        if node in self.new:
            return self.new[node]
        return self.symints.node(node.meta["val"])

    def _is_same(self, node: fx.Node, kwargs: dict[str, Any]) -> bool:
        """Whether a cast changes neither dtype nor memory format (a change of device is no change here)."""
        source = node.all_input_nodes[0].meta["val"]
        return source.dtype == node.meta["val"].dtype and kwargs.get("memory_format") in (None, torch.preserve_format)
