"""Graphs and node data in the form of Model Explorer (ai-edge-model-explorer), which the extra `viz` installs.

A file is one collection with a graph for each part under each strategy. Beside it stand overlays, one file each: a
number per node, by graph and by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.errors import VizDependencyError
from fxpar.ir.printer import type_of
from fxpar.viz.facts import NodeFacts, PartFacts, program_facts
from fxpar.viz.graph_view import directions
from fxpar.viz.viewed import Viewed

OVERLAYS = {
    "wire_bytes": ("bytes on the wire", lambda node: node.wire.nbytes if node.wire else None),
    "predicted_ms": ("predicted ms", lambda node: node.ms or None),
    "local_bytes": ("bytes per rank", lambda node: node.local_bytes or None),
}
_GRADIENT = [{"stop": 0, "bgColor": "#f4f6fa"}, {"stop": 0.5, "bgColor": "#f5c26b"}, {"stop": 1, "bgColor": "#d9480f"}]
_KIND_COLOURS = {
    "all_gather": "#cfe0fb",
    "reduce_scatter": "#f8dcc0",
    "all_reduce": "#f9d0df",
    "all_to_all": "#c9ece8",
    "shift": "#d5efc9",
}


@dataclass(frozen=True)
class ShownPart:
    """A graph: a part under a strategy, and the numbers of the nodes that are shown of it."""

    id: str
    part: PartFacts
    numbers: list[int]


def graph_collection(name: str, shown: Sequence[ShownPart]) -> dict[str, Any]:
    """A GraphCollection with a graph for each part under each strategy."""
    graphs = [{"id": one.id, "nodes": list(_nodes(one.part, one.numbers))} for one in shown]
    return {"label": name, "graphs": graphs}


def node_data(shown: Sequence[ShownPart]) -> dict[str, dict[str, Any]]:
    """Overlay by name: {graph: {"name", "results": {node: {"value"}}, "gradient"}}; nodes without a value are left
    out, and so are graphs without any.
    """
    found: dict[str, dict[str, Any]] = {}
    for overlay, (title, value) in OVERLAYS.items():
        graphs = {}
        for one in shown:
            values = {one.part.nodes[i].name: value(one.part.nodes[i]) for i in one.numbers}
            results = {name: {"value": number} for name, number in values.items() if number is not None}
            if results:
                graphs[one.id] = {"name": title, "results": results, "gradient": _GRADIENT}
        found[overlay] = graphs
    return found


def shown_parts(views: Iterable[Viewed]) -> list[ShownPart]:
    """The parts under each strategy, such as `dp2.tp2 forward`; under pipeline stages those of each stage."""
    found = []
    for view in views:
        several = len(view.stages) > 1
        for index, program in enumerate(view.stages):
            for part in program_facts(view, program):
                for name, numbers in directions(part).items():
                    full = f"stage{index}.{name}" if several else name
                    found.append(ShownPart(f"{view.strategy} {full}", part, numbers))
    return found


def open_model_explorer(path: str, overlays: Sequence[str]) -> None:
    """Start Model Explorer in a browser with the graphs and their overlays. Raises VizDependencyError."""
    try:
        import model_explorer
    except ImportError:
        raise VizDependencyError("ai-edge-model-explorer", "Windows of Model Explorer") from None
    config = model_explorer.config()
    config.add_model_from_path(path)
    for overlay in overlays:
        config.add_node_data_from_path(overlay)
    model_explorer.visualize_from_config(config)


def _nodes(part: PartFacts, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The part's inputs that are read, what it takes from elsewhere, and its nodes."""
    inside = set(numbers)
    read = dict.fromkeys(o for number in numbers for o in part.nodes[number].operands if o not in inside)
    for operand in read:
        if isinstance(operand, str):
            shape = _pairs({"type": type_of(part.inputs[operand])})
            label, namespace = operand.rpartition(".")[2], operand.rpartition(".")[0].replace(".", "/")
            yield {"id": operand, "label": label, "namespace": namespace, "outputsMetadata": [_output(shape)]}
        else:
            node = part.nodes[operand]
            yield {"id": node.name, "label": f"{node.op} (forward)", "namespace": "from the forward",
                   "outputsMetadata": [_output(_pairs({"type": node.type}))]}  # fmt: skip
    for number in numbers:
        yield _node(part, part.nodes[number])


def _node(part: PartFacts, node: NodeFacts) -> dict[str, Any]:
    sources = [o if isinstance(o, str) else part.nodes[o].name for o in node.operands]
    wire = node.wire
    attributes = {
        "call": node.op + call_text(node.call, sources),
        "module": node.fqn,
        "source": node.source,
        "placement": node.axes,
        "FLOPs": str(node.flops or ""),
        "predicted ms": f"{node.ms:.4g}" if node.ms else "",
        "sends": f"{wire.nbytes} bytes over {wire.axis}" if wire else "",
        "made by": node.why,
    }
    found = {
        "id": node.name,
        "label": node.op,
        "namespace": node.fqn.replace(".", "/"),
        "attrs": _pairs(attributes),
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, source in enumerate(sources)
        ],
        "outputsMetadata": [
            _output(_pairs({"type": node.type, "local": node.local, "bytes per rank": str(node.local_bytes or "")}))
        ],
    }
    return found | ({"style": {"backgroundColor": _KIND_COLOURS[wire.kind]}} if wire else {})


def call_text(call: str, sources: Sequence[str]) -> str:
    """The call with the names of its operands in place of `{}`."""
    pieces = call.split("{}")
    return pieces[0] + "".join(f"%{source}{piece}" for source, piece in zip(sources, pieces[1:], strict=True))


def _output(attributes: list[dict[str, str]]) -> dict[str, Any]:
    return {"id": "0", "attrs": attributes}


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items() if value]
