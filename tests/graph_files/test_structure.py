"""Decoded graphs that are not whole: each is refused, and says what is wrong."""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

import pytest
import sympy
import torch

from fxpar.errors import GraphFormatError
from fxpar.graph_files.codec import Decoder, Encoder
from fxpar.graph_files.structure import fits
from fxpar.ir.exec_graph import Part, collective_kind
from fxpar.ir.graph import AnnotatedGraph, Dim, Input, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from tests.captured import odd


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (1.5, int, False),
        (None, int | None, True),
        ("a", int | None, False),
        ((1, 2), tuple[int, ...], True),
        ((1, "a"), tuple[int, ...], False),
        ([1], tuple[int, ...], False),
        (("a", 1), tuple[str, int], True),
        (("a", 1, 2), tuple[str, int], False),
        ({"a": (1,)}, dict[str, tuple[int, ...]], True),
        ({"a": (1.5,)}, dict[str, tuple[int, ...]], False),
        ({1: (1,)}, dict[str, tuple[int, ...]], False),
        ([1], list[int], True),
        ([1.5], list[int], False),
        ("x", Literal["x", "y"], True),
        (["x"], Literal["x", "y"], False),
        (object(), Any, True),
        (sympy.Symbol("T"), int | sympy.Expr, True),
    ],
)
def test_types_of_fields(value, hint, expected):
    assert fits(value, hint) is expected


def again(value):
    """What a file of the value would give."""
    encoder = Encoder()
    root = encoder.encode(value)
    return Decoder(encoder.pool, encoder.tensors).decode(root)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Mesh((("dp", 0),)), "no axes of a mesh"),
        (Mesh((("dp", 2**21),)), "no axes of a mesh of at most 1,048,576 ranks"),
        (Mesh((("dp", 2), ("dp", 2))), "no axes of a mesh"),
        (Strategy((("xx", 2),)), "unknown axis 'xx'"),
        (Strategy((("dp", 2),), zero=7), "zero7"),
        (Dim("T", 0), "does not allow its own example"),
        (Dim("T", 9, maximum=8), "does not allow its own example"),
        (TensorMeta((2, -1), torch.float32), "negative size"),
        (Input("parameter", "x", TensorMeta((2,), torch.float32)), "Input.kind cannot be of class str"),
        (Input("param", 3, TensorMeta((2,), torch.float32)), "Input.fqn cannot be of class int"),
    ],
)
def test_values(value, message):
    with pytest.raises(GraphFormatError, match=re.escape(message)):
        again(value)


@pytest.fixture
def program():
    return lower(odd("shared").graph, "dp2+zero3")


def refused(value, message):
    with pytest.raises(GraphFormatError, match=re.escape(message)):
        again(value)


def test_parts(program):
    again(program)
    part = program.body
    program.body = Part(part.graph, part.sources[:-1])
    refused(program, "placeholders for")
    program.body = Part(part.graph, (("input", 999), *part.sources[1:]))
    refused(program, "a part reads result 999 of 'input', which is not there")
    program.body = Part(part.graph, (("later", 0), *part.sources[1:]))
    refused(program, "Part.sources cannot be of class tuple")
    program.body = Part(part.graph, (*part.sources[1:], part.sources[0]))
    refused(program, "and what it is given")
    program.body = part
    program.stored_inputs = program.stored_inputs[1:]
    refused(program, "does not say of each input")


def test_divisors(program):
    program.divisors = {"T": 0}
    refused(program, "cannot be padded to multiples of [0]")


def test_axes(program):
    nodes = (node for part in program.parts.values() for node in part.graph.nodes)
    node = next(node for node in nodes if any(str(a).startswith("@") for a in node.args))
    for axis in ("cp", "dp:(1)7", "cp:(1)1", "dp.cp"):
        node.args = tuple(f"@{axis}" if str(a).startswith("@") else a for a in node.args)
        refused(program, f"names '{axis}', which is not an axis of ('dp',)")


def test_a_collective_says_what_it_sends(program):
    """Found by the fuzz of files: tables and figures read it."""
    node = next(n for part in program.parts.values() for n in part.graph.nodes if collective_kind(n) is not None)
    del node.meta["comm"]
    refused(program, f"%{node.name} is a collective that does not say on which axis")


def test_nothing_is_written_to_an_input(program):
    body = program.body.graph
    given = {
        place
        for place, (source, _) in zip(body.find_nodes(op="placeholder"), program.body.sources, strict=True)
        if source == "input"
    }
    aten = torch.ops.aten
    view = next(n for n in body.nodes if n.args and n.args[0] in given and n.target not in (aten.sym_size.int,))
    with body.inserting_before(view):
        same = body.call_function(aten.alias.default, (view.args[0],))
        over = body.call_function(aten.mul_.Tensor, (same, 2.0))
        same.meta = dict(view.args[0].meta)
        over.meta = dict(view.args[0].meta)
    refused(program, f"%{over.name} (aten.mul_.Tensor) writes to an input of the graph")


def test_ends(program):
    graph = odd("shared").graph
    annotated = AnnotatedGraph(
        copy.deepcopy(graph.gm.graph), graph.inputs[1:], graph.outputs, graph.dims, Strategy((("dp", 1),))
    )
    refused(annotated, "placeholders for")
    annotated.inputs, annotated.outputs = graph.inputs, graph.outputs[1:]
    refused(annotated, "results for")
    annotated.inputs, annotated.outputs = (graph.inputs[1], graph.inputs[0], *graph.inputs[2:]), graph.outputs
    refused(annotated, "and what it is given")


def test_metadata_of_nodes(program):
    node = next(n for n in program.body.graph.nodes if n.op == "call_function")
    kept = dict(node.meta)
    for key, value, message in (
        ("fqn", 3, "the metadata 'fqn'"),
        ("backward", "yes", "the metadata 'backward'"),
        ("comm", ("dp",), "the metadata 'comm'"),
        ("tensor", "x", "the metadata 'tensor'"),
    ):
        node.meta = {**kept, key: value}
        refused(program, message)
    node.meta = {"fqn": ""}
    refused(program, "has neither a shape nor a size")
