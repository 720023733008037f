"""What the parts of a pipeline stage allocate and let go of, node by node.

Memory goes from part to part: the backward reads storages that the forward has made. So the parts are put behind each
other, their storages are traced together, and each part gets its own list of births and deaths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sympy
from torch import fx

from fxpar.ir.copies import copy_graph
from fxpar.ir.exec_graph import Part, collective_kind
from fxpar.ir.pipeline_graph import StageProgram
from fxpar.memory.liveness import kind_of
from fxpar.memory.workspace import Conditions, workspace_bytes
from fxpar.passes.accumulate_gradients import accumulate
from fxpar.passes.write_in_place import functional
from fxpar.remat import SizedStorages, Storages, trace_sized

Name = tuple[str, str]  # kind and FQN of an input

_HALVES = ("input_part", "weight_part")
_PER_MICRO_BATCH = ("batch", "received", "received_grad")


class StorageStep(NamedTuple):
    """One node: (storage, what it is for) of what it makes; storages that nothing of its part uses later."""

    node: fx.Node
    births: tuple[tuple[int, str], ...]
    deaths: tuple[int, ...]
    workspace_bytes: int = 0


@dataclass(frozen=True)
class PartTrace:
    """`reads`: storages from elsewhere; `makes`: its own; `results[i]`: that of result i, None for an integer."""

    steps: tuple[StorageStep, ...]
    reads: frozenset[int]
    makes: frozenset[int]
    results: tuple[int | None, ...]


@dataclass(frozen=True)
class StageTrace:
    """The parts that one micro-batch runs, in order. `lasting` storages are not a micro-batch's own: parameters,
    buffers, accumulators. `inputs`: the storages of batch pieces and received tensors. `differ`: which of the other
    places that were asked about have another trace.
    """

    parts: Mapping[str, PartTrace]
    nbytes: tuple[int, ...]
    lasting: frozenset[int]
    inputs: Mapping[Name, int]
    differ: tuple[Mapping[str, int], ...] = ()

    def kept(self, after: str) -> frozenset[int]:
        """Storages that outlive part `after` of a micro-batch, as a later one reads them."""
        names = list(self.parts)
        later = [self.parts[name] for name in names[names.index(after) + 1 :]]
        found = frozenset().union(*(part.reads for part in later)).difference(self.lasting, *(p.makes for p in later))
        if after != names[0]:
            return found
        return found - {storage for (kind, _), storage in self.inputs.items() if kind == "received_grad"}


@dataclass
class _Joined:
    """Parts behind each other; `inputs` are placeholders by source. `same`: placeholders for what an earlier part has,
    each with that.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[tuple[str, int], fx.Node] = field(default_factory=dict)
    calls: dict[str, list[fx.Node]] = field(default_factory=dict)
    results: dict[str, list[fx.Node]] = field(default_factory=dict)
    known: dict[Any, tuple[SizedStorages, StageTrace]] = field(default_factory=dict)  # by places

    def add(self, name: str, part: Part) -> None:
        for place, source in zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=True):
            if source[0] in self.results:
                self.same[place] = self.results[source[0]][source[1]]
            elif self.inputs.setdefault(source, place) is not place:
                self.same[place] = self.inputs[source]
        self.nodes += part.graph.nodes
        self.calls[name] = [node for node in part.graph.nodes if node.op == "call_function"]
        self.results[name] = list(part.results)


def trace_stage(
    stage: StageProgram,
    names: tuple[str, ...],
    dims: Mapping[sympy.Symbol, int],
    coordinates: Mapping[str, int],
    conditions: Conditions,
    *,
    again: bool,
    others: Sequence[Mapping[str, int]] = (),
) -> StageTrace:
    """Trace the parts `names`, forward first, at one place on the axes, which is compared with `others`. `again`:
    gradients are added to those of earlier micro-batches.
    """
    sent = len(stage.given("sent_grad"))
    parts = [getattr(stage, name) for name in names]
    joined = _joined(names, tuple(one.graph for one in parts), tuple(one.sources for one in parts), sent, again)
    key = tuple(tuple(place.items()) for place in (coordinates, *others))
    nbytes = joined.known[key][0].nbytes(dims) if key in joined.known else None
    if nbytes is None:
        sized = trace_sized(joined.nodes, dims, coordinates, others, joined.same)
        joined.known[key] = sized, _lives(joined, names, sized, stage)
        nbytes = sized.storages.nbytes
    _, trace = joined.known[key]
    parts = {name: _sized(part, dims, conditions) for name, part in trace.parts.items()}
    return replace(trace, parts=parts, nbytes=nbytes)


def _lives(joined: _Joined, names: tuple[str, ...], sized: SizedStorages, stage: StageProgram) -> StageTrace:
    """Without what kernels need for themselves."""
    storages = sized.storages
    inputs: dict[Name, int] = {}
    for (source, i), node in joined.inputs.items():
        info = stage.inputs[i] if source == "input" else None
        if info is not None and info.kind in _PER_MICRO_BATCH:
            (inputs[info.kind, info.fqn],) = storages.of[node]
    lasting = storages.borrowed - set(inputs.values())
    born = set(storages.borrowed)
    reads = {name: _reads(joined, name, storages) for name in names}
    saved = frozenset().union(*(reads[name] for name in names[1:]))
    kinds = _kinds(joined, storages, saved, _finals(joined, names[-1], storages, stage))
    traces = {}
    for name in names:
        steps = _steps(joined.calls[name], storages, kinds, born)
        made = {s for step in steps for s, _ in step.births}
        results = tuple(next(iter(storages.of[n]), None) for n in joined.results[name])
        traces[name] = PartTrace(steps, frozenset(reads[name] - made - lasting), frozenset(made), results)
    return StageTrace(traces, storages.nbytes, lasting, inputs, sized.differ)


def _sized(part: PartTrace, dims: Mapping[sympy.Symbol, int], conditions: Conditions) -> PartTrace:
    """With what kernels need for themselves at these sizes."""
    found = (workspace_bytes(step.node, dims, conditions) for step in part.steps)
    steps = (step._replace(workspace_bytes=n) if n else step for step, n in zip(part.steps, found, strict=True))
    return replace(part, steps=tuple(steps))


@functools.lru_cache(maxsize=32)  # a search asks for the same few stages, at several sizes
def _joined(
    names: tuple[str, ...], graphs: tuple[fx.Graph, ...], sources: tuple[Any, ...], sent: int, again: bool
) -> _Joined:
    """The parts that one micro-batch runs, which are not to be changed; `sent`: results of the backward that
    are no gradients of parameters.
    """
    joined = _Joined()
    for name, part in zip(names, map(Part, graphs, sources), strict=True):
        part = _apart(part) if name in _HALVES else part
        keep = tuple(range(sent)) if name == "backward" else ()
        joined.add(name, accumulating(part, keep) if again and name == names[-1] else part)
    return joined


def _reads(joined: _Joined, name: str, storages: Storages) -> set[int]:
    """Storages that a part reads or hands on."""
    reads = {s for node in joined.calls[name] for o in node.all_input_nodes for s in storages.of[o]}
    return reads | {s for node in joined.results[name] for s in storages.of[node]}


def _kinds(joined: _Joined, storages: Storages, saved: frozenset[int], finals: set[int]) -> dict[int, str]:
    """What each storage is for, by the node that makes it."""
    kinds = dict.fromkeys(finals, "result")
    for calls in joined.calls.values():
        for node in calls:
            for storage in storages.of[node]:
                kinds.setdefault(storage, kind_of(node, storage in saved))
    return kinds


def _apart(part: Part) -> Part:
    """Half of a backward: it writes over nothing, as the other half may read it (`fxpar.runtime.runner`)."""
    copy = copy_graph(part.graph)
    functional(copy)
    return Part(copy, part.sources)


def accumulating(part: Part, keep: tuple[int, ...] = ()) -> Part:
    """The part that adds its results, but those at `keep`, to earlier ones."""
    graph = accumulating_graph(part.graph, keep)
    more = len(graph.find_nodes(op="placeholder")) - len(part.sources)
    return Part(graph, (*part.sources, *(("accumulator", i) for i in range(more))))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)  # a search asks for the same few graphs, at several sizes
def accumulating_graph(graph: fx.Graph, keep: tuple[int, ...] = ()) -> fx.Graph:
    """A copy of the graph that adds its results, but those at `keep`, to earlier ones; not to be changed."""
    copy = copy_graph(graph)
    accumulate(copy, keep)
    return copy


def _finals(joined: _Joined, last: str, storages: Storages, stage: StageProgram) -> set[int]:
    """Storages of gradients of parameters."""
    sent = len(stage.given("sent_grad")) if last == "backward" else 0
    return {s for node in joined.results[last][sent:] for s in storages.of[node]}


def _steps(
    calls: list[fx.Node],
    storages: Storages,
    kinds: Mapping[int, str],
    born: set[int],
) -> tuple[StorageStep, ...]:
    """Births and deaths in one part; `born` grows."""
    last: dict[int, int] = {}
    births: list[list[tuple[int, str]]] = []
    for i, node in enumerate(calls):
        made = [s for s in storages.of[node] if s not in born]
        born.update(made)
        births.append([(s, kinds[s]) for s in made])
        # A collective reads its operand until it is waited for, which is in the same part.
        pending = [o for c in node.all_input_nodes if collective_kind(c) for o in c.all_input_nodes]
        for value in (node, *node.all_input_nodes, *pending):
            last.update(dict.fromkeys(storages.of[value], i))
    deaths: dict[int, list[int]] = {}
    for storage, i in last.items():
        deaths.setdefault(i, []).append(storage)
    return tuple(StorageStep(node, tuple(births[i]), tuple(deaths.get(i, ()))) for i, node in enumerate(calls))
