"""What the cut asks of the nodes of a logical graph: forward or backward, free to repeat, how dear."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from fxpar.graph import Input, LogicalGraph, TensorMeta
from fxpar.pass_base import ancestors, tensor_operands
from fxpar.rules.matmul import matmul_flops
from fxpar.rules.option import OpView

own = torch.ops.fxpar
NOMINAL_TOKENS = 2048  # costs must not depend on the example's length
# A product with a contracted dim this short costs no more than an elementwise op (rotary tables are made by one).
_SHORT = 8
# What a stage may compute for itself from these costs it nothing but the op; parameters belong to somebody.
_FREE_INPUTS = {"batch", "buffer", "constant", "scale", "seed"}


@dataclass
class Nodes:
    """The nodes of a graph, sorted.

    `forward` are those that the loss and new buffers need, and others of the forward that only the backward reads.
    `free` nodes are cheap and computed from inputs that are no parameters: each stage computes them for itself.
    """

    logical: LogicalGraph
    dims: dict[sympy.Symbol, int] = field(init=False)  # nominal sizes
    inputs: dict[fx.Node, Input] = field(init=False)
    position: dict[fx.Node, int] = field(init=False)
    forward: set[fx.Node] = field(init=False)
    free: set[fx.Node] = field(init=False)
    written: dict[str, fx.Node] = field(init=False)  # buffer -> its new value
    bound: list[fx.Node] = field(init=False)  # forward nodes that are not free, in the order in which they run
    # (number in `bound`, module, whether it reads values too that are not free) of those that read parameters
    reads_params: list[tuple[int, str, bool]] = field(init=False)

    def __post_init__(self) -> None:
        logical = self.logical
        self.dims = nominal_dims(logical)
        self.inputs = dict(zip(logical.placeholders, logical.inputs, strict=True))
        calls = [n for n in logical.gm.graph.nodes if n.op == "call_function"]
        self.position = {node: i for i, node in enumerate(calls)}
        results = list(zip(logical.results, logical.outputs, strict=True))
        self.written = {out.fqn: node for node, out in results if out.kind == "buffer"}
        needed = ancestors(node for node, out in results if out.kind in ("loss", "buffer"))
        self.forward = {n for n in calls if n in needed or not n.meta.get("backward")}
        self.free = set()
        for node in calls:
            if self._is_free(node):
                self.free.add(node)
        self.bound = [n for n in calls if n in self.forward and n not in self.free]
        bound = set(self.bound)
        self.reads_params = [
            (i, n.meta.get("fqn", ""), any(o in bound for o in n.all_input_nodes))
            for i, n in enumerate(self.bound)
            if self.params_of(n)
        ]

    def _is_free(self, node: fx.Node) -> bool:
        if "sym" in node.meta:
            return True
        if any(not self._costs_nothing(operand) for operand in node.all_input_nodes):
            return False
        made = node.meta["tensor"]
        elements = sum(m.numel(self.dims) for m in (made if isinstance(made, tuple) else (made,)) if m is not None)
        return flops(node, self.dims) <= 2 * _SHORT * elements

    def _costs_nothing(self, node: fx.Node) -> bool:
        info = self.inputs.get(node)
        if info is None:
            return node in self.free
        return info.kind in _FREE_INPUTS and not (info.kind == "buffer" and info.fqn in self.written)

    def params_of(self, node: fx.Node) -> list[str]:
        """Parameters that a node reads itself."""
        return [i.fqn for o in node.all_input_nodes if (i := self.inputs.get(o)) is not None and i.kind == "param"]


def producer(node: fx.Node) -> fx.Node:
    """The op behind a value: one of several results stays with the others."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def nominal_dims(logical: LogicalGraph) -> dict[sympy.Symbol, int]:
    """Sizes to count with: many tokens (of what has no tokens, rows), all other dims as in the example."""
    names = [dim.name for dim in logical.dims]
    token = "T" if "T" in names else next(iter(names), "")
    return {dim.symbol: NOMINAL_TOKENS if dim.name == token else dim.example for dim in logical.dims}


def nbytes(meta: TensorMeta, dims: dict[sympy.Symbol, int]) -> int:
    """Bytes of a value."""
    return meta.numel(dims) * meta.dtype.itemsize


def flops(node: fx.Node, dims: dict[sympy.Symbol, int]) -> int:
    """Floating-point operations of products, convolutions and attention; 0 for any other op.

    Attention over T tokens counts as two products [T, E] x [E, T], causal or not, its backward as five.
    """
    if node.op != "call_function" or "sym" in node.meta:
        return 0
    shapes = tuple(_shape(o.meta["tensor"], dims) for o in tensor_operands(node) if o.meta.get("tensor") is not None)
    if node.target in (own.attention.default, own.attention_backward.default):
        query, key = shapes[-2:] if len(shapes) < 3 else (shapes[0], shapes[1])
        products = 2 if node.target is own.attention.default else 5
        return products * 2 * math.prod(query) * key[-2]
    metas = node.meta.get("tensor")
    results = metas if isinstance(metas, tuple) else (metas,)
    made = tuple(_shape(m, dims) if m is not None else () for m in results)
    return matmul_flops(OpView(node.target, (), (), shapes, made))


def _shape(meta: TensorMeta, dims: dict[sympy.Symbol, int]) -> tuple[int, ...]:
    if isinstance(meta, tuple):
        return ()
    return tuple(s if isinstance(s, int) else int(s.subs(dims)) for s in meta.shape)  # type: ignore[arg-type]
