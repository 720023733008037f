"""The data of the graph tab: everything that a program does is there once, and layers share what is alike."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.cost.device import GPU
from fxpar.cost.polynomial import Sequences
from fxpar.ir.graph import Dim, dim_symbol
from fxpar.ir.printer import parts
from fxpar.viz.facts import program_facts
from fxpar.viz.graph_view import graph_section
from fxpar.viz.inside import Inside
from tests.viz.shown import STRATEGIES, tall, viewed


@pytest.fixture(scope="module")
def section():
    return graph_section([viewed(strategy) for strategy in STRATEGIES])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_of_the_roots_are_those_of_the_program(section, strategy):
    program = viewed(strategy).graph
    shown = section["by_strategy"][strategy]
    sums = [section["tables"]["sums"][part["modules"][0][3]] for part in shown["parts"]]
    calls = Counter()
    for kind, _, count, _, _ in (wire for one in sums for wire in one["wires"]):
        calls[kind] += count
    assert calls == Counter({k: n for k, n in program.collectives().items() if k != "send"})
    dims = viewed(strategy).dims()
    mesh = program.strategy.mesh
    sent = sum(round(c.wire_bytes(mesh.degree(c.axis), dims)) for c in program.communications())
    assert sum(wire[3] for one in sums for wire in one["wires"]) == sent


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_node_is_drawn_once(section, strategy):
    shown = section["by_strategy"][strategy]
    strings, rows = section["tables"]["strings"], section["tables"]["rows"]
    drawings = section["tables"]["drawings"]
    for number, graph in enumerate(shown["graphs"]):
        drawn = Counter()
        for part in (part for part in shown["parts"] if part["graph"] == number):
            for _, first, drawing, _ in part["modules"]:
                drawn.update(nodes_of(drawings, drawing, first))
        wanted = [i for i, row in enumerate(graph["rows"]) if strings[rows[row][2]] != "int"]
        assert drawn == Counter(wanted)


def nodes_of(drawings: list, number: int, first: int) -> list[int]:
    found = []
    for kind, *rest in drawings[number]["items"]:
        if kind == "n":
            found.append(first + rest[0])
        elif kind == "r":
            found += nodes_of(drawings, rest[1], first + rest[3])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_say_what_the_printed_form_says(strategy):
    view = viewed(strategy)
    for program in view.stages:
        printed = parts(program)
        for facts, part in zip(program_facts(view, program), printed, strict=True):
            calls = [node for node in part.graph.nodes if node.op == "call_function"]
            assert [fact.name for fact in facts.nodes] == [part.names[node] for node in calls]
            for fact, node in zip(facts.nodes, calls, strict=True):
                names = [o if isinstance(o, str) else facts.nodes[o].name for o in fact.operands]
                assert Counter(names) >= Counter(part.names[o] for o in node.all_input_nodes)
                assert fact.call.count("{}") == len(fact.operands)


def test_parts_and_stages(section):
    ids = {s: [part["id"] for part in section["by_strategy"][s]["parts"]] for s in STRATEGIES}
    assert ids["dp2.tp2+sp"] == ["forward", "backward", "epilogue"]
    assert ids["tp2+zero3"][0] in ("prologue", "forward")
    assert ids["pp2.tp2"] == ["stage0.forward", "stage0.backward", "stage1.forward", "stage1.backward"]
    (first,) = [part for part in section["by_strategy"]["pp2.tp2"]["parts"] if part["id"] == "stage0.forward"]
    items = section["tables"]["drawings"][first["modules"][0][2]]["items"]
    assert [item[1].endswith("to the next stage") for item in items if item[0] == "o"] == [True]


def test_edges_carry_bytes_and_the_collective_that_a_value_comes_out_of(section):
    drawings = section["tables"]["drawings"]
    moved = [edge[4] for drawing in drawings for edge in drawing["edges"] if edge[4]]
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= {wire[0] for wire in moved}
    assert all(sent > 0 and ms > 0 for _, sent, ms in moved)
    assert any(edge[1] > 0 for drawing in drawings for edge in drawing["edges"])


def test_a_layer_more_costs_little():
    sections = {layers: graph_section([tall(layers)]) for layers in (4, 8, 32)}
    tables = {layers: {name: len(rows) for name, rows in one["tables"].items()} for layers, one in sections.items()}
    assert tables[32]["rows"] - tables[8]["rows"] <= 2 * 24  # but for its places in the buckets of the epilogue
    assert tables[32]["sums"] - tables[8]["sums"] <= 24
    sizes = {layers: len(json.dumps(one, separators=(",", ":"))) for layers, one in sections.items()}
    assert (sizes[32] - sizes[8]) / 24 < sizes[4] / 10


def test_times_of_the_body_are_those_of_a_micro_batch():
    """Two rows that are fixed in the graph, whose costs are those of both; both pictures agree."""
    slow = replace(usual_cluster(4), device=replace(GPU, tflops=1e-3))  # arithmetic outweighs all else
    view = replace(viewed("dp2.tp2+sp"), graph=viewed("dp2.tp2+sp").stored, sizes={"T": 4096}, cluster=slow)
    inside = Inside(view.graph, slow)
    assert view.sequences == Sequences((4096,), 2)
    (body,) = [part for part in program_facts(view, view.graph) if part.name == "body"]
    found = inside.node_ms(0, "body", view.sequences.lengths)
    assert sum(node.ms for node in body.nodes) == pytest.approx(sum(found.values()))
    largest = max(body.nodes, key=lambda node: node.flops)
    computing_ms = largest.flops / (1e-3 * 1e9)
    assert computing_ms < largest.ms < 1.01 * computing_ms


def test_rows_that_the_costs_count_already():
    """Costs are those of the fewest rows that the graph takes: of four rows, two at least, there are two such packs."""
    view = viewed("dp2.tp2+sp")
    shape = (dim_symbol("B"), dim_symbol("T"))
    inputs = tuple(
        replace(info, meta=replace(info.meta, shape=shape)) if info.kind == "batch" else info
        for info in view.graph.inputs
    )
    graph = replace(view.graph, inputs=inputs, dims=(*view.graph.dims, Dim("B", 4, minimum=2)))
    view = replace(view, graph=graph, sizes={"T": 4096, "B": 4})
    assert view.sequences == Sequences((4096, 4096), 2)
