"""Forward, backward and its halves: what each computes, of a stage and of a lowered one."""

from __future__ import annotations

import pytest
import torch

from fxpar.annotate.problem import tensor_metas
from fxpar.errors import VerifyError
from fxpar.exec_graph import Part, collective_kind
from fxpar.graph import Output
from fxpar.ladder import default_passes, run_passes
from fxpar.stages import cut_stages, split_parts
from tests.stages.models import loaded

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
