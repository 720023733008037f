"""The verifier: a graph that a pass broke is named with the pass, the node and the user's line."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

from fxpar.annotate import Annotate
from fxpar.errors import VerifyError
from fxpar.ir import collectives as c
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph, Output
from fxpar.lowering import default_passes, lower
from fxpar.lowering.verify import Looked, verify, verify_placements, where
from fxpar.passes.insert_reshards import InsertReshards
from fxpar.tracer import capture
from tests.captured import fused, llama
from tests.passes.sketch import Sketch, before
from tests.repeat import thinned

aten = torch.ops.aten
wait = torch.ops._c10d_functional.wait_tensor.default
STRATEGIES = ["dp2", "tp2", "tp3", "tp2+sp", "cp2", "cp2.tp2+sp", "dp2.tp2+sp+zero3", "dp2.cp2+zero2"]


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, ["tp3", "cp2.tp2+sp", "dp2.tp2+sp+zero3", "dp2.cp2+zero2"]))
def test_every_pass_leaves_a_graph_that_verifies(strategy):
    """`lower` verifies by itself; here the callback sees each graph once and in order."""
    seen = []
    program = lower(llama().graph, strategy, on_pass=lambda name, graph: seen.append((name, len(graph.graph.nodes))))
    assert [name for name, _ in seen] == [step.name for step in default_passes()]
    assert [report["name"] for report in program.passes] == [name for name, _ in seen]
    assert [report["nodes"] for report in program.passes] == [count for _, count in seen]


def test_what_is_looked_at_again():
    """What a pass has changed, its users, and the users of views of it, through which checks look."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    shown = graph.call_function(aten.view.default, (x, [4]))
    read = graph.call_function(aten.add.Tensor, (shown, y))
    behind = graph.call_function(aten.relu.default, (read,))
    graph.output((behind,))
    looked = Looked()
    looked.look(graph)
    assert looked.fresh == list(graph.nodes)
    looked.look(graph)
    assert looked.fresh == []
    x.meta["dist"] = "elsewhere"
    looked.look(graph)
    assert looked.fresh == [x, shown, read]
    read.args = (shown, shown)
    looked.look(graph)
    assert looked.fresh == [read, behind]


# ---------------------------------------------------------------------------------------- deliberately broken
def first(graph: AnnotatedGraph, target: object) -> fx.Node:
    return next(iter(graph.graph.find_nodes(op="call_function", target=target)))


def test_a_missing_wait():
    graph = before(llama().graph, "tp2", "bucket_collectives")
    node = first(graph, wait)
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)
    with pytest.raises(VerifyError, match=r"after pass 'mine': %all_reduce.* is not waited for exactly once"):
        verify(graph, "mine")


def test_a_second_wait():
    graph = before(llama().graph, "tp2", "bucket_collectives")
    node = first(graph, wait)
    with graph.graph.inserting_after(node):
        again = graph.graph.call_function(wait, node.args)
    again.meta.update(node.meta)
    with pytest.raises(VerifyError, match="is not waited for exactly once"):
        verify(graph, "mine")


def test_a_user_in_front_of_its_operand():
    graph = before(llama().graph, "tp2", "cleanup")
    node = first(graph, aten.mm.default)
    next(iter(node.users)).append(node)
    with pytest.raises(VerifyError, match="after pass 'mine': the graph is malformed"):
        verify(graph, "mine")


def test_a_cycle():
    graph = before(llama().graph, "tp2", "cleanup")
    node = first(graph, aten.mm.default)
    user = next(iter(node.users))
    node.args = (user, node.args[1])
    with pytest.raises(VerifyError, match="after pass 'mine': the graph is malformed"):
        verify(graph, "mine")


def test_a_lost_result():
    graph = before(llama().graph, "tp2", "cleanup")
    graph.outputs = (*graph.outputs, Output("grad", "ghost"))
    with pytest.raises(VerifyError, match="after pass 'mine': 13 results for 14 outputs"):
        verify(graph, "mine")


def test_a_node_without_a_shape():
    graph = before(llama().graph, "tp2", "cleanup")
    del first(graph, aten.mm.default).meta["tensor"]
    with pytest.raises(VerifyError, match="has no shape"):
        verify(graph, "mine")


def test_an_operand_that_lies_otherwise():
    graph = before(llama().graph, "tp2", "insert_reshards")
    InsertReshards()(graph)
    node = first(graph, c.reshard)
    node.replace_all_uses_with(node.args[0])
    with pytest.raises(VerifyError, match=r"after pass 'mine': .* needs .* as .*, but it is"):
        verify_placements(graph, "mine", resharded=True)


def test_a_placement_that_no_rule_offers():
    """A product whose inner dim is cut on one side only."""
    graph = before(llama().graph, "tp2", "insert_reshards")
    node = next(n for n in graph.graph.find_nodes(op="call_function", target=aten.mm.default) if n.meta["dist"].partial)
    node.meta["dist"] = node.meta["dist"].replicated(node.meta["dist"].mesh, 2, torch.float64)
    with pytest.raises(VerifyError, match="cannot run on axis tp as"):
        verify_placements(graph, "mine", resharded=False)


def test_a_softmax_cut_where_it_normalises():
    s = Sketch("tp2")
    x = s.place("x", (4, 8), ["", "tp"])
    y = s.call(aten._softmax.default, x, 1, False, shape=(4, 8), dims=["", "tp"], dist_in=(s.dist(["", "tp"]),))
    graph = s.done(y)
    with pytest.raises(VerifyError, match=r"%_softmax_default \(aten._softmax.default\) cannot run on axis tp"):
        verify_placements(graph, "mine", resharded=True)


def test_queries_cut_in_another_order_than_keys():
    """Both axes cut queries, one of them keys: it cuts first, or a rank has the queries of other keys."""
    graph = before(llama(heads=4, kv_heads=2).graph, "cp2.tp2[*.attention: tp4]", "insert_reshards")
    node = first(graph, torch.ops.fxpar.attention.default)
    verify_placements(graph, "mine", resharded=False)
    mesh, heads = graph.strategy.mesh, node.meta["dist_in"][0].dims[1]
    assert [entry.axis for entry in heads] == ["tp", "cp"]
    turned = DistConfig(mesh, ((), tuple(reversed(heads)), (), ()), dtype=torch.float64)
    node.meta["dist_in"] = (turned, *node.meta["dist_in"][1:])
    with pytest.raises(VerifyError, match="is cut by cp before tp, which is another piece for each of its tensors"):
        verify_placements(graph, "mine", resharded=False)


def test_errors_point_to_the_users_line():
    graph = before(fused("split").graph, "tp2", "insert_reshards")
    node = first(graph, aten.mm.default)
    assert re.fullmatch(rf"%{node.name} \(aten.mm.default, in qkv, .*captured.py:\d+\)", where(node))


def test_lower_names_the_pass_that_broke_the_graph():
    class Careless:
        name = "careless"
        tier = "exact"

        def __call__(self, graph: AnnotatedGraph) -> None:
            del first(graph, aten.mm.default).meta["tensor"]

    with pytest.raises(VerifyError, match=r"after pass 'careless': .* has no shape"):
        lower(llama().graph, "tp2", passes=[Annotate(), InsertReshards(), Careless()])


def test_an_assertion_has_no_shape():
    """It has no result; any other call without a shape is an error."""

    class Asserting(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, input_ids):
            torch._assert_async((input_ids < 8).all(), "ids")
            return self.table(input_ids)

    ids = torch.arange(8)[None]
    graph = capture(Asserting(), lambda model, batch: model(batch["input_ids"]).sum(), {"input_ids": ids})
    seen = {}
    lower(graph, "dp2", on_pass=lambda name, found: seen.update({name: [str(n.target) for n in found.graph.nodes]}))
    assert "aten._assert_async.msg" in seen["annotate"]
