"""What is explained is what is lowered: reshards and who wants them, collectives and their causes."""

from __future__ import annotations

import operator
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.annotate import annotate
from fxpar.explain.reshards import moves
from fxpar.explain.summary import summary_document
from fxpar.explain.traffic import SENDS, by_module, traffic
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.strategy import Strategy
from fxpar.losses import causal_lm
from fxpar.lowering import lower
from fxpar.tracer import capture
from tests.captured import fused, llama

STRATEGIES = ["tp2", "tp2+sp", "cp2.tp2", "dp2.tp2+sp+zero3"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_reshard_has_one_set_of_users(strategy):
    graph = annotate(llama(layers=2).graph, Strategy.parse(strategy))
    wanted = defaultdict(set)
    for node in graph.graph.nodes:
        for operand, want in zip(tensor_operands(node), node.meta.get("dist_in", ()), strict=False):
            if operand.meta["dist"] != want:
                wanted[operand, want].add(node)
    found = moves(graph)
    assert {(m.value, m.wanted): set(m.users) for m in found} == wanted
    assert len(found) == len(wanted) > 0
    assert all(m.behind and m.terms and m.steps for m in found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reshards_and_collectives_send_the_same(strategy):
    """The bytes of the annotated graph's reshards are those of the collectives that they became."""
    explained = traffic(lower(llama(layers=2).graph, strategy))
    body = sum(t.wire_bytes for t in explained if t.added_by == ("insert_reshards",))
    assert sum(m.wire_bytes for m in moves(annotate(llama(layers=2).graph, Strategy.parse(strategy)))) == pytest.approx(
        body
    )


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dp2", "pp2.dp2+zero2"])
def test_all_collectives_are_explained(strategy):
    program = lower(llama(layers=2).graph, strategy)
    found = traffic(program)
    assert len(found) == len(program.communications())
    rows = by_module(found)
    assert sum(row["calls"] for row in rows) == len(found)
    for name, once in zip(SENDS, (False, True), strict=True):
        sent = sum(t.wire_bytes for t in found if (t.part in ("prologue", "epilogue")) == once)
        assert sum(row[name] for row in rows) == pytest.approx(sent, abs=len(rows))
    zero3 = "zero3" in strategy
    assert any(t.what == "parameters" for t in found) == ("zero" in strategy)
    assert all(t.params for t in found if t.what in ("parameters", "gradients"))
    assert {p for t in found if t.what == "parameters" for p in t.params} <= {i.fqn for i in program.inputs}
    assert not zero3 or {t.added_by[0] for t in found if t.comm.axis == "dp"} <= {"zero_shard", "reduce_gradients"}


def test_parts_of_a_value_are_looked_through():
    """Who wants the keys is attention, not the split of the fused projection in front of it."""
    graph = fused("split", 4, 2).graph
    wanting = {node.target for move in moves(annotate(graph, Strategy.parse("cp4"))) for node in move.behind}
    assert not any(target is operator.getitem or getattr(target, "is_view", False) for target in wanting)
    users = {user for one in traffic(lower(graph, "cp4")) for user in one.users}
    assert any("attention" in user for user in users)
    assert not any("getitem" in user or "split" in user for user in users)


def test_an_owner_is_named():
    """A collective belongs to what makes the value: the row-parallel product, the norm before column-parallel ones."""
    found = traffic(lower(llama().graph, "tp2+sp"))
    causes = {(t.comm.kind, t.module, t.comm.backward) for t in found if t.module.startswith("layers.0")}
    assert ("reduce_scatter", "layers.0.ffn.down_proj", False) in causes
    assert ("all_gather", "layers.0.ffn_norm", False) in causes
    gather = next(t for t in found if t.module == "layers.0.ffn_norm" and t.comm.kind == "all_gather")
    assert gather.params == ("layers.0.ffn.gate_proj.weight", "layers.0.ffn.up_proj.weight")


class Tied(nn.Module):
    """As in GPT-2: the head is the table of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(83, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.linear(x, self.embed.weight)


@pytest.mark.parametrize("strategy", ["tp2+sp", "tp2", "dp2.tp2+sp", "dp2+zero2"])
def test_each_term_of_a_tied_weights_gradient_is_its_own(strategy):
    """What the embedding leaves of the gradient is reduced before that of the head is added to it."""
    batch = {"input_ids": torch.zeros(1, 12, dtype=torch.long), "labels": torch.zeros(1, 12, dtype=torch.long)}
    program = lower(capture(Tied(), causal_lm, batch), strategy)
    found = traffic(program)
    assert all(t.params for t in found if t.wire_bytes > 100)
    if strategy == "tp2+sp":
        (term,) = [t for t in found if t.what == "gradients" and t.params == ("embed.weight",)]
        assert (term.comm.kind, term.comm.axis, term.module) == ("reduce_scatter", "tp", "embed")
        assert term.wire_bytes == pytest.approx(83 * 32 * 4 / 2, rel=0.02)  # of 84 rows
        rows = {row["name"]: row["micro_batch_bytes"] for row in summary_document(program, found)["params"]}
        assert rows["embed.weight"] > 83 * 32 * 4 / 2


def test_a_loss_among_gradients_is_not_the_cause():
    (rows,) = [t for t in traffic(lower(llama().graph, "dp2.tp2+sp")) if t.comm.axis == "dp" and t.comm.fused > 1]
    assert rows.what == "gradients"
    assert rows.added_by == ("reduce_gradients", "bucket_collectives")
