"""Galvatron's plan files: strategies in fxpar's words, and one error for each mistake."""

from __future__ import annotations

import json

import pytest

from fxpar.checking import check
from fxpar.errors import GalvatronFileError, GalvatronKeyError
from fxpar.ir.strategy import Strategy
from fxpar.runtime.micro import as_one_sequence
from fxpar.search.galvatron_plan import LayerStrategy, as_strategy, read_galvatron_plan
from tests.stages.models import loaded

# As Galvatron 3.0 writes it: without the number of devices.
PLAN = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,2,4,1",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "1,0,0,0",
    "use_sp": "0,1,0,0",
    "checkpoint": "1,0,0,1",
    "global_bsz": 64,
    "chunks": 8,
    "pp_division": "3,1",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 1,
    "embed_sdp": 1,
}


def written(tmp_path, **changes):
    """The plan with changes; None takes a key away."""
    plan = {key: value for key, value in {**PLAN, **changes}.items() if value is not None}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "plan.json"


def test_a_plan_in_our_words(tmp_path):
    plan = read_galvatron_plan(written(tmp_path), devices=8)
    assert [str(one) for one in plan.layers] == [
        "dp2.pp2.tp2+sp+zero3+remat",
        "dp2.pp2.cp2+zero2",
        "pp2.tp4+sp",
        "dp4.pp2+zero2+remat",
    ]
    assert str(plan.ends) == "dp2.pp2.cp2+zero3"
    assert (plan.devices, plan.batch, plan.micro_batches) == (8, 64, 8)
    assert (plan.division, plan.schedule) == ((3, 1), "1f1b")


def test_a_plan_as_one_strategy(tmp_path):
    """What embedding and head have is that of the whole model; replicas of a layer that others lack are bins."""
    plan = read_galvatron_plan(written(tmp_path), devices=8)
    assert str(as_strategy(plan)) == (
        "pp2.rows2.cp2+zero3+cut(model.layers.3)[model.layers.0: rows2.tp2+sp+remat; model.layers.1: +zero2; "
        "model.layers.2: tp4+sp+zero0; model.layers.3: rows4+zero2+remat]"
    )
    flat = written(tmp_path, pp_deg=1, pp_division=None, tp_sizes_enc="2,2,2,2", use_sp=None, checkpoint="1,1,1,0")
    assert str(as_strategy(read_galvatron_plan(flat, 8), "blocks")) == (
        "dp4.cp2+zero3[blocks.0: tp2+sp+remat; blocks.{1-2}: tp2+sp+zero2+remat; blocks.3: tp2+sp+zero2]"
    )
    uniform = written(tmp_path, tp_sizes_enc="1,1,1,1", use_sp=None, checkpoint=None, dp_types_enc="0,0,0,0", vtp=1)
    assert str(as_strategy(read_galvatron_plan(uniform, 2))) == "pp2+cut(model.layers.3)"
    single = written(
        tmp_path,
        pp_deg=1,
        pp_division=None,
        tp_sizes_enc="1,1",
        use_sp=None,
        checkpoint=None,
        vtp=1,
        dp_types_enc="0,0",
        tp_consecutive_flags=None,
    )
    assert str(as_strategy(read_galvatron_plan(single, 1))) == "dp1"


def test_a_plan_runs(tmp_path):
    """With the gradients of a single device."""
    strategy = str(as_strategy(read_galvatron_plan(written(tmp_path), devices=8)))
    found = loaded("hf:llama", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8)
    batches = [as_one_sequence(found.graph.inputs, batch, i) for i, batch in enumerate(found.batches)]
    (result,) = check(found.graph, [strategy], found.params, found.buffers, batches)
    assert result.ok
    assert max(result.loss_rel_err, result.grad_max_rel_err) <= 1e-10


def test_the_texts_are_strategies():
    """Each means what it says, and one device has one too."""
    for strategy in (
        LayerStrategy(stages=2, tp=2, dp=2, zero=3, remat=True),
        LayerStrategy(ulysses=4, dp=2, zero=2),
        LayerStrategy(tp=8),
        LayerStrategy(),
    ):
        parsed = Strategy.parse(str(strategy))
        degrees = [parsed.degree(axis) for axis in ("pp", "tp", "cp", "dp")]
        assert degrees == [strategy.stages, strategy.tp, strategy.ulysses, strategy.dp]
        assert (parsed.zero, parsed.remat is not None) == (strategy.zero, strategy.remat)
        assert parsed.sp == (strategy.tp > 1)


def test_what_may_be_left_out(tmp_path):
    short = {key: None for key in PLAN if key not in ("pp_deg", "tp_sizes_enc", "dp_types_enc", "global_bsz", "chunks")}
    plan = read_galvatron_plan(
        written(tmp_path, **short, tp_sizes_enc="2,2,2,2,2", dp_types_enc="0,0,0,0,0", world_size=8)
    )
    assert plan.division == (2, 3)
    assert set(map(str, plan.layers)) == {"dp2.pp2.tp2+sp+zero2"}
    assert str(plan.ends) == "dp4.pp2+zero2"


@pytest.mark.parametrize(("word", "zero"), [("ddp", 0), ("zero2", 2), ("zero3", 3)])
def test_the_level_of_the_others(tmp_path, word, zero):
    assert read_galvatron_plan(written(tmp_path, default_dp_type=word), 8).layers[3].zero == zero


def test_the_embeddings_key_of_both_halves_of_galvatron(tmp_path):
    """Its search writes embed_sdp, its runtime reads vocab_sdp: either counts."""
    assert read_galvatron_plan(written(tmp_path, embed_sdp=None, vocab_sdp=1), 8).ends.zero == 3
    assert read_galvatron_plan(written(tmp_path, embed_sdp=0), 8).ends.zero == 2


def test_gpipe(tmp_path):
    assert read_galvatron_plan(written(tmp_path, pipeline_type="gpipe"), 8).schedule == "gpipe"


MISTAKES = [
    ({"tp_size_enc": "1"}, 8, ["tp_size_enc", "did you mean 'tp_sizes_enc'"]),
    ({"dp_types_enc": None}, 8, ["dp_types_enc", "missing"]),
    ({}, None, ["world_size", "--devices"]),
    ({"world_size": 16}, 8, ["world_size", "= 16", "on 8 devices"]),
    ({"world_size": "8"}, None, ["world_size", "'8'", "whole number"]),
    ({"pp_deg": 3}, 8, ["pp_deg", "= 3", "8 devices cannot be 3 equal stages"]),
    ({"pp_deg": 0}, 8, ["pp_deg", "from 1"]),
    ({"pp_deg": True}, 8, ["pp_deg", "True"]),
    ({"tp_sizes_enc": "2,x,1,1"}, 8, ["tp_sizes_enc", "'2,x,1,1'", "commas"]),
    ({"tp_sizes_enc": [1, 1, 1, 1]}, 8, ["tp_sizes_enc", "commas"]),
    ({"tp_sizes_enc": "2,2,3,1"}, 8, ["tp_sizes_enc", "degree 3 does not divide the 4 devices of a stage"]),
    ({"tp_sizes_enc": "2,2,0,1"}, 8, ["degree 0"]),
    ({"checkpoint": "1,0"}, 8, ["checkpoint", "2 numbers", "4 layers"]),
    ({"use_sp": "0,2,0,0"}, 8, ["use_sp", "0 or 1"]),
    ({"tp_consecutive_flags": "1,1,0,1"}, 8, ["tp_consecutive_flags", "only 1", "neighbouring"]),
    ({"cp_sizes_enc": "1,2,1,1"}, 8, ["cp_sizes_enc", "ring attention"]),
    ({"pp_division": "2,1"}, 8, ["pp_division", "2 numbers with the sum 4"]),
    ({"pp_division": "4,0"}, 8, ["pp_division"]),
    ({"pp_division": "4"}, 8, ["pp_division"]),
    ({"pp_division": None, "pp_deg": 8}, 8, ["pp_deg", "more stages than layers (4)"]),
    ({"pipeline_type": "zb"}, 8, ["pipeline_type", "'zb'", "pipedream_flush, gpipe"]),
    ({"default_dp_type": "zero1"}, 8, ["default_dp_type", "ddp, zero2, zero3"]),
    ({"default_dp_type": ["ddp"]}, 8, ["default_dp_type", "ddp, zero2, zero3"]),
    ({"vtp": 3}, 8, ["vtp", "degree 3"]),
    ({"vsp": 2}, 8, ["vsp", "from 0 to 1"]),
    ({"chunks": 65}, 8, ["chunks", "= 65", "from 1 to 64"]),
    ({"global_bsz": 0}, 8, ["global_bsz"]),
]


@pytest.mark.parametrize(("changes", "devices", "words"), MISTAKES)
def test_one_error_for_each_mistake(tmp_path, changes, devices, words):
    with pytest.raises(GalvatronKeyError) as caught:
        read_galvatron_plan(written(tmp_path, **changes), devices)
    for word in ("plan.json", *words):
        assert word in str(caught.value)


def test_no_plan(tmp_path):
    for name in ("none.json", "no\0ne.json"):
        with pytest.raises(GalvatronFileError, match="cannot be read"):
            read_galvatron_plan(tmp_path / name)


def test_nothing_of_a_file_reaches_the_terminal(tmp_path):
    with pytest.raises(GalvatronKeyError) as caught:
        read_galvatron_plan(written(tmp_path, **{"\x1b[2Jkey": "\x1b]0;\x07"}), 8)
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)
