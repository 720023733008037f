"""Programs of which a period of layers is left out against those of models that have one less."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.strategy import Strategy
from fxpar.lowering import LowerAlike, default_passes
from fxpar.models import load
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.search.chosen import lowering
from fxpar.search.deepened import deepened
from fxpar.search.price import Depth, candidate
from fxpar.search.shortened import LowerShort, is_same_program, layers_alike, shortened
from fxpar.tracer import capture
from tests.search.shallow import stack_rows

TEXTS = ("dp2.cp2.tp4+sp+zero3+remat", "cp2.tp4+sp+remat(selective|redo_comm)+chunks(2)")
MORE = (
    "dp2.tp4+sp+zero3+remat(selective)+offload(0.5)",
    "dp4",
    "tp2+sp",
    "cp4+zero3",
    "dp2.cp2+remat",
    "dp8+zero3+remat+chunks(2)",
    "ring2.tp2+sp+zero3",
)
TWICE = Strategy.parse("dp2.tp2+sp")


@functools.cache
def rows():
    """Three layers, as wide as it takes for gradients to be gathered where they are read."""
    options = {"layers": "3", "dim": "1024", "heads": "16", "kv_heads": "16", "ffn": "2816", "vocab": "1024"}
    model = load("llama", options=options, device="meta")
    return packed_if_proved(capture(model.model, model.loss_fn, model.example_batch))[0]


@functools.cache
def alike(layers: int) -> LowerAlike:
    graph: Any = rows() if layers == 3 else deepened(rows(), layers)
    return LowerAlike(graph, default_passes(for_store=True))


def with_middle_left_out(text: str, few: int, more: int):
    """The program, that of the graph it was made from, and what lowering gives for both."""
    strategy = Strategy.parse(text)
    both = alike(more).with_another(strategy, lambda graph: shortened(graph, more - few))
    return both, (alike(few)(strategy), alike(more)(strategy))


@pytest.mark.parametrize("text", [*TEXTS, *MORE])
def test_it_is_what_lowering_gives(text):
    found, lowered = with_middle_left_out(text, 2, 3)
    assert all(map(is_same_program, found, lowered))
    assert not is_same_program(*found)


def test_a_period_may_have_several_layers():
    found: Any = alike(6).with_another(TWICE, lambda graph: shortened(graph, 2))[0]
    assert is_same_program(found, alike(4)(TWICE))


def test_what_no_end_has_is_not_left_out():
    def reads_the_middle(graph: AnnotatedGraph) -> AnnotatedGraph | None:
        """With a result in front of the layers that is the middle one's."""
        middle = next(node for node in graph.graph.nodes if fqn_of(node) == "layers.1.ffn.up_proj")
        (output,) = graph.graph.find_nodes(op="output")
        results = output.args[0]
        output.args = ((middle, *results[1:]),)
        try:
            return shortened(graph, 1)
        finally:
            output.args = (results,)

    assert alike(3).with_another(TWICE, reads_the_middle)[0] is None
    assert alike(3).with_another(TWICE, lambda graph: shortened(graph, 2))[0] is None


@pytest.mark.parametrize("text", ["tp8+sp", "tp4+sp"])
def test_ends_are_those_of_a_deep_model(text):
    """Two layers of four heads alone are placed otherwise under tp8 than between more of them."""
    strategy, depth = Strategy.parse(text), Depth(4)
    (short, _), (whole, _) = lowering(stack_rows, depth), lowering(stack_rows)
    cluster = usual_cluster(8, 8)
    found = candidate(short, strategy, cluster, depth, (61, 2000))
    wanted = candidate(whole, strategy, cluster, replace(depth, whole=True), (61, 2000))
    assert found.cost.seconds([256] * 4) == pytest.approx(wanted.cost.seconds([256] * 4), rel=1e-9)


def test_what_cannot_be_left_out_is_lowered():
    lowered: Any = alike(2)
    short = LowerShort(lambda: lowered, lambda: alike(3), 2)
    assert is_same_program(short(TWICE, whole=False), lowered(TWICE))
    assert is_same_program(short(TWICE, whole=True), alike(3)(TWICE))


def test_both_are_made_at_once():
    def unused() -> LowerAlike:
        raise AssertionError

    more: Any = Counted(3)
    short = LowerShort(unused, lambda: more, 1)
    assert is_same_program(short(TWICE, whole=False), alike(2)(TWICE))
    assert is_same_program(short(TWICE, whole=True), alike(3)(TWICE))
    assert more.lowered == []


class Counted:
    """`LowerAlike` that notes what it lowers."""

    def __init__(self, layers: int) -> None:
        self.of, self.lowered = alike(layers), list[str]()

    def __call__(self, strategy: Strategy):
        self.lowered.append(str(strategy))
        return self.of(strategy)

    def with_another(self, strategy: Strategy, changed):
        return self.of.with_another(strategy, changed)


@pytest.mark.parametrize("text", ["dp2[layers.0: +remat]", "pp2", "dp2+remat(layers.0)", "dp2+remat(200MB)"])
def test_layers_that_are_told_apart_are_no_periods(text):
    assert not layers_alike(Strategy.parse(text))
    assert layers_alike(TWICE)
