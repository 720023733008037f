"""The DOT form of a graph, for Graphviz: modules as nested boxes, collectives coloured by kind."""

from __future__ import annotations

import json
from collections.abc import Iterator

from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import AnyGraph, PrintedPart, matches, op_name, parts, type_of

COLOURS = {
    "all_gather": "#7fb3d5",
    "reduce_scatter": "#f0b27a",
    "all_reduce": "#e6a0a0",
    "all_to_all": "#b9a3d6",
    "shift": "#9fcf9f",
}


def graph_dot(graph: AnyGraph, *, stage: int | None = None, fqn: str | None = None) -> str:
    """A digraph with a cluster per part and module; with `fqn` only modules that match the glob."""
    shown = [graph]
    if isinstance(graph, PipelineGraph):
        shown = [each for each in graph.stages if stage in (None, each.index)]
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB; compound=true;"]
    lines += ['  node [shape=box, style=filled, fillcolor="white", fontname="monospace", fontsize=10];']
    for number, each in enumerate(shown):
        for part in parts(each):
            title = part.name if len(shown) == 1 else f"stage {getattr(each, 'index', number)}: {part.name}"
            lines += _part(part, f"{number}.{part.name}", title, fqn)
    return "\n".join([*lines, "}"]) + "\n"


def _part(part: PrintedPart, key: str, title: str, fqn: str | None) -> Iterator[str]:
    """The cluster of one fx graph, then its edges."""
    kept = [n for n in part.graph.nodes if n.op != "output" and _is_kept(n, fqn)]
    yield f"  subgraph {_quoted(f'cluster {key}')} {{ label={_quoted(title)};"
    yield from _modules(kept, part, key, "", 2)
    yield "  }"
    inside = set(kept)
    for node in kept:
        for source in node.all_input_nodes:
            if source in inside:
                yield f"  {_id(key, part, source)} -> {_id(key, part, node)};"


def _is_kept(node: fx.Node, fqn: str | None) -> bool:
    return bool(node.users) and fqn is None if node.op == "placeholder" else matches(fqn_of(node), fqn)


def _modules(nodes: list[fx.Node], part: PrintedPart, key: str, inside: str, depth: int) -> Iterator[str]:
    """The nodes of the module `inside`: its own ones, then a cluster per child."""
    pad = "  " * depth
    children: dict[str, list[fx.Node]] = {}
    for node in nodes:
        where = "" if node.op == "placeholder" else fqn_of(node)
        rest = where[len(inside) :].lstrip(".")
        if not rest:
            label = f"%{part.names[node]} = {op_name(node) if node.op == 'call_function' else 'input'}\n{type_of(node)}"
            kind = collective_kind(node)
            colour = f", fillcolor={_quoted(COLOURS[kind])}" if kind else ""
            yield f"{pad}{_id(key, part, node)} [label={_quoted(label)}{colour}];"
        else:
            children.setdefault(rest.partition(".")[0], []).append(node)
    for child, members in children.items():
        name = f"{inside}.{child}" if inside else child
        yield f"{pad}subgraph {_quoted(f'cluster {key} {name}')} {{ label={_quoted(name)};"
        yield from _modules(members, part, key, name, depth + 1)
        yield f"{pad}}}"


def _id(key: str, part: PrintedPart, node: fx.Node) -> str:
    return _quoted(f"{key} {part.names[node]}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
