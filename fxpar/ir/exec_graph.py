"""`ExecGraph`: what every rank runs under one strategy, in three parts.

    prologue   once per mini-batch:  stored parameters -> parameters as the body wants them (casts, ZeRO gathers)
    body       per micro-batch:      forward, loss, backward
    epilogue   once per group:       loss and gradients -> reduced over data ranks, lying like the stored parameters

A `PlainGraph` is the same for a forward whose loss is outside: it has the parts `forward` and `backward`.

Programs are the same object on every rank: process groups and this rank's coordinates are tokens (`@tp`, `#tp`) until
`bind`. They pickle as plain data.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from fxpar.ir.content import content
from fxpar.ir.copies import copy_graph, copy_node
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import CallStructure, Dim, Input, Output, TensorMeta, bins_of, run_dims
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import comm_of, fqn_of, fused_count, is_backward
from fxpar.ir.pass_base import ancestors
from fxpar.ir.serialize import OpOverload, graph_from_data, graph_to_data, target_name
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import in_step

Source = tuple[Literal["input", "prologue", "body", "forward", "backward", "input_part", "early"], int]


@dataclass
class Part:
    """One graph of an ExecGraph: where each of its placeholders comes from, and its results."""

    graph: fx.Graph
    sources: tuple[Source, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {"graph": graph_to_data(self.graph), "sources": self.sources}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.graph, self.sources = graph_from_data(state["graph"]), state["sources"]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        (output,) = self.graph.find_nodes(op="output")
        return tuple(output.args[0])

    @property
    def is_empty(self) -> bool:
        """No calls at all: every result is a placeholder."""
        return not any(node.op == "call_function" for node in self.graph.nodes)


def cut_part(
    members: Sequence[fx.Node],
    results: Sequence[fx.Node],
    position: Mapping[fx.Node, int],
    slots: Mapping[str, Mapping[fx.Node, int]],
) -> Part:
    """A graph of the member nodes; operands from elsewhere become placeholders, in the order of first use.

    `position` numbers the inputs of the whole graph, `slots` the results of the parts that run earlier, which come
    first where a result is an input handed on.
    """
    inside = set(members)
    outside = dict.fromkeys(o for n in members for o in n.all_input_nodes if o not in inside)
    outside |= dict.fromkeys(r for r in results if r not in inside)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    sources: list[Any] = []
    for node in outside:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta.update(node.meta)
        part = next((p for p in slots if node in slots[p]), "input")
        sources.append((part, position[node] if part == "input" else slots[part][node]))
    for node in members:
        copied[node] = copy_node(graph, node, copied.__getitem__)
    graph.output(tuple(copied[r] for r in results))
    return Part(graph, tuple(sources))


def restricted(part: Part, results: Sequence[fx.Node]) -> Part:
    """The part with these of its results alone, and what they are computed from."""
    needed = ancestors(results)
    sources = dict(zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=True))
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in part.graph.nodes:
        if node in needed:
            copied[node] = copy_node(graph, node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in results))
    return Part(graph, tuple(source for node, source in sources.items() if node in needed))


def loss_results(program: Program, epilogue: Part) -> list[fx.Node]:
    """Of the results of an epilogue, which are in the order of the outputs, the loss and metrics."""
    kinds = [out.kind for out in program.outputs if out.kind in ("loss", "grad", "buffer")]
    return [node for node, kind in zip(epilogue.results, kinds, strict=True) if kind == "loss"]


@dataclass(frozen=True)
class Stored:
    """How an input or a result lies outside of the graph."""

    meta: TensorMeta
    dist: DistConfig

    @property
    def local(self) -> TensorMeta:
        return TensorMeta(self.dist.local_shape(self.meta.shape), self.meta.dtype)


@dataclass(frozen=True)
class Communication:
    """One collective of a graph: kind, mesh axes joined by '.', what a rank puts in, how many calls were fused."""

    kind: str
    axis: str
    sent: TensorMeta
    part: str
    fqn: str
    backward: bool
    fused: int = 1

    def wire_bytes(self, degree: int, dims: dict) -> float:
        """Bytes that one rank sends, by the ring algorithm (substance of `sent` with dynamic dims at `dims`)."""
        nbytes = self.sent.numel(dims) * self.sent.dtype.itemsize
        share = (degree - 1) / degree
        factor = {"all_reduce": 2 * share, "all_gather": degree - 1.0, "reduce_scatter": share, "all_to_all": share}
        factor["shift"] = 1.0
        return nbytes * factor[self.kind]


_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_FUNCTIONS = {"fxpar.ops.layout:shift": "shift", "fxpar.ops.copies:exchange": "all_to_all"}


def collective_kind(node: fx.Node) -> str | None:
    """Kind of a collective that is a call of a process group; None for any other node."""
    target = node.target
    if isinstance(target, OpOverload):
        known = _OPS.get(id(target)) or _OPS.setdefault(id(target), (target, _kind_of(target)))
        return known[1]
    return _kind_of_function(target) if node.op == "call_function" else None


_OPS: dict[int, tuple[OpOverload, str | None]] = {}
"""Ops with their kinds, as passes ask for every node. By identity: an op's own hash takes longer than all of it."""


@functools.cache
def _kind_of_function(function: Any) -> str | None:
    return _FUNCTIONS.get(target_name(function))


def _kind_of(op: OpOverload) -> str | None:
    name = str(op)
    return _KINDS.get(name.split(".")[1]) if name.startswith("_c10d_functional.") else None


@dataclass(kw_only=True)
class Program(ABC):
    """What every rank runs under one strategy, whatever its parts."""

    strategy: Strategy
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    stored_inputs: tuple[Stored, ...]
    stored_outputs: tuple[Stored, ...]
    dims: tuple[Dim, ...]
    divisors: dict[str, int]
    name: str = "model"
    constants: dict[str, Tensor] = field(default_factory=dict)
    padding_hazard: str | None = None  # why a batch must not be padded, if it must not
    spread: int = 1  # over how many ranks of a ring the tokens of a row are spread evenly; 1: they stay in their order
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    passes: tuple[dict[str, Any], ...] = ()

    @property
    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """The graphs by name, in the order in which they run."""

    @property
    def mesh(self) -> Mesh:
        """The ranks that run it."""
        return self.strategy.mesh

    @property
    def bins(self) -> int:
        """In how many bins of equal length the documents of a row come; none crosses two."""
        return bins_of(self.strategy, self.outputs)

    @property
    def placed(self) -> tuple[Program, ...]:
        """The programs of the parts of the model that have a mesh of their own: here one, all of it."""
        return (self,)

    @property
    def storing(self) -> tuple[Program, ...]:
        """The parts that say how parameters and gradients lie: of teams in step the first, as it does for all ranks."""
        return self.placed[:1] if in_step(self.strategy) else self.placed

    def params(self) -> list[tuple[Input, Stored]]:
        """The parameters in the order of the model, as (the first part that has each) stores them."""
        found: dict[str, Stored] = {}
        for program in self.storing:
            for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
                if info.kind == "param":
                    found.setdefault(info.fqn, stored)
        return [(info, found[info.fqn]) for info in self.inputs if info.kind == "param"]

    @property
    def node_count(self) -> int:
        return sum(len(part.graph.nodes) for part in self.parts.values())

    def communications(self) -> list[Communication]:
        """All collectives in program order."""
        found = []
        for name, part in self.parts.items():
            for node in part.graph.nodes:
                kind = collective_kind(node)
                if kind is not None:
                    axis, sent = comm_of(node)
                    found.append(
                        Communication(
                            kind,
                            axis,
                            sent,
                            name,
                            fqn_of(node),
                            is_backward(node),
                            fused_count(node),
                        )
                    )
        return found

    def collectives(self) -> dict[str, int]:
        """Number of collectives of each kind in one mini-batch of one micro-batch."""
        return dict(sorted(Counter(c.kind for c in self.communications()).items()))

    def collective_bytes(self, sizes: dict[str, int] | None = None) -> int:
        """Bytes that one rank sends per step with dynamic dims at `sizes` (the example's by default)."""
        dims = run_dims(self, sizes)
        return round(sum(c.wire_bytes(self.mesh.degree(c.axis), dims) for c in self.communications()))

    def fingerprint(self) -> str:
        """Hash of the program; equal on all ranks, or they would deadlock or compute with different numbers."""
        digest = hashlib.sha256(str(self.strategy).encode())
        for name, value in sorted(self.constants.items()):
            digest.update(f"{name} {content(value).tolist()} {tuple(value.shape)} {value.dtype}\n".encode())
        for program in self.placed:
            digest.update(f"{sorted(program.divisors.items())} {program.padding_hazard} {program.spread}\n".encode())
            digest.update(f"{program.inputs} {program.outputs} {program.dims}\n".encode())
            for stored in (*program.stored_inputs, *program.stored_outputs):
                digest.update(f"{stored.meta} {stored.dist} {stored.dist.mesh}\n".encode())
        for part in self.parts.values():
            for node in part.graph.nodes:
                digest.update(f"{node.op} {_target_name(node)} {node.name} {node.args} {node.kwargs}\n".encode())
        return digest.hexdigest()[:16]

    def axes(self) -> tuple[str, ...]:
        """Process-group tokens that the graphs use (axes joined by '.'), sorted."""
        return tuple(sorted({c.axis for c in self.communications()}))


def _target_name(node: fx.Node) -> str:
    """The same in every process: a function's text has its address."""
    target: Any = node.target
    name = getattr(target, "__qualname__", None)
    return f"{target.__module__}.{name}" if isinstance(name, str) and name else str(target)


@dataclass(kw_only=True)
class ExecGraph(Program):
    """A training step; see the module docstring."""

    prologue: Part
    body: Part
    epilogue: Part

    @property
    def parts(self) -> dict[str, Part]:
        return {"prologue": self.prologue, "body": self.body, "epilogue": self.epilogue}

    @functools.cached_property
    def loss(self) -> Part:
        """What the epilogue does for the loss and metrics, in the order of the outputs."""
        return self._for_loss[1]

    @functools.cached_property
    def loss_body(self) -> Part:
        """What the body does for these: no backward. Its results are what `loss` reads of it."""
        return self._for_loss[0]

    @functools.cached_property
    def _for_loss(self) -> tuple[Part, Part]:
        late = restricted(self.epilogue, loss_results(self, self.epilogue))
        read = list(dict.fromkeys(i for source, i in late.sources if source == "body"))
        late.sources = tuple((source, read.index(i) if source == "body" else i) for source, i in late.sources)
        return restricted(self.body, [self.body.results[i] for i in read]), late


@dataclass(kw_only=True)
class Outline(Program):
    """How a program lies that was lowered only as far as its inputs and gradients are placed: it has no parts. With
    pipeline stages `stages` has one each, and inputs and outputs are those of the whole model.
    """

    stages: tuple[Outline, ...] = ()

    @property
    def parts(self) -> dict[str, Part]:
        return {}

    @property
    def placed(self) -> tuple[Program, ...]:
        return self.stages or (self,)


@dataclass(kw_only=True)
class PlainGraph(Program):
    """A forward, and a backward that starts from the tangents of its values.

    Results of `forward`: the values and new buffers in the order of `outputs`, then what the backward needs of it
    (tensors and integers). Results of `backward`: the gradients in the order of `outputs`. Without a gradient the
    backward is empty. `tangents` has those that a gradient (its kind and name) depends on in the captured graph; in the
    lowered one several gradients may share a collective.
    """

    forward: Part
    backward: Part
    structure: CallStructure
    tangents: Mapping[tuple[str, str], frozenset[str]]

    @property
    def parts(self) -> dict[str, Part]:
        return {"forward": self.forward, "backward": self.backward}


def compile_graph(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph as generated Python; values are freed after their last use."""
    return fx.GraphModule(nn.Module(), graph)


def substitute_tokens(graph: fx.Graph, groups: dict[str, str], indices: dict[str, int]) -> fx.Graph:
    """A copy of the graph with `@axis` replaced by process-group names and `#axis` by this rank's position."""

    def swap(value: Any) -> Any:
        if isinstance(value, str) and value[:1] == "@":
            return groups[value[1:]]
        if isinstance(value, str) and value[:1] == "#":
            return indices[value[1:]]
        if isinstance(value, tuple | list):
            return type(value)(swap(v) for v in value)
        return value

    new = copy_graph(graph)
    for node in new.nodes:
        if node.op == "call_function" and any(isinstance(a, str) for a in node.args):
            node.args = tuple(swap(a) if isinstance(a, str) else a for a in node.args)
    return new


@functools.cache
def _makes_tensors(op: OpOverload) -> bool:
    """Whether an op takes a device and no tensor that could tell it one: what it fetches lies on the host."""
    arguments = op._schema.arguments
    told = any("Tensor" in str(a.type) for a in arguments) and str(op) != "fxpar.from_host.default"
    return any(a.name == "device" for a in arguments) and not told


def make_tensors_on(graph: fx.Graph, device: torch.device) -> None:
    """Tensors that the graph makes from nothing (`arange`, `zeros` ...) are made on the device. Graphs name none; as
    ops and not as functions of torch they also pass `with device:` by.
    """
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and _makes_tensors(node.target):
            node.kwargs = {**node.kwargs, "device": device}
