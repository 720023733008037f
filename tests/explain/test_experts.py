"""What experts on several ranks cost, as it is explained."""

from __future__ import annotations

from fxpar.explain.experts import experts_document, experts_notes
from fxpar.explain.traffic import traffic
from fxpar.lowering import lower
from fxpar.ops.copies import mean_copies
from fxpar.passes.pack_documents import pack_documents
from tests.captured import odd
from tests.passes.test_exchange_tokens import EXPERTS, SLOTS, TWO_NODES, moe


def test_rows_and_bytes_of_a_layer():
    """Each of five ranks has an expert, so each of the two of a token is a copy."""
    program = lower(pack_documents(odd("routed").graph), "ep5")
    found = traffic(program)
    (row,) = experts_document(program, found)["experts"]
    assert {"experts": 5, "slots": 2, "ranks": 5, "layers": 1}.items() <= row.items()
    assert row["copies"] == 2 * row["tokens"] > 0
    exchanges = [each for each in found if each.comm.kind == "all_to_all"]
    assert {each.added_by for each in exchanges} == {("exchange_tokens",)}
    assert not any("exchange_tokens" in each.added_by for each in found if each not in exchanges)
    assert row["forward_bytes"] + row["backward_bytes"] == round(sum(each.wire_bytes for each in exchanges))
    # There go ids, tokens of 16 and weights, back comes a token; in float64, with the count of each of five ranks.
    assert row["forward_bytes"] == round(row["copies"] * 4 / 5 * 8 * (2 + 16 + 2 + 16) + 4 * 8)
    (text,) = experts_notes(program)
    assert "1 of 5 experts on each of 5 ranks, 2 for a token" in text


def test_node_first():
    """Two exchanges are one layer, with the copies of both."""
    program = lower(pack_documents(moe().graph), "ep4", cluster=TWO_NODES)
    found = traffic(program)
    (row,) = experts_document(program, found)["experts"]
    tokens = row["tokens"]
    assert (row["experts"], row["ranks"], row["layers"]) == (EXPERTS, 4, 1)
    counts = [int(mean_copies(SLOTS, EXPERTS, ranks) * tokens) for ranks in (2, 4)]
    assert row["hops"] == ((2, counts[0]), (2, counts[1]))
    sent = sum(each.wire_bytes for each in found if each.exchanges)
    assert row["forward_bytes"] + row["backward_bytes"] == round(sent)
    (text,) = experts_notes(program)
    assert f"travel in {counts[0]} copies to 2 nodes, and from there in {counts[1]} copies to the ranks" in text


def test_where_every_rank_has_all_experts_nothing_is_said():
    assert not list(experts_notes(lower(odd("routed").graph, "cp2")))
