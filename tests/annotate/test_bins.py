"""rows: documents packed in bins, so attention keeps tokens cut; and models that cannot have it."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar import losses
from fxpar.annotate.bins import reads_bins
from fxpar.annotate.policy import ContextAxis
from fxpar.errors import BinsError, StrategySyntaxError, VerifyError
from fxpar.ir.dist_config import Shard
from fxpar.ir.graph import DOCUMENTS
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models.builtin import packed_lm_loss
from fxpar.passes.pack_documents import pack_documents
from fxpar.rules.own_ops import attention_by_tokens
from fxpar.rules.table import own
from fxpar.runtime.decided import decide
from fxpar.runtime.options import ParallelizeOptions
from fxpar.runtime.task import Task
from fxpar.tracer import capture
from tests.captured import llama
from tests.runtime.hot import make_llama

IDS = torch.arange(1, 14)[None]
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(
    ("text", "bins", "axes"),
    [
        ("tp2.cp2", 1, ()),
        ("rows2.tp2", 2, ("rows",)),
        ("dp2.rows2.cp2", 2, ("rows",)),
        ("tp4+sp[*.attention: rows4]", 4, ("tp",)),
        ("tp4+sp[*.attention: rows2.tp2]", 2, ("tp:(1)2",)),
        ("rows2.tp2[*.attention: rows4; head: tp4]", 4, ("rows", "tp")),
        ("pp2.rows2[layers.0: tp2]", 2, ("rows",)),
        ("rows1.dp2", 1, ()),
    ],
)
def test_how_many_bins(text, bins, axes):
    strategy = Strategy.parse(text)
    assert (strategy.bins, strategy.bin_axes) == (bins, axes)


def test_attention_under_rows_sends_nothing():
    program = lower(pack_documents(llama().graph), "rows4")
    assert set(program.collectives()) == {"all_reduce"}  # of gradients and the loss
    assert not [comm for comm in program.communications() if "attention" in comm.fqn]


class Mean(nn.Module):
    """Every token sees the mean of its row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x - x.mean(1, keepdim=True))


def test_documents_that_see_each_other_cannot_lie_in_bins():
    graph = capture(Mean(), losses.causal_lm, BATCH)
    with pytest.raises(
        BinsError, match=r"'rows2': .*'Mean' cannot have: its documents see each other: .*mean"
    ) as raised:
        lower(graph, "rows2")
    assert str(raised.value).endswith("Use cp in place of rows.")
    with pytest.raises(BinsError):
        lower(graph, "pp2.tp2[head: rows2]")


def test_rows_of_one_sequence_are_no_bins():
    with pytest.raises(BinsError, match="captured for one sequence per row"):
        lower(llama().graph, "tp2[*.attention: rows2]")


def test_a_loss_that_sees_padding():
    model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 4))
    graph = capture(model, lambda module, batch: module(batch["input_ids"]).square().sum(), {"input_ids": IDS})
    packed = pack_documents(graph)
    assert packed.packing is not None
    assert packed.packing.padding_hazard
    with pytest.raises(BinsError, match="bins are padded, and "):
        lower(packed, "rows2")


def test_a_batch_without_tokens():
    graph = capture(
        nn.Linear(4, 4), lambda module, batch: module(batch["x"]).sum(), {"x": torch.ones(3, 4)}, dynamic={}
    )
    with pytest.raises(BinsError, match="its batch has no dim of tokens"):
        lower(graph, "rows2")


def test_axes_of_rules():
    with pytest.raises(StrategySyntaxError, match="inside of a replica, tp, cp, ring, rows, ep; dp is"):
        Strategy.parse("tp2[*.ffn: dp2]")


def marked_by(make) -> fx.Node:
    """A call of attention whose documents `make` makes of a placeholder."""
    graph = fx.Graph()
    q, ids = graph.placeholder("q"), graph.placeholder("ids")
    ids.meta["class"] = ("batch", DOCUMENTS, False)
    return graph.call_function(own.attention.default, (q, q, q, make(graph, ids), None, True, 0, 1.0, 0.0))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda graph, ids: ids, True),
        (lambda graph, ids: graph.call_function(torch.ops.aten.view.default, (ids, [1, 13])), True),
        (lambda graph, ids: graph.call_function(torch.ops.aten.floor_divide.default, (ids, 2)), False),
        (lambda graph, ids: graph.call_function(operator.add, (ids, ids)), False),
        (lambda graph, ids: graph.placeholder("other"), False),
        (lambda graph, ids: None, False),
    ],
)
def test_marks_that_the_model_computes_may_be_anything(make, told):
    """Two documents of the batch may be one to the model."""
    assert reads_bins(marked_by(make)) is told


def test_tokens_of_attention_are_cut_by_rows_alone(monkeypatch):
    """No query has a key on another rank only if documents are packed so."""

    def extra(self, problem, entry):
        cut = attention_by_tokens(entry.view) if entry.view.target in (own.attention.default,) else None
        return [cut] if cut else []

    graph = pack_documents(llama().graph)
    lower(graph, "rows2")
    monkeypatch.setattr(ContextAxis, "extra", extra)
    with pytest.raises(VerifyError, match="cannot run on axis cp"):
        lower(graph, "cp2")


def test_what_says_who_sees_whom_otherwise_is_not_cut():
    program = lower(pack_documents(llama().graph), "rows2")
    nodes = [node for node in program.parts["body"].graph.nodes if node.target is own.attention.default]
    assert nodes
    assert all(node.meta["dist"][0].placement("rows") == Shard(2) for node in nodes)


def test_sequences_that_run_alone_fill_one_bin(monkeypatch):
    monkeypatch.setattr("fxpar.runtime.decided.dist.get_world_size", lambda: 2)
    options = ParallelizeOptions(strategies={64: "rows2"}, packed=False)
    with pytest.raises(BinsError, match="packed=False runs each sequence alone"):
        decide(make_llama(), "", Task(packed_lm_loss, strategies={64: "rows2"}), options)
