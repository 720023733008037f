"""The summary of `fxpar explain`: a strategy as a whole, from the lowered graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fxpar.explain.document import Document, decided_by, noted
from fxpar.explain.experts import experts_document
from fxpar.explain.rules import rules_document
from fxpar.explain.traffic import SENDS, CollectiveTraffic, by_module
from fxpar.graph_diff.digest import BETWEEN_STAGES
from fxpar.ir.axes import RING, STAGES, USES
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import starred
from fxpar.ir.graph import run_dims, run_sizes
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import is_on_host, local_tensor
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.ir.sent import sent
from fxpar.ir.strategy import Strategy


def summary_document(program: Program, found: Sequence[CollectiveTraffic]) -> Document:
    """Its axes, its parameters, and what its modules (and of a pipeline its stages) send."""
    strategy = program.strategy
    params, sent_on = _params(program, found), _messages(program).values()
    return {
        "kind": "summary",
        "axes": _axes_document(program, params),
        "params": params,
        "weight_bytes": _weight_bytes(program),
        "modules": _modules(program, found),
        "padded": run_sizes(program),
        "collectives": len(found),
        "sent": sent(program).to_json(),
        **({"host_bytes": moved} if (moved := _host_bytes(program)) else {}),
        **({"messages": sum(map(len, sent_on)), "message_bytes": sum(map(sum, sent_on))} if sent_on else {}),
        "overrides": [
            {"glob": glob, "placement": placement, "params": sum(p["count"] for p in params if p["override"] == glob)}
            for glob, placement in strategy.overrides
        ],
        **experts_document(program, found),
        **rules_document(program, found),
        **noted(program.notes),
    }


def _host_bytes(program: Program) -> int:
    """What a rank copies to its host for a micro-batch, and back; of a pipeline the one that copies most."""
    by_mesh: dict[Mesh, int] = defaultdict(int)
    for placed in program.placed:
        calls = (n for part in placed.parts.values() for n in part.graph.nodes if n.op == "call_function")
        for value in map(local_tensor, filter(is_on_host, calls)):
            by_mesh[placed.mesh] += value.numel(run_dims(program)) * value.dtype.itemsize
    return max(by_mesh.values(), default=0)


def _axes_document(program: Program, params: Sequence[Document]) -> list[Document]:
    """What each axis is for; of stages that differ, what each axis of each stage is for."""
    strategy = program.strategy
    rows: list[Document] = [{"axis": a, "degree": d, "does": _does(strategy, a, params)} for a, d in strategy.axes]
    for index, stage in enumerate(strategy.by_stage):
        mine = [row for row in params if index in row["stages"]]
        rows += [{"stage": index, "axis": a, "degree": d, "does": _does(stage, a, mine)} for a, d in stage.axes]
    return rows


def _modules(program: Program, found: Sequence[CollectiveTraffic]) -> list[Document]:
    """What modules send, and what stages send to each other: first what sends most per micro-batch."""
    rows = by_module(found)
    for what, messages in _messages(program).items():
        size = sum(messages)
        sends = [{"kind": "send", "axis": STAGES, "calls": len(messages)}]
        row = {"module": BETWEEN_STAGES, "what": what, "calls": len(messages)}
        row |= zip(SENDS, (size, 0), strict=True)
        rows += [{**row, "collectives": sends}] if messages else []
    return sorted(rows, key=lambda row: [-row[name] for name in SENDS])


def _messages(program: Program) -> dict[str, list[int]]:
    """Bytes of the messages between pipeline stages, by what they carry."""
    if not isinstance(program, PipelineGraph):
        return {}
    dims = run_dims(program)
    return {
        what: [each.bytes_of_busiest(dims) for each in program.handovers if each.kind == kind]
        for kind, what in (("sent", "activations"), ("sent_grad", "gradients"))
    }


def _params(program: Program, found: Sequence[CollectiveTraffic]) -> list[Document]:
    """Parameters of a kind and placement in one row, with the bytes of the rank that has most of them: of a pipeline
    `stages` are those that have any. Traffic that several cause is shared by their sizes.
    """
    caused = _caused(program, found)
    rows: dict[tuple, Document] = {}
    held: dict[tuple, dict[str, dict[Mesh, float]]] = {}
    seen: set[str] = set()
    for placed in program.placed:
        for info, stored in zip(placed.inputs, placed.stored_inputs, strict=True):
            if info.kind != "param":
                continue
            decided, text = decided_by(placed.strategy, info), stored.dist.describe(stored.meta.shape)
            key = (starred(info.fqn), text, decided.get("glob"))
            first = {"name": key[0], "count": 0, "stored": text, "cut_by": sorted(_axes(stored.dist))}
            over = placed.strategy.data_axes_of(info.fqn) if placed.strategy.zero_of(info.fqn) else ""
            first["work_cut_by"] = sorted(_axes(stored.dist, but=over))
            row = rows.setdefault(key, {**first, "override": key[2]})
            row["count"] += info.fqn not in seen
            seen.add(info.fqn)
            if isinstance(placed, StageProgram):
                row["stages"] = sorted({*row.get("stages", ()), placed.index})
            none: dict[str, dict[Mesh, float]] = {name: defaultdict(float) for name in ("local_bytes", *SENDS)}
            of_rank = held.setdefault(key, none)
            of_rank["local_bytes"][placed.mesh] += stored.local.numel({}) * stored.local.dtype.itemsize
            for name in SENDS:
                of_rank[name][placed.mesh] += caused[placed.mesh].pop((info.fqn, name), 0.0)
    for key, of_rank in held.items():
        rows[key] |= {name: round(max(by_mesh.values())) for name, by_mesh in of_rank.items()}
    return list(rows.values())


def _caused(program: Program, found: Sequence[CollectiveTraffic]) -> dict[Mesh, dict[tuple[str, str], float]]:
    """Bytes that a rank of each mesh sends for each parameter, by which of `SENDS` they are."""
    sizes = {info.fqn: info.meta.numel({}) for info in program.inputs if info.kind == "param"}
    caused: dict[Mesh, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for each in found:
        mesh = program.mesh if each.stage is None else program.placed[each.stage].mesh
        whole = sum(sizes.get(fqn, 0) for fqn in each.params) or 1
        for fqn in each.params:
            if fqn in sizes:
                caused[mesh][fqn, each.sends] += each.wire_bytes * sizes[fqn] / whole
    return caused


def _weight_bytes(program: Program) -> int:
    """The parameters that the fullest rank stores."""
    held: dict[Mesh, int] = defaultdict(int)
    for placed in program.placed:
        for info, stored in zip(placed.inputs, placed.stored_inputs, strict=True):
            if info.kind == "param":
                held[placed.mesh] += stored.local.numel({}) * stored.local.dtype.itemsize
    return max(held.values(), default=0)


def _axes(dist: DistConfig, but: str = "") -> set[str]:
    """The axes of the mesh that cut a tensor; of a sub-axis, the axis. Without the cut over the axes `but` (ZeRO)."""
    cuts = [axis for axis in dist.shard_axes if axis != but]
    return {dist.mesh.part(name).axis for axis in cuts for name in axis.split(".")}


def _does(strategy: Strategy, axis: str, params: Sequence[Document]) -> str:
    """One line on what an axis is for here."""
    count = sum(p["count"] for p in params)
    cut = sum(p["count"] for p in params if axis in p["cut_by"])
    level = f"ZeRO-{strategy.zero}" if strategy.zero == strategy.most_zero else "ZeRO"
    zero = f"; {level} shards {cut} of {count} stored parameters over them" if strategy.most_zero else ""
    match USES[axis]:
        case "replicas":
            return f"data-parallel replicas, each with its own micro-batch; gradients are summed over them{zero}"
        case "stages":
            plan = strategy.pipeline
            each = ", each under a strategy of its own" if strategy.by_stage else ""
            return f"splits the model into {strategy.stages} stages{each}, run with schedule {plan.schedule}"
        case "tokens" if axis in strategy.bin_axes:
            return f"shards the tokens of a micro-batch, packed in {strategy.bins} bins that no document crosses{zero}"
        case "tokens" if axis == RING:
            return f"shards the tokens of a micro-batch, in attention too: keys and values go around{zero}"
        case "tokens":
            return f"shards the tokens of a micro-batch; attention is sharded by heads where they divide evenly{zero}"
        case _:
            sp = "; +sp: tokens are sharded where no weight is involved" if strategy.sp else ""
            work = sum(p["count"] for p in params if axis in p["work_cut_by"])
            return f"shards {work} of {count} parameters and the work on them{sp}"


__all__ = ["summary_document"]
