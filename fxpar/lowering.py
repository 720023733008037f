"""`lower(logical, strategy)`: the ladder of passes from a logical graph to an `ExecGraph`, readable as one list."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar.annotate import annotate
from fxpar.dist_config import DistConfig
from fxpar.exec_graph import ExecGraph, Part, Source, Stored, collective_kind
from fxpar.graph import AnnotatedGraph, LogicalGraph
from fxpar.pass_base import GraphPass
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.casts import Casts
from fxpar.passes.cleanup import Cleanup
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.insert_reshards import InsertReshards
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.mask_padding import MaskPadding
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.reshard_to_collectives import ReshardToCollectives
from fxpar.passes.reuse_buffers import ReuseBuffers
from fxpar.passes.sink_waits import SinkWaits
from fxpar.passes.zero_shard import ZeroShard
from fxpar.strategy import Strategy
from fxpar.verify import verify, verify_placements

OnPass = Callable[[str, AnnotatedGraph], None]
PHASES = ("prologue", "body", "epilogue")


def default_passes(storage: torch.dtype | None = None) -> list[GraphPass]:
    """The ladder, in order."""
    return [
        InsertReshards(),
        ZeroShard(),
        Casts(storage),
        ReduceGradients(),
        ReshardToCollectives(),
        MaskPadding(),
        Cleanup(),
        GlobalToLocal(),
        LowerCollectives(),
        BucketCollectives(),
        ReuseBuffers(),
        SinkWaits(),
    ]


def lower(
    logical: LogicalGraph,
    strategy: Strategy | str,
    *,
    storage: torch.dtype | None = None,
    passes: list[GraphPass] | None = None,
    on_pass: OnPass | None = None,
) -> ExecGraph:
    """Annotate and lower `logical` for `strategy`; no process group, no device, no weights.

    `storage` is the dtype in which parameters are kept (masters); by default the one the model was captured in.
    `on_pass` is called with each pass' name and the graph after it (dumps). The graph is verified before the first
    and after every pass.

    Raises StrategySyntaxError, NotYetError, OverrideError; VerifyError for a bug in a pass.
    """
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    graph = annotate(logical, strategy)
    started = time.process_time()
    verify(graph, "annotate")
    verify_placements(graph, "annotate", resharded=False)
    if on_pass:
        on_pass("annotate", graph)
    report = []
    for step in default_passes(storage) if passes is None else passes:
        begun = time.process_time()
        step(graph)
        verify(graph, step.name)
        if isinstance(step, InsertReshards):
            verify_placements(graph, step.name, resharded=True)
        report.append(_report(step.name, graph, time.process_time() - begun))
        if on_pass:
            on_pass(step.name, graph)
    result = split_phases(graph)
    result.timings["lower_cpu_s"] = time.process_time() - started
    result.passes = tuple(report)
    return result


def _report(name: str, graph: AnnotatedGraph, cpu_s: float) -> dict[str, Any]:
    kinds = Counter(kind for node in graph.graph.nodes if (kind := collective_kind(node)))
    return {"name": name, "cpu_s": cpu_s, "nodes": len(graph.graph.nodes), "collectives": dict(kinds)}


def split_phases(graph: AnnotatedGraph) -> ExecGraph:
    """Cut the lowered graph in prologue, body and epilogue; what a part needs of an earlier one is a result of that."""
    phase = {n: n.meta.get("phase", "body") for n in graph.graph.nodes if n.op == "call_function"}
    needed: dict[str, dict[fx.Node, None]] = {name: {} for name in PHASES}
    for node, name in phase.items():
        for operand in node.all_input_nodes:
            if operand.op == "call_function" and phase[operand] != name:
                needed[phase[operand]][operand] = None
    position = {node: i for i, node in enumerate(graph.placeholders)}
    finals = graph.results
    slots: dict[str, dict[fx.Node, int]] = {}
    parts: dict[str, Part] = {}
    for name in PHASES:
        if name == "epilogue":
            results = list(finals)
        else:
            later = [n for n in finals if name == "body" and phase.get(n) == "body"]
            results = list(dict.fromkeys([*needed[name], *later]))
        members = [n for n, p in phase.items() if p == name]
        parts[name] = _part(members, results, position, slots)
        slots[name] = {node: i for i, node in enumerate(results)}
    return ExecGraph(
        strategy=graph.strategy,
        inputs=graph.inputs,
        outputs=graph.outputs,
        stored_inputs=tuple(Stored(n.meta["tensor"], n.meta["dist"]) for n in graph.placeholders),
        stored_outputs=tuple(_stored(n) for n in finals),
        dims=graph.dims,
        divisors=graph.divisors,
        padding_hazard=graph.padding_hazard,
        prologue=parts["prologue"],
        body=parts["body"],
        epilogue=parts["epilogue"],
        name=graph.name,
        constants=graph.constants,
        notes=tuple(graph.notes),
        timings=graph.timings,
    )


def _stored(node: fx.Node) -> Stored:
    dist: DistConfig = node.meta["dist"]
    return Stored(node.meta["tensor"], dist)


def _part(
    members: list[fx.Node], results: list[fx.Node], position: dict[fx.Node, int], slots: dict[str, dict[fx.Node, int]]
) -> Part:
    """A graph of the member nodes; operands from elsewhere become placeholders, in the order of first use."""
    inside = set(members)
    outside = dict.fromkeys(o for n in members for o in n.all_input_nodes if o not in inside)
    outside |= dict.fromkeys(r for r in results if r not in inside)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    sources: list[Source] = []
    for node in outside:
        place = graph.placeholder(node.name)
        place.meta = dict(node.meta)
        copied[node] = place
        if node in position:
            sources.append(("input", position[node]))
        else:
            part = next(p for p, slot in slots.items() if node in slot)
            sources.append((part, slots[part][node]))  # type: ignore[arg-type]
    for node in members:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[r] for r in results))
    return Part(graph, tuple(sources))
