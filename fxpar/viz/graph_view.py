"""The graph tab: each part of a program as nested modules that unfold to nodes.

A section is made for repeated layers: texts, rows, lists of operands, drawings and sums that occur again are stored
once, in `tables`, and everything that refers to nodes counts from the place that it stands in. So a layer costs little
more than its first copy.

    tables      strings [text], rows [[op, call, type, local, axes, bytes, flops, ms, source, why, wire]] with strings
                by number and wire null or [kind, axis, bytes, ms, fused], operands [[k | "name"]] where k > 0 is the
                node k before and ".weight" a parameter of the node's own module, drawings [{items, layers, edges}],
                sums [{nodes, flops, ms, wires: [[kind, axis, count, bytes, ms]]}]
    by_strategy graphs  [{name, rows, operands, fqns: [[string, count]], inputs: [[name, type, bytes, kind]], results}]
                parts   [{id, title, about, stage, graph, modules: [[name, first node, drawing, sums]]}]
                params  [[fqn, placed type, local type, local bytes, stage]]

Modules stand parents first. Items of a drawing are ["m", k] (the module k places on), ["r", title, drawing, nodes...],
["n", node], ["i", name], ["o", label, node]; nodes count from the module's first.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import local_meta
from fxpar.ir.pipeline_graph import StageProgram
from fxpar.ir.printer import type_of
from fxpar.viz.facts import NodeFacts, PartFacts, program_facts
from fxpar.viz.modules import Drawing, Module, ModuleItem, draw, module_tree, run_as_module
from fxpar.viz.viewed import Viewed

SHOWN_INPUTS = ("batch", "scale", "seed", "tangent", "received", "received_grad")
SENT = {"forward": ("sent", "to the next stage"), "backward": ("sent_grad", "to the stage before")}
TITLES = {
    "prologue": ("Prologue", "once per mini-batch: stored parameters as the body wants them"),
    "forward": ("Forward", "per micro-batch"),
    "backward": ("Backward", "per micro-batch"),
    "epilogue": ("Epilogue", "once per mini-batch: gradients to where the optimizer wants them"),
}


def graph_section(views: Sequence[Viewed]) -> dict[str, Any]:
    """The section of the page; see the head of this file."""
    tables = Tables()
    by_strategy = {view.strategy: _strategy(view, tables) for view in views}
    return {"tables": tables.to_json(), "by_strategy": by_strategy}


@dataclass
class Interner:
    """Numbers things by value, in the order in which they come."""

    found: dict[Hashable, int] = field(default_factory=dict)
    things: list[Any] = field(default_factory=list)

    def __call__(self, thing: Any) -> int:
        key = thing if isinstance(thing, str) else json.dumps(thing)
        if key not in self.found:
            self.found[key] = len(self.things)
            self.things.append(thing)
        return self.found[key]


@dataclass
class Tables:
    """What several places of a section share."""

    strings: Interner = field(default_factory=Interner)
    rows: Interner = field(default_factory=Interner)
    operands: Interner = field(default_factory=Interner)
    drawings: Interner = field(default_factory=Interner)
    sums: Interner = field(default_factory=Interner)

    def to_json(self) -> dict[str, list[Any]]:
        return {name: table.things for name, table in vars(self).items()}


def _strategy(view: Viewed, tables: Tables) -> dict[str, Any]:
    graphs: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    params: list[list[Any]] = []
    for program in view.stages:
        params += _params(view, program)
        for part in program_facts(view, program):
            shown = _Part(view, program, part, tables)
            for name, numbers in directions(part).items():
                parts.append(shown.encoded(name, numbers, len(graphs)))
            graphs.append(shown.graph())
    return {"graphs": graphs, "parts": parts, "params": params}


def directions(part: PartFacts) -> dict[str, list[int]]:
    """The node numbers of each part to show: a body has a forward and a backward. Integers made of sizes are left out:
    they are many, and say nothing about the model.
    """
    found: dict[str, list[int]] = {"forward": [], "backward": []} if part.name == "body" else {part.name: []}
    for number, node in enumerate(part.nodes):
        if node.type != "int":
            found[("backward" if node.backward else "forward") if part.name == "body" else part.name].append(number)
    return {name: numbers for name, numbers in found.items() if numbers}


def _params(view: Viewed, program: Program) -> list[list[Any]]:
    """How each parameter is stored on the ranks of the program."""
    dims = view.dims()
    stage = stage_of(program)
    rows = []
    for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
        if info.kind == "param":
            nbytes = stored.local.numel(dims) * stored.local.dtype.itemsize
            rows.append([info.fqn, stored.dist.describe(stored.meta.shape), str(stored.local), nbytes, stage])
    return rows


def stage_of(program: Program) -> int | None:
    """The number of a pipeline stage; None for a whole model."""
    return program.index if isinstance(program, StageProgram) else None


@dataclass
class _Part:
    """One graph of a program on its way into the section."""

    view: Viewed
    program: Program
    part: PartFacts
    tables: Tables

    def __post_init__(self) -> None:
        self.kinds = {info.fqn: info.kind for info in self.program.inputs}
        self.inputs = {name: node for name, node in self.part.inputs.items() if self.kinds.get(name) in SHOWN_INPUTS}
        self.sizes = {name: value_bytes(node, self.view) for name, node in self.part.inputs.items()}

    def graph(self) -> dict[str, Any]:
        """All nodes in order."""
        strings = self.tables.strings
        nodes = self.part.nodes
        return {
            "name": self.part.name,
            "rows": [self.tables.rows(self._row(node)) for node in nodes],
            "operands": [self.tables.operands(self._operands(i, node)) for i, node in enumerate(nodes)],
            "fqns": [[strings(fqn), len(list(run))] for fqn, run in groupby(node.fqn for node in nodes)],
            "inputs": [[name, type_of(node), self.sizes[name], self.kinds[name]] for name, node in self.inputs.items()],
            "results": [result for result in self.part.results if isinstance(result, int)],
        }

    def encoded(self, name: str, numbers: Sequence[int], graph: int) -> dict[str, Any]:
        """Some of the nodes as a tree of modules."""
        tree = module_tree({number: self.part.nodes[number].fqn for number in numbers})
        self._add_ends(tree, name)
        modules = list(tree.walk())
        place = {id(module): i for i, module in enumerate(modules)}
        title, about = TITLES.get(name, (name, ""))
        stage = stage_of(self.program)
        return {
            "id": name if stage is None else f"stage{stage}.{name}",
            "title": title,
            "about": about,
            "stage": stage,
            "graph": graph,
            "modules": [
                [m.name, m.nodes[0] if m.nodes else 0, self._drawing(m, place), self.tables.sums(self.sums(m.nodes))]
                for m in modules
            ],
        }

    def sums(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Nodes, FLOPs, predicted time and traffic of some nodes, per run of the part."""
        nodes = [self.part.nodes[number] for number in numbers]
        wires: dict[tuple[str, str], list[float]] = {}
        for wire in (node.wire for node in nodes if node.wire):
            row = wires.setdefault((wire.kind, wire.axis), [0, 0, 0.0])
            row[0] += 1
            row[1] += wire.nbytes
            row[2] += wire.ms
        return {
            "nodes": len(nodes),
            "flops": sum(node.flops for node in nodes),
            "ms": rounded(sum(node.ms for node in nodes)),
            "wires": [[kind, axis, row[0], row[1], rounded(row[2])] for (kind, axis), row in sorted(wires.items())],
        }

    def _add_ends(self, tree: Module, name: str) -> None:
        """Inputs and messages as items of the root."""
        read = {value for number in tree.nodes for value in self.part.nodes[number].operands}
        tree.items[:0] = [ModuleItem("input", (), label=name) for name in self.inputs if name in read]
        if name in SENT and isinstance(self.program, StageProgram):
            kind, label = SENT[name]
            for fqn, made in zip(self.program.given(kind), self.part.results, strict=False):
                if isinstance(made, int):
                    tree.items.append(ModuleItem("output", (made,), label=f"{fqn} {label}"))

    def _row(self, node: NodeFacts) -> list[Any]:
        texts = (node.op, node.call, node.type, node.local, node.axes)
        wire = node.wire
        moved = [wire.kind, wire.axis, wire.nbytes, rounded(wire.ms), wire.fused] if wire else None
        counts = [node.local_bytes, node.flops, rounded(node.ms)]
        rest = [self.tables.strings(text) for text in (node.source, node.why)]
        return [*(self.tables.strings(text) for text in texts), *counts, *rest, moved]

    def _operands(self, number: int, node: NodeFacts) -> list[int | str]:
        own = f"{node.fqn}."
        return [
            number - o if isinstance(o, int) else f".{o[len(own) :]}" if node.fqn and o.startswith(own) else o
            for o in node.operands
        ]

    def _drawing(self, module: Module, place: Mapping[int, int]) -> int:
        base = module.nodes[0] if module.nodes else 0
        items: list[list[Any]] = []
        for item in module.items:
            if item.module is not None:
                items.append(["m", place[id(item.module)] - place[id(module)]])
            elif item.kind == "run":
                inner = self._drawing(run_as_module(item), {})
                sums = self.tables.sums(self.sums(item.nodes))
                items.append(["r", self.run_title(item.nodes), inner, sums, item.nodes[0] - base])
            elif item.kind == "node":
                items.append(["n", item.nodes[0] - base])
            elif item.kind == "input":
                items.append(["i", item.label])
            else:
                items.append(["o", item.label, item.nodes[0] - base])
        drawing = draw(module, lambda number: self.part.nodes[number].operands)
        return self.tables.drawings(self._with_edges(items, drawing))

    def _with_edges(self, items: list[list[Any]], drawing: Drawing) -> dict[str, Any]:
        edges = []
        for edge in drawing.edges:
            wires = [wire for value in edge.values if (wire := self.arrived_by(value)) is not None]
            moved = None
            if wires:
                kind = max(wires, key=lambda wire: wire.nbytes).kind
                moved = [kind, sum(w.nbytes for w in wires), rounded(sum(w.ms for w in wires))]
            first = edge.values[0]
            text = self.part.nodes[first].type if isinstance(first, int) else type_of(self.part.inputs[first])
            row = [list(edge.path), sum(map(self._bytes, edge.values)), len(edge.values), self.tables.strings(text)]
            edges.append([*row, moved, 1] if edge.back else [*row, moved])
        return {"items": items, "layers": [list(layer) for layer in drawing.layers], "edges": edges}

    def _bytes(self, value: int | str) -> int:
        return self.sizes[value] if isinstance(value, str) else self.part.nodes[value].local_bytes

    def arrived_by(self, value: int | str) -> Any:
        """The collective that a value comes straight out of."""
        while isinstance(value, int):
            node = self.part.nodes[value]
            if node.wire is not None or node.op not in ("wait", "getitem"):
                return node.wire
            value = node.operands[0]
        return None

    def run_title(self, numbers: Sequence[int]) -> str:
        """What a run of nodes is for: its most expensive op that computes, else its first that communicates."""
        nodes = [self.part.nodes[number] for number in numbers]
        best = max(nodes, key=lambda node: (node.flops, node.ms if node.wire is None else 0))
        moving = next((node for node in nodes if node.wire), best)
        return best.op if best.flops or (best.ms and best.wire is None) else moving.op


def value_bytes(node: Any, view: Viewed) -> int:
    """Bytes of an input on one rank; 0 for an integer."""
    local = local_meta(node)
    return local.numel(view.dims()) * local.dtype.itemsize if isinstance(local, TensorMeta) else 0


def rounded(value: float) -> float:
    """Four digits: more would only make the page longer."""
    return float(f"{value:.4g}")
