"""The JSON form of a graph: everything that the text form has, for programs."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph, TensorMeta, run_dims
from fxpar.ir.node_meta import fqn_of, is_backward, source_of
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, TeamsGraph
from fxpar.ir.printer import AnyGraph, PrintedPart, matches, parts
from fxpar.ir.sent import sent
from fxpar.ir.serialize import target_name
from fxpar.schedule import Timeline

TIMINGS = ("capture_cpu_s", "annotate_cpu_s", "lower_cpu_s")


def graph_document(
    graph: AnyGraph, stage: str, pipeline_stage: int | None = None, fqn: str | None = None
) -> dict[str, Any]:
    """One dict per graph; sizes are integers or expressions in the dynamic dims, as text. Of a pipeline the document
    has one such dict per stage, or that of `pipeline_stage` alone; of teams one per team ("teams"). With `fqn` nodes of
    modules that match the glob.
    """
    document: dict[str, Any] = {
        "model": graph.name,
        "stage": stage,
        "strategy": None,
        "dims": [
            {
                "name": dim.name,
                "example": dim.example,
                "minimum": dim.minimum,
                "maximum": dim.maximum,
                "divisor": graph.divisors.get(dim.name, 1),
            }
            for dim in graph.dims
        ],
        "inputs": [_input(graph, i) for i in range(len(graph.inputs))],
        "outputs": [{"kind": output.kind, "fqn": output.fqn} for output in graph.outputs],
        "timings": {**dict.fromkeys(TIMINGS), **graph.timings},
    }
    if isinstance(graph, TeamsGraph):
        document["teams"] = [_team(graph, number, stage, pipeline_stage, fqn) for number in range(len(graph.teams))]
        document["nodes"] = sum(team["nodes"] for team in document["teams"])
    elif isinstance(graph, PipelineGraph):
        stages = [s for s in graph.stages if pipeline_stage in (None, s.index)]
        document |= _pipeline(graph)
        document["stages"] = [_stage(graph, s, fqn) for s in stages]
        document["nodes"] = sum(s["nodes"] for s in document["stages"])
    else:
        document["parts"] = {
            p.name: [_node(n, p) for n in p.graph.nodes if n.op != "output" and matches(fqn_of(n), fqn)]
            for p in parts(graph)
        }
        document["nodes"] = sum(len(nodes) for nodes in document["parts"].values())
    if not isinstance(graph, LogicalGraph):
        strategy = graph.strategy
        document |= strategy.to_json()
        document |= {"world": strategy.world, "mesh": [list(axis) for axis in strategy.all_digits]}
        document["notes"] = list(graph.notes)
    if isinstance(graph, TeamsGraph):
        document |= {"collective_counts": graph.collectives(), "collective_bytes": graph.collective_bytes()}
    elif isinstance(graph, Program):
        document |= _collectives(graph)
        document["passes"] = list(graph.passes)
    return document


def _team(graph: TeamsGraph, number: int, stage: str, pipeline_stage: int | None, fqn: str | None) -> dict[str, Any]:
    """One team: a document of its own, and where it runs."""
    ranks = graph.mesh_of(number).ranks
    return {"ranks": [ranks[0], ranks[-1]], **graph_document(graph.teams[number], stage, pipeline_stage, fqn)}


def schedule_document(graph: PipelineGraph, timeline: Timeline) -> dict[str, Any]:
    """When each pipeline rank runs what; `peak_saved` by stage."""
    plan = timeline.schedule
    return {
        "model": graph.name,
        **graph.strategy.to_json(),
        "schedule": plan.kind,
        "micro_batches": plan.micro_batches,
        "makespan_ms": timeline.makespan_ms,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_saved": list(timeline.peak_saved),
        "ranks": [
            [{"action": str(s.action), "start_ms": s.start_ms, "end_ms": s.end_ms} for s in spans]
            for spans in timeline.spans
        ],
    }


def _pipeline(graph: PipelineGraph) -> dict[str, Any]:
    """What concerns all stages."""
    dims = run_dims(graph)
    messages = [
        {
            "from": each.stage,
            "to": each.to,
            "name": each.fqn,
            **_meta(each.given.local),
            "bytes": each.bytes_of_busiest(dims),
        }
        for each in graph.handovers
    ]
    held: dict[str, list[int]] = {}
    for stage in graph.stages:
        for fqn in stage.taken("param"):
            held.setdefault(fqn, []).append(stage.index)
    shared = {fqn: stages for fqn, stages in held.items() if len(stages) > 1}
    return {
        "schedule": graph.strategy.pipeline.schedule,
        "cuts": list(graph.cuts),
        "messages": messages,
        "shared_params": shared,
    }


def _stage(graph: PipelineGraph, stage: StageProgram, fqn: str | None) -> dict[str, Any]:
    """One stage: a document of its own, and where it runs."""
    ranks = stage.mesh.ranks
    where = {"index": stage.index, "ranks": [ranks[0], ranks[-1]], "flops": graph.flops[stage.index]}
    return {**where, **graph_document(stage, "exec", fqn=fqn)}


def _input(graph: AnyGraph, index: int) -> dict[str, Any]:
    info = graph.inputs[index]
    found: dict[str, Any] = {"kind": info.kind, "fqn": info.fqn, **_meta(info.meta)}
    found |= {"requires_grad": info.requires_grad, "aliases": list(info.aliases)}
    if isinstance(graph, Program) and not isinstance(graph, PipelineGraph | TeamsGraph):
        stored = graph.stored_inputs[index]
        found |= {**_meta(stored.meta), "dist": stored.dist.to_json(), "local": _meta(stored.local)}
    return found


def _node(node: fx.Node, part: PrintedPart) -> dict[str, Any]:
    """One node; operands by name, as `%name`."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{part.names[value]}"
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    found: dict[str, Any] = {"name": part.names[node], "op": node.op}
    if node.op == "call_function":
        found |= {"target": target_name(node.target), "args": plain(node.args), "kwargs": plain(node.kwargs)}
    for key, convert in (("tensor", _metas), ("local", _metas), ("dist", _dists), ("dist_in", _dists), ("sym", str)):
        if node.meta.get(key) is not None:
            found[key] = convert(node.meta[key])
    found["fqn"] = fqn_of(node)
    found["source"] = source_of(node)
    found["backward"] = is_backward(node)
    return found


def _collectives(graph: Program) -> dict[str, Any]:
    dims = run_dims(graph)
    mesh = graph.strategy.mesh
    return {
        "collectives": [
            {
                "kind": c.kind,
                "axis": c.axis,
                "part": c.part,
                "fqn": c.fqn,
                "backward": c.backward,
                "fused": c.fused,
                "sent": _meta(c.sent),
                "bytes": round(c.wire_bytes(mesh.degree(c.axis), dims)),
            }
            for c in graph.communications()
        ],
        "collective_counts": graph.collectives(),
        "collective_bytes": graph.collective_bytes(),
        "sent": sent(graph).to_json(),
    }


def _meta(meta: TensorMeta) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in meta.shape]
    return {"dtype": str(meta.dtype).removeprefix("torch."), "shape": shape}


def _metas(value: TensorMeta | tuple) -> Any:
    return [_meta(m) if m else None for m in value] if isinstance(value, tuple) else _meta(value)


def _dists(value: DistConfig | tuple) -> Any:
    return [d.to_json() if d else None for d in value] if isinstance(value, tuple) else value.to_json()
