"""Differences of strategies: none with itself, antisymmetric, and their sums are what the graphs say of themselves."""

from __future__ import annotations

import itertools
import json

import pytest

from fxpar.errors import DifferentModelsError
from fxpar.graph_diff import compare, digest
from fxpar.graph_diff.compare import GraphCounts, total
from fxpar.graph_diff.lines import packs_a_bucket
from fxpar.graph_diff.modules import ModulePlace
from fxpar.lowering import lower
from tests.graph_diff.graphs import STRATEGIES, difference, logical, lowered, side
from tests.repeat import thinned

PAIRS = list(itertools.combinations(STRATEGIES, 2))


@pytest.mark.parametrize("strategy", ["tp2+sp", "pp2.tp2"])
def test_nothing_differs_from_itself(strategy):
    diff = compare(side(strategy), digest(lower(logical(), strategy)))
    assert not diff.differs
    assert (diff.params, diff.sections) == ([], [])
    assert all(row.old == row.new for row in [*diff.blocks, *diff.collectives])


@pytest.mark.parametrize(("old", "new"), thinned(PAIRS, [("tp2", "dp2.tp2+sp+zero3")]))
def test_the_other_way_round(old, new):
    there, back = difference(old, new), difference(new, old)
    assert there.differs
    assert back.differs
    for rows in ("blocks", "collectives"):
        mirrored = {row.key: (row.new, row.old) for row in getattr(back, rows)}
        assert {row.key: (row.old, row.new) for row in getattr(there, rows)} == mirrored
    assert {(p.name, p.count, p.old, p.new) for p in there.params} == {
        (p.name, p.count, p.new, p.old) for p in back.params
    }
    assert _by_place(there) == {place: (-n, changed) for place, (n, changed) in _by_place(back).items()}


def _by_place(diff):
    """Nodes added less those removed, and whether all of the place's differ, per place."""
    return {
        ModulePlace(block, section.place.part): (section.added - section.removed, section.changed)
        for section in diff.sections
        for block in section.blocks
    }


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_sums(old, new):
    diff = difference(old, new)
    blocks, kinds = total(diff.blocks), total(diff.collectives)
    for counts, of_kinds, strategy in ((blocks.old, kinds.old, old), (blocks.new, kinds.new, new)):
        graph = lowered(strategy)
        programs = graph.placed
        messages = getattr(graph, "handovers", [])
        dims = {d.symbol: d.example for d in graph.dims}
        sent = sum(p.collective_bytes() for p in programs)
        sent += sum(each.bytes_of_busiest(dims) for each in messages)
        assert counts.bytes == pytest.approx(sent, abs=len(programs))
        assert of_kinds.bytes == pytest.approx(counts.bytes)
        assert counts.tensors == of_kinds.tensors
        assert of_kinds.tensors == sum(c.fused for p in programs for c in p.communications()) + len(messages)
        assert of_kinds.calls == sum(graph.collectives().values())
        assert side(strategy).rank_bytes == pytest.approx(graph.collective_bytes(), abs=1)
        ops = [n for p in programs for part in p.parts.values() for n in part.graph.nodes if n.op == "call_function"]
        ops = [n for n in ops if not packs_a_bucket(n)]
        assert counts.ops == len(ops) == side(strategy).op_count


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_nodes_add_up(old, new):
    """What the sections say was added and removed is how the numbers of ops differ, block by block."""
    diff = difference(old, new)
    found = _by_place(diff)
    for row in diff.blocks:
        assert found.get(row.key, (0, 0))[0] == row.new.ops - row.old.ops


def test_a_bucket_is_shared_out_to_its_blocks():
    """One all-reduce of all gradients under dp: a layer has the bytes of its own parameters."""
    diff = difference("dp2", "dp2")
    rows = {row.key: row.old for row in diff.blocks}
    assert [row.old.calls for row in diff.collectives] == [1]
    layer = sum(i.meta.numel({}) * 4 for i in logical().params() if i.fqn.startswith("layers.1."))
    assert rows[ModulePlace("layers.1", "epilogue")] == GraphCounts(0, 9, 0, layer)
    assert rows[ModulePlace("(root)", "epilogue")].bytes == 4  # the loss


def test_params():
    diff = difference("tp2", "dp2.tp2+sp+zero3")
    by_name = {change.name: change for change in diff.params}
    assert by_name["layers.*.attention.q_proj.weight"].count == 3
    assert by_name["layers.*.attention.q_proj.weight"].new == "f32[64@tp@dp, 64]   local f32[16, 64]"
    assert by_name["norm.weight"].old == "f32[64]"
    assert sum(change.count for change in diff.params) == len(side("tp2").params)
    assert difference("tp2", "tp2+sp").params == []
    names = [stored.local.numel({}) * 4 for _, stored in lowered("tp2").params()]
    assert side("tp2").weight_bytes == sum(names)


def test_a_pipeline_rank_has_its_stage():
    graph = lowered("pp2.tp2")
    stages = [sum(s.local.numel({}) * 4 for s in stage.taken("param").values()) for stage in graph.stages]
    assert side("pp2.tp2").stage_weights == tuple(stages)
    assert side("pp2.tp2").weight_bytes == max(stages)


def test_one_module():
    graphs = [digest(lowered(strategy), only="layers.1.ffn") for strategy in ("tp2", "dp2")]
    diff = compare(*graphs)
    assert {row.key.block for row in diff.blocks} == {"layers.1"}
    assert {change.name for change in diff.params} == {f"layers.1.ffn.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert total(diff.collectives).new.calls == 1  # its part of the bucket
    whole = {row.key: row for row in difference("tp2", "dp2").blocks}
    assert 0 < total(diff.blocks).old.ops < whole[ModulePlace("layers.1", "forward")].old.ops


def test_other_models():
    with pytest.raises(DifferentModelsError, match=r"llama \(tp2\) and mlp \(logical\) are different models"):
        compare(side("tp2"), digest(logical("mlp")))


def test_any_stage_of_the_lowering():
    """A logical graph has the same parts, and after every pass bytes are known as soon as there are collectives."""
    found = {}
    lower(logical(), "dp2.tp2+sp+zero3", on_pass=lambda name, graph: found.update({name: digest(graph)}))
    end = side("dp2.tp2+sp+zero3")
    for name in ("reshard_to_collectives", "lower_collectives", "bucket_collectives"):
        assert found[name].rank_bytes == pytest.approx(end.rank_bytes, rel=0.05), name
    assert found["cleanup"].rank_bytes == end.rank_bytes
    assert found["write_in_place"].rank_bytes == end.rank_bytes
    assert {move.kind for move in found["zero_shard"].moves} == {"reshard"}
    assert not compare(found["write_in_place"], end).sections
    plain = digest(logical())
    assert {place.part for place in plain.ops} == {"forward", "backward"}
    assert compare(plain, found["annotate"]).old.op_count == plain.op_count


def test_json():
    diff = difference("tp2", "pp2.tp2")
    data = json.loads(json.dumps(diff.to_json()))
    assert (data["old"]["world"], data["new"]["world"], data["new"]["cuts"]) == (2, 4, ["layers.2"])
    assert data["differs"] is True
    assert sum(row["new_bytes"] for row in data["blocks"]) == sum(row["new_bytes"] for row in data["collectives"])
    assert {row["kind"] for row in data["collectives"]} == {"all_reduce", "all_gather", "send"}
    assert all(line[0] in "-+" for section in data["nodes"] for line in section["lines"])
