"""The JSON form of a graph: everything that the text form has, for programs."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.dist_config import DistConfig
from fxpar.exec_graph import ExecGraph
from fxpar.graph import LogicalGraph, TensorMeta
from fxpar.printer import AnyGraph, PrintedPart, parts
from fxpar.serialize import target_name

TIMINGS = ("capture_cpu_s", "annotate_cpu_s", "lower_cpu_s")


def graph_document(graph: AnyGraph, stage: str) -> dict[str, Any]:
    """One dict per graph; sizes are integers or expressions in the dynamic dims, as text."""
    divisors = {} if isinstance(graph, LogicalGraph) else graph.divisors
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
                "divisor": divisors.get(dim.name, 1),
            }
            for dim in graph.dims
        ],
        "inputs": [_input(graph, i) for i in range(len(graph.inputs))],
        "outputs": [{"kind": output.kind, "fqn": output.fqn} for output in graph.outputs],
        "parts": {part.name: [_node(n, part) for n in part.graph.nodes if n.op != "output"] for part in parts(graph)},
        "timings": {**dict.fromkeys(TIMINGS), **graph.timings},
    }
    document["nodes"] = sum(len(nodes) for nodes in document["parts"].values())
    if not isinstance(graph, LogicalGraph):
        strategy = graph.strategy
        document |= strategy.to_json()
        document |= {"world": strategy.world, "mesh": [list(axis) for axis in strategy.mesh.axes]}
        document["notes"] = list(graph.notes)
    if isinstance(graph, ExecGraph):
        document |= _collectives(graph)
        document["passes"] = list(graph.passes)
    return document


def _input(graph: AnyGraph, index: int) -> dict[str, Any]:
    info = graph.inputs[index]
    found: dict[str, Any] = {"kind": info.kind, "fqn": info.fqn, **_meta(info.meta)}
    found |= {"requires_grad": info.requires_grad, "aliases": list(info.aliases)}
    if isinstance(graph, ExecGraph):
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
    found["fqn"] = node.meta.get("fqn") or ""
    found["source"] = node.meta.get("source")
    found["backward"] = bool(node.meta.get("backward"))
    return found


def _collectives(graph: ExecGraph) -> dict[str, Any]:
    dims = {d.symbol: d.example for d in graph.dims}
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
    }


def _meta(meta: TensorMeta) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in meta.shape]
    return {"dtype": str(meta.dtype).removeprefix("torch."), "shape": shape}


def _metas(value: TensorMeta | tuple) -> Any:
    return [_meta(m) if m else None for m in value] if isinstance(value, tuple) else _meta(value)


def _dists(value: DistConfig | tuple) -> Any:
    return [d.to_json() if d else None for d in value] if isinstance(value, tuple) else value.to_json()
