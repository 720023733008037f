"""Forward, backward and its halves: what each computes, of a stage and of a lowered one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fxpar.errors import VerifyError
from fxpar.ir.exec_graph import Part, collective_kind
from fxpar.ir.graph import AnnotatedGraph, Output
from fxpar.ir.node_meta import tensor_metas
from fxpar.lowering.ladder import default_passes, run_passes
from fxpar.stages import StageParts, cut_stages, split_parts
from tests.stages.models import loaded, odd, random_model

MM = torch.ops.aten.mm.default


def products(part: Part) -> int:
    return len(part.graph.find_nodes(op="call_function", target=MM))


def stages(count: int = 3):
    return cut_stages(loaded("llama", layers=3).graph, count).stages


def test_weight_gradients_are_in_the_weight_part():
    """A layer has 7 products: as many for the gradient of its input, and as many for those of its weights."""
    first, middle, last = (split_parts(stage) for stage in stages())
    assert [products(p) for p in (middle.forward, middle.backward)] == [7, 14]
    assert [products(p) for p in (middle.input_part, middle.weight_part)] == [7, 7]
    assert [products(p) for p in (last.forward, last.input_part, last.weight_part)] == [8, 8, 8]
    # Nobody waits for the first stage: all of its backward may run when there is nothing else to do.
    assert [products(p) for p in (first.input_part, first.weight_part)] == [0, 14]
    assert first.input_part.is_empty


def test_nothing_is_computed_twice():
    for stage in stages():
        parts = split_parts(stage)
        names = [n.name for n in stage.gm.graph.nodes if n.op == "call_function"]
        halves = (parts.forward, parts.input_part, parts.weight_part)
        assert sorted(names) == sorted(n.name for p in halves for n in p.graph.nodes if n.op == "call_function")
        assert sum(products(p) for p in (parts.forward, parts.backward)) == sum(map(products, halves))


def test_parts_read_earlier_parts_only():
    known = {"forward": {"input"}, "backward": {"input", "forward"}, "input_part": {"input", "forward"}}
    known["weight_part"] = {"input", "forward", "input_part"}
    for stage in stages():
        parts = split_parts(stage)
        tangents = {i for i, info in enumerate(stage.inputs) if info.kind == "received_grad"}
        assert not tangents & {i for source, i in parts.forward.sources if source == "input"}
        for name, allowed in known.items():
            part: Part = getattr(parts, name)
            assert {source for source, _ in part.sources} <= allowed
            for source, i in part.sources:
                if source != "input":
                    assert i < len(getattr(parts, source).results)


def test_lowered_stages_split_alike():
    """The all-reduces of the input's gradient are in the input part, so that it leaves as early as possible."""
    found = []
    run_passes(stages()[1], "tp2", default_passes(for_store=True), lambda name, graph: found.append(graph))
    parts = split_parts(found[-1])
    assert [products(p) for p in (parts.forward, parts.input_part, parts.weight_part)] == [7, 7, 7]
    reduces = [
        [collective_kind(n) for n in p.graph.nodes].count("all_reduce") for p in (parts.input_part, parts.weight_part)
    ]
    assert reduces == [2, 0]
    assert all(tensor_metas(r) or "sym" in r.meta for r in parts.forward.results)


def test_a_forward_that_reads_a_gradient():
    (stage,) = stages(2)[:1]
    node = next(n for n in stage.results if n.meta["backward"])
    stage.outputs = tuple(
        Output("sent", o.fqn) if r is node else o for o, r in zip(stage.outputs, stage.results, strict=True)
    )
    with pytest.raises(VerifyError, match="what the forward gives depends on"):
        split_parts(stage)


# -------------------------------------------------------------------------------------------- parts of lowered stages
def lowered(strategy: str, *, for_store: bool = False) -> list[StageParts]:
    """The stages of three under a strategy of their own ranks."""
    found: list[AnnotatedGraph] = []
    for stage in stages():
        made = []
        run_passes(stage, strategy, default_passes(for_store=for_store), lambda name, graph: made.append(graph))  # noqa: B023
        found.append(made[-1])
    return [split_parts(graph) for graph in found]


def kinds(part: Part) -> dict[str, int]:
    """Number of collectives of each kind."""
    return dict(Counter(kind for node in part.graph.nodes if (kind := collective_kind(node))))


NAMES = ("prologue", "forward", "backward", "epilogue")
COLLECTIVES = {
    # Gradients are summed once per group, the last stage's together with the loss.
    "dp2": ({}, {}, {}, {"all_reduce": 1}),
    # Parameters are put together once per mini-batch.
    "dp2+zero1": ({"all_gather": 1}, {}, {}, {"reduce_scatter": 1}),
    "dp2+zero2": ({"all_gather": 1}, {}, {"reduce_scatter": 1}, {}),
    "dp2+zero3": ({}, {"all_gather": 1}, {"reduce_scatter": 1}, {}),
}


@pytest.mark.parametrize("strategy", COLLECTIVES)
def test_where_collectives_go(strategy):
    """Of the stage in the middle: one layer of nine parameters."""
    parts = lowered(strategy)[1]
    assert tuple(kinds(getattr(parts, name)) for name in NAMES) == COLLECTIVES[strategy]
    halves = [kinds(part) for part in (parts.input_part, parts.weight_part)]
    assert sum((Counter(half) for half in halves), Counter()) == Counter(kinds(parts.backward))


@pytest.mark.parametrize("strategy", ["dp2", "dp2.cp2", "tp2", "dp2+zero1"])
def test_gradients_are_in_the_backward(strategy):
    """Also of the last stage, where one collective reduces loss and gradients."""
    last = lowered(strategy)[-1]
    assert [products(p) for p in (last.forward, last.input_part, last.weight_part)] == [8, 8, 8]
    assert not any(n.meta.get("backward") for n in last.forward.graph.nodes if n.op == "call_function")


def test_a_store_gathers_and_sums_instead():
    for parts in lowered("dp2+zero1", for_store=True):
        assert parts.prologue.is_empty
        assert set(kinds(parts.epilogue)) <= {"all_reduce"}  # of the loss


def test_what_is_sent_and_summed_has_two_places():
    """A buffer that the first stage writes and the others read; a gradient that another parameter's is too."""
    first = split_parts(cut_stages(odd("counted").graph, 2).stages[0])
    names = [node.name for node in first.forward.results]
    (sent,) = {source for source in first.epilogue.sources if source[0] == "forward"}
    assert sent[1] >= 2
    assert names.count(names[sent[1]]) == 2


@pytest.mark.filterwarnings("ignore::fxpar.errors.FxparWarning")  # some weights of random models do nothing
def test_a_gradient_that_comes_ready_made():
    """It is a result of the backward, so that it is added up over micro-batches."""
    first = split_parts(cut_stages(random_model(4).graph, 2, cuts=["steps.5"]).stages[0])
    assert {source for source, _ in first.epilogue.sources} == {"backward"}
    place = next(i for i, node in enumerate(first.backward.results) if node.op == "placeholder")
    assert first.backward.results[place].name == first.weight_part.results[place].name
