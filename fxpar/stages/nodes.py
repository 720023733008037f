"""What the cut asks of the nodes of a logical graph: forward or backward, free to repeat, how dear."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from fxpar.cost.ops import SizesAt, flops
from fxpar.ir.graph import Input, LogicalGraph, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, is_size, whole_meta
from fxpar.ir.pass_base import ancestors

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
    shape: SizesAt = field(init=False)
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
        self.shape = SizesAt(self.dims)
        self.inputs = dict(zip(logical.placeholders, logical.inputs, strict=True))
        calls = [n for n in logical.gm.graph.nodes if n.op == "call_function"]
        self.position = {node: i for i, node in enumerate(calls)}
        results = list(zip(logical.results, logical.outputs, strict=True))
        self.written = {out.fqn: node for node, out in results if out.kind == "buffer"}
        needed = ancestors(node for node, out in results if out.kind in ("loss", "buffer"))
        self.forward = {n for n in calls if n in needed or not is_backward(n)}
        self.free = set()
        for node in calls:
            if self._is_free(node):
                self.free.add(node)
        self.bound = [n for n in calls if n in self.forward and n not in self.free]
        bound = set(self.bound)
        self.reads_params = [
            (i, fqn_of(n), any(o in bound for o in n.all_input_nodes))
            for i, n in enumerate(self.bound)
            if self.params_of(n)
        ]

    def _is_free(self, node: fx.Node) -> bool:
        if is_size(node):
            return True
        if any(not self._costs_nothing(operand) for operand in node.all_input_nodes):
            return False
        made = whole_meta(node)
        elements = sum(m.numel(self.dims) for m in (made if isinstance(made, tuple) else (made,)) if m is not None)
        return self.flops(node) <= 2 * _SHORT * elements

    def flops(self, node: fx.Node) -> int:
        """Floating-point operations of a product, a convolution or attention at the nominal sizes; else 0."""
        return 0 if is_size(node) else int(flops(node, self.shape))

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
