"""What is known of each node of a program: op, placed type, local bytes, FLOPs, traffic, predicted time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.cost.calls import node_costs
from fxpar.cost.ops import SizesAt, flops, local_metas
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.exec_graph import Communication, Program, collective_kind
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import comm_of, fqn_of, fused_count, is_backward, source_of
from fxpar.ir.printer import PrintedPart, op_name, parts, type_of
from fxpar.viz.inside import Term
from fxpar.viz.viewed import Viewed

MANY = 12  # longer lists of numbers are shortened
END = 2**62  # slices to the end are written with a huge number


@dataclass(frozen=True)
class Wire:
    """A collective over mesh axes joined by '.', per call: bytes that one rank sends, predicted time, tensors fused."""

    kind: str
    axis: str
    nbytes: int
    ms: float
    fused: int = 1


@dataclass(frozen=True)
class NodeFacts:
    """One call. `call` has `{}` where an operand stands, `operands` are numbers of nodes of the same part or names of
    its inputs. `local_bytes` of the results on one rank; `axes`: the placement on each mesh axis.
    """

    name: str
    op: str
    call: str
    operands: tuple[int | str, ...]
    fqn: str
    backward: bool
    type: str
    local: str
    axes: str
    local_bytes: int
    flops: int
    ms: float
    source: str
    why: str
    wire: Wire | None


@dataclass(frozen=True)
class PartFacts:
    """One graph of a program: `inputs` are its placeholders by name, the numbers of `results` those of nodes, or names
    of inputs handed on.
    """

    name: str
    nodes: tuple[NodeFacts, ...]
    inputs: Mapping[str, fx.Node]
    results: tuple[int | str, ...]


def program_facts(view: Viewed, program: Program) -> list[PartFacts]:
    """The parts of one stage of a view, or of the whole model, that compute or move anything, with predicted times."""
    costs = node_costs(program, view.links, parts=program.parts)
    lengths = view.sequences.lengths
    spent = {(cost.part, cost.name): Term.of([cost.exposed], 1e3).at(lengths) for cost in costs}
    reader = _Reader(view, program, SizesAt(view.dims()), spent)
    return [reader.part(part) for part in parts(program)]


@dataclass
class _Reader:
    """Layers repeat: sizes and placements are worked out once for each of them that occurs."""

    view: Viewed
    program: Program
    shape: SizesAt  # with the dynamic dims of the view
    spent: Mapping[tuple[str, str], float]
    _axes: dict[DistConfig, str] = field(default_factory=dict)

    def part(self, part: PrintedPart) -> PartFacts:
        calls = [node for node in part.graph.nodes if node.op == "call_function"]
        number: dict[fx.Node, int | str] = {node: i for i, node in enumerate(calls)}
        places = list(part.graph.find_nodes(op="placeholder"))
        number |= {node: part.names[node] for node in places}
        (output,) = part.graph.find_nodes(op="output")
        return PartFacts(
            part.name,
            tuple(self._node(node, part, number) for node in calls),
            {part.names[node]: node for node in places},
            tuple(number[node] for node in output.args[0]),
        )

    def _node(self, node: fx.Node, part: PrintedPart, number: Mapping[fx.Node, int | str]) -> NodeFacts:
        operands: list[int | str] = []
        arguments = [argument_text(a, number, operands) for a in node.args]
        arguments += [f"{key}={argument_text(a, number, operands)}" for key, a in node.kwargs.items()]
        wire, local = self._wire(node, part.name), node.meta.get("local")
        return NodeFacts(
            name=part.names[node],
            op=op_name(node),
            call=f"({', '.join(arguments)})",
            operands=tuple(operands),
            fqn=fqn_of(node),
            backward=is_backward(node),
            type=type_of(node),
            local=local_text(local),
            axes=self.axes_text(node.meta.get("dist")),
            local_bytes=self.nbytes(node),
            flops=round(flops(node, self.shape)),
            ms=self.spent.get((part.name, node.name), 0.0),
            source=(source_of(node) or "").replace("\\", "/").rpartition("/")[2],  # nothing of the machine
            why=why_text(node, wire),
            wire=wire,
        )

    def nbytes(self, node: fx.Node) -> int:
        """Bytes of a node's results on one rank."""
        return sum(math.prod(self.shape(meta)) * meta.dtype.itemsize for meta in local_metas(node))

    def axes_text(self, dist: DistConfig | tuple | None) -> str:
        """`dp R, tp S(1)`: the placement on each axis of the mesh."""
        if isinstance(dist, tuple):
            return self.axes_text(next((d for d in dist if d is not None), None))
        if dist is None:
            return ""
        if dist not in self._axes:
            self._axes[dist] = ", ".join(f"{axis} {place}" for axis, place in dist.placements().items())
        return self._axes[dist]

    def _wire(self, node: fx.Node, part: str) -> Wire | None:
        kind = collective_kind(node)
        if kind is None:
            return None
        axis, sent = comm_of(node)
        whole = TensorMeta(self.shape(sent), sent.dtype)
        found = Communication(kind, axis, whole, part, fqn_of(node), is_backward(node))
        nbytes = round(found.wire_bytes(self.program.strategy.mesh.degree(axis), {}))
        return Wire(kind, axis, nbytes, self.spent[part, node.name], fused_count(node))


def argument_text(value: Any, number: Mapping[fx.Node, int | str], operands: list[int | str]) -> str:
    """The argument with `{}` for each node, which is added to `operands`."""
    if isinstance(value, fx.Node):
        operands.append(number[value])
        return "{}"
    if isinstance(value, list | tuple):
        words = [argument_text(v, number, operands) for v in value]
        if len(words) > MANY and not any(isinstance(v, fx.Node) for v in value):
            words[MANY:] = [f"... {len(words) - MANY} more"]
        return f"[{', '.join(words)}]"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    if isinstance(value, int) and value >= END:
        return "end"
    return str(value)


def local_text(local: Any) -> str:
    """Local shape of a value, or of each result of an op that has several."""
    if isinstance(local, tuple):
        return f"({', '.join(str(one) for one in local if one is not None)})"
    return "" if local is None else str(local)


def why_text(node: fx.Node, wire: Wire | None) -> str:
    """What put a node into the graph, where that is known."""
    if node.meta.get("again"):
        return "rematerialize: computed again for the backward"
    if wire is not None and wire.fused > 1:
        return f"bucketing: one call for {wire.fused} tensors"
    made_by = node.meta.get("pass")
    return f"the pass {made_by}" if made_by else ""
