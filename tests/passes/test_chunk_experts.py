"""Tokens that travel to their experts in chunks: what starts when, and gradients that are those of one device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import sympy
import torch
from torch import fx

from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import USUAL, ClusterSpec
from fxpar.errors import ExpertChunksError, VerifyError
from fxpar.explain.experts import experts_document, experts_notes
from fxpar.explain.traffic import traffic
from fxpar.ir.counts import RunCount
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import default_passes, lower
from fxpar.ops import copies
from fxpar.passes.chunk_experts import ChunkExperts
from fxpar.passes.pack_documents import pack_documents
from tests.captured import llama
from tests.passes.test_exchange_tokens import TWO_NODES, moe, program
from tests.repeat import thinned

aten, own = torch.ops.aten, torch.ops.fxpar
WAIT = torch.ops._c10d_functional.wait_tensor.default
GRADIENTS = [
    ("usual", 2, "dp2.ep2+zero3+ep_chunks(3)"),
    ("usual", 2, "ep2.tp2+sp+remat+ep_chunks(2)"),
    ("usual", 2, "ep2.pp2+cut(layers.0.experts)+ep_chunks(2)"),
    ("usual", 2, "cp2[*.experts: ep2+ep_chunks(8)]"),  # of 7 and 5 tokens
    ("usual", 2, "tp4+sp+capacity(4)[*.experts: ep2.tp2+ep_chunks(2)]"),
    ("all to one", 1, "ep4+ep_chunks(2)"),
    ("biased", 4, "ep2+zero2+ep_chunks(2)"),
    ("ones behind", 2, "ep2+ep_chunks(2)"),
]


@pytest.mark.parametrize(("kind", "slots", "strategy"), thinned(GRADIENTS, [GRADIENTS[i] for i in (1, 3, 5, 6)]))
def test_gradients_are_those_of_one_device(kind: str, slots: int, strategy: str) -> None:
    result = moe(kind, slots).check(strategy, 1e-10)
    assert result.ok, result


def test_node_first() -> None:
    """Each chunk is told, and sent, over both hops; all of them are one layer."""
    rows = pack_documents(moe().graph)
    whole, chunked = (lower(rows, text, cluster=TWO_NODES) for text in ("ep4", "ep4+ep_chunks(3)"))
    ((one,), (two,)) = (experts_document(found, traffic(found))["experts"] for found in (whole, chunked))
    counts = ("tokens", "copies", "hops", "ranks", "layers")
    assert [one[name] for name in counts] == [two[name] for name in counts]
    assert (one["chunks"], two["chunks"]) == (1, 3)
    assert rows_sent(whole) == rows_sent(chunked)
    (text,) = experts_notes(chunked)
    assert "to the ranks, in 3 chunks, for which" in text


def calls(strategy: str, *targets: object, backward: bool = False) -> list[fx.Node]:
    nodes = program(strategy).body.graph.nodes
    return [n for n in nodes if n.target in targets and bool(n.meta.get("backward")) == backward]


@pytest.mark.parametrize("backward", [False, True])
def test_a_chunk_travels_while_experts_compute_with_another(backward: bool) -> None:
    """There before the products of the first, back behind its own; nobody waits for results before the last chunk."""
    first, second = calls("ep2+ep_chunks(2)", own.grouped_mm.default, backward=backward)[:4:2]
    sent = calls("ep2+ep_chunks(2)", copies.exchange, backward=backward)
    there = [n for n in sent if n < first]
    back = [n for n in sent if n > first]
    waits = [next(iter(n.users)) for n in sent]
    assert all(wait.target is WAIT for wait in waits)
    # Of each chunk ids, tokens, weights of slots. Gradients of results, and back those of the first one's weights.
    assert len(there) == (3 if backward else 6)
    assert any(first < wait < second for n, wait in zip(sent, waits, strict=True) if n in there)
    assert first < back[0] < second < next(iter(back[0].users))


def rows_sent(found: TrainGraph) -> dict[tuple[str, bool, int], sympy.Expr]:
    """By axis, direction and width, of balanced routes."""
    rows: dict[tuple[str, bool, int], sympy.Expr] = {}
    for one in found.communications():
        count = one.sent.shape[0] if one.sent.shape else 1
        if isinstance(count, RunCount):
            key = one.axis, one.backward, math.prod(map(int, one.sent.shape[1:]))
            rows[key] = rows.get(key, sympy.Integer(0)) + count.args[0]
    return rows


def test_as_much_travels() -> None:
    """In twice as many messages."""
    assert rows_sent(program("ep2")) == rows_sent(program("ep2+ep_chunks(2)")) != {}
    assert len(calls("ep2+ep_chunks(2)", copies.exchange)) == 2 * len(calls("ep2", copies.exchange))


def test_the_first_chunk_is_told_first() -> None:
    """Although what tells it starts behind the product that the ids of all chunks are made of."""
    assert [n.args[0].meta["ep_chunk"] for n in calls("ep2+ep_chunks(2)", copies.copies)] == [0, 1]  # type: ignore[union-attr]


def test_what_is_hidden_is_priced() -> None:
    """Most of the second chunk travels beside products of the first."""
    device = replace(USUAL["cuda"].sustained, overlap_slowdown=1.0)
    cluster = ClusterSpec(1, 2, 5.0, 5.0, 0.0, device=device)

    def waited(text: str) -> float:
        costs = node_costs(program(text), cluster)
        return sum(float(cost.exposed.at(4096)) for cost in costs if cost.kind == "all_to_all")

    assert waited("ep2+ep_chunks(2)") < 0.5 * waited("ep2")


@pytest.mark.parametrize("for_store", [False, True])
def test_gradients_of_low_precision_add_up_wide(for_store: bool) -> None:
    """And stay so where they leave wide: they are not rounded in between."""
    found = lower(pack_documents(moe(dtype=torch.bfloat16).graph), "ep2+ep_chunks(2)", for_store=for_store)
    nodes = list(found.body.graph.nodes)
    terms = [n for n in nodes if n.target is own.grouped_mm_backward.default]
    sums = {user for n in terms for user in n.users if user.target in (aten.add.Tensor, aten.add_.Tensor)}
    assert len(terms) == 2 * len(sums) > 0
    assert {n.meta["local"].dtype for n in sums} == {torch.float32}
    casts = [user for n in sums for user in n.users if user.target is aten._to_copy.default]
    assert len(casts) == (0 if for_store else len(sums))


def test_tokens_are_padded_for_all_chunks() -> None:
    assert lower(pack_documents(moe().graph), "ep2[*.experts: +ep_chunks(3)]").divisors == {"T": 6}
    assert program("ep2").divisors == {"T": 2}


@pytest.mark.parametrize(
    ("captured", "strategy", "says"),
    [
        (moe, "dp2+ep_chunks(2)", "those of 'layers.0.experts' are on every rank. Give them ep, such as ep2"),
        (moe, "ep2+lsh(0.2)+ep_chunks(2)", r"see means of all rows .* \[layers.0.experts: \+ep_chunks\(1\)\]"),
        (moe, "ep2[embedding: +ep_chunks(2)]", r"the modules of rule 'embedding: \+ep_chunks\(2\)' have no experts"),
        (llama, "rows2+ep_chunks(2)", "model 'Llama' has no experts. Leave the flag out"),
    ],
)
def test_what_cannot_be(captured, strategy: str, says: str) -> None:
    with pytest.raises(ExpertChunksError, match=says):
        lower(pack_documents(captured().graph), strategy)


def test_once() -> None:
    ladder = default_passes()
    at = [step.name for step in ladder].index("exchange_tokens")
    with pytest.raises(VerifyError, match="'chunk_experts' needs tokens that travel all at once"):
        lower(pack_documents(moe().graph), "ep2+ep_chunks(2)", passes=[*ladder[:at], ChunkExperts(), *ladder[at:]])
