"""`fxpar explain`: names, goldens, narrow terminals, bad input.

To accept a change of the goldens: EXPECTTEST_ACCEPT=1 pytest tests/cli/test_explain.py, then read the diff.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import pytest

from fxpar.annotate import annotate
from fxpar.annotate.driver import annotate_and_search
from fxpar.cli.explain_show import report
from fxpar.explain.subject import find, placed, vocabulary
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from tests.cli.helpers import fxpar

GOLDEN = Path(__file__).parents[1] / "golden"


@functools.cache
def file(tmp: Path) -> Path:
    path = tmp / "llama.fxpar"
    status, _, err = fxpar("dump", "llama", "-o", path)
    assert status == 0, err
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The logical graph of the tiny llama, in a file: read faster than captured."""
    return file(tmp_path_factory.mktemp("graphs"))


def explain(model: Path | str, *words: str) -> str:
    status, out, err = fxpar("explain", model, *words)
    assert status == 0, err
    return out


def answer(model: Path, *words: str) -> dict:
    return json.loads(explain(model, *words, "--json", "-"))


def compare_golden(name: str, text: str) -> None:
    path = GOLDEN / f"explain_{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(text)
    assert text == path.read_text()


def test_names_are_those_of_dump(model):
    known = placed(*annotate_and_search(pack_documents(load_graph(model)), Strategy.parse("tp2")))
    _, out, _ = fxpar("dump", model, "-s", "tp2", "--stage", "annotated", "--full")
    printed = set(re.findall(r"^ +%([\w.]+) : (?!int)", out, re.MULTILINE))
    assert printed <= set(vocabulary(known))
    assert all(find(known, name) is not None for name in printed)


# ------------------------------------------------------------------------------------------------------------- goldens
def test_golden_parameter(model):
    compare_golden("param", explain(model, "-s", "dp2.tp2+sp+zero1", "layers.*.ffn.down_proj.weight", "--passes"))


def test_golden_reshard(model):
    compare_golden("reshard", explain(model, "-s", "dp2.tp2", "all_reduce_2"))


def test_golden_summary(model):
    words = ("-s", "dp2.tp2+zero1", "--override", "*.o_proj.weight=R@tp", "--top", "5")
    compare_golden("summary", explain(model, *words))


# ------------------------------------------------------------------------------------------------------- what is asked
def test_node(model):
    document = answer(model, "-s", "tp2", "%mm_3")
    (value,) = document["answers"][0]["values"]
    (axis,) = value["axes"]
    (chosen,) = (a for a in axis["alternatives"] if a["chosen"])
    assert chosen["option"] == axis["chosen"] == "(S(1), S(0)) -> P"
    assert chosen["rule"] == "rules.matmul.mm_factors"
    assert chosen["price"] == {"bytes": 0, "moved_bytes": 0, "penalty_bytes": 0}
    assert all(a["price"]["bytes"] >= 0 for a in axis["alternatives"] if a["price"])
    (move,) = value["wanted_otherwise"]  # it is summed up before it is added to the residual
    assert [step["kind"] for step in move["steps"]] == ["all_reduce"]
    (wants,) = answer(model, "-s", "tp2", move["users"][0]["node"])["answers"][0]["values"][0]["wants_otherwise"]
    assert wants == move  # seen from the other side


def test_a_term_that_is_added_to_others_before_the_sum(model):
    """Of the gradient of what two products read."""
    (value,) = answer(model, "-s", "tp2", "%mm_20")["answers"][0]["values"]
    (move,) = value["summed_later"]
    assert {term["module"].split(".")[-1] for term in move["terms"]} == {"gate_proj", "up_proj"}
    assert [step["kind"] for step in move["steps"]] == ["all_reduce"]
    (same,) = answer(model, "-s", "tp2", move["value"])["answers"][0]["values"][0]["wanted_otherwise"]
    assert same == move
    (wants,) = answer(model, "-s", "tp2", move["users"][0]["node"])["answers"][0]["values"][0]["wants_otherwise"]
    assert wants == move  # seen from the other side


def test_module_and_globs(model):
    (whole,) = answer(model, "-s", "tp2", "layers.0.ffn")["answers"]
    assert whole["kind"] == "module"
    assert [p["name"].split(".")[-2] for p in whole["params"]] == ["gate_proj", "up_proj", "down_proj"]
    assert {m["module"].split(".")[1] for m in whole["moves"]} == {"0"}
    assert "3 parameters\n" in explain(model, "-s", "tp2", "layers.0.ffn")
    (both,) = answer(model, "-s", "tp2", "layers.*.ffn")["answers"]
    assert [p["count"] for p in both["params"]] == [2, 2, 2]
    (params,) = answer(model, "-s", "tp2", "layers.1.ffn.*.weight")["answers"]
    assert [v["name"] for v in params["values"]] == [p["name"].replace("layers.0", "layers.1") for p in whole["params"]]


def test_no_axis_no_choice(model):
    (value,) = answer(model, "-s", "dp2", "head.weight")["answers"][0]["values"]
    assert (value["axes"], value["undecided_axes"]) == ([], ["dp"])


def test_a_rule_says_whether_there_is_something_to_decide(model):
    """Where its modules cut weights, and the strategy none; and the other way round."""
    none = "nothing to decide"
    for text, ffn, head in (("cp2[*.ffn: tp2+sp]", "search", none), ("tp2+sp[*.ffn: cp2]", none, "search")):
        for fqn, by in (("layers.0.ffn.up_proj.weight", ffn), ("head.weight", head)):
            (one,) = answer(model, "-s", text, fqn)["answers"]
            assert one["values"][0]["decided"]["by"] == by


def test_override(model):
    words = ("-s", "tp2", "--override", "*.down_proj.weight=R@tp", "layers.0.ffn.down_proj.weight")
    (value,) = answer(model, *words)["answers"][0]["values"]
    assert value["decided"] == {"by": "override", "glob": "*.down_proj.weight", "placement": "R@tp"}
    assert "set by override *.down_proj.weight=R@tp" in explain(model, *words)


def test_what_an_axis_does_not_shard_is_said(model):
    """Of the strategy as a whole and of a parameter, once for all stages."""
    for words in (("-s", "tp3"), ("-s", "tp3", "layers.0.attention"), ("-s", "pp2.tp3", "layers.*.attention")):
        out = explain(model, *words)
        assert out.count("note: tp does not shard the attention of layers.*.attention: 4 query and 2 ") == 1, out


def test_passes():
    words = ("-s", "dp2+zero1", "--dtype", "bfloat16", "--storage", "float32", "*.weight", "--passes")
    out = explain("mlp", *words)
    assert "casts: prologue._to_copy_" in out
    assert "zero_shard" in out
    assert "reduce_gradients" in out


# ----------------------------------------------------------------------------------------------------------- pipelines
def test_pipeline(model):
    (found,) = answer(model, "-s", "pp2.tp2", "head.weight")["answers"]
    assert found["stage"] == 1
    assert [a["stage"] for a in answer(model, "-s", "pp2.tp2", "layers.*.ffn")["answers"]] == [0, 1]
    assert answer(model, "-s", "pp2.tp2", "mm_0", "--stage", "1")["answers"][0]["stage"] == 1
    (found,) = answer(model, "-s", "pp2.rows2[layers.0: tp2]", "head.weight")["answers"]  # bins, a rule of one stage
    assert found["stage"] == 1
    summary = answer(model, "-s", "pp2.tp2")
    assert summary["messages"] == 2
    (collective,) = answer(model, "-s", "pp2.tp2", "forward.all_reduce_0", "--stage", "1")["answers"]
    assert collective["comes_from"][0]["module"].startswith("layers.1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-s", "tp2", "mm_333"), "did you mean 'mm_33'"),
        (("-s", "tp2", "layers.0.atention"), "did you mean 'layers.0.attention'"),
        (("-s", "tp2", "all_reduce_99"), "has nothing called 'all_reduce_99'; did you mean 'all_reduce_9'"),
        (("-s", "pp2", "mm_0"), "'mm_0' is on stages 0, 1. Add --stage N"),
        (("-s", "pp2", "mm_0", "--stage", "2"), "there is no pipeline stage 2"),
        (("-s", "tp2", "mm_0", "--stage", "0"), "there is no pipeline stage 0"),
        ((), "needs a strategy"),
        (("-s", "tp2", "--json", "no/such/folder.json"), "there is no folder"),
    ],
)
def test_bad_input(model, words, message):
    status, out, err = fxpar("explain", model, *words)
    assert (status, out) == (1, "")
    assert message in err


# --------------------------------------------------------------------------------------------------------- graph files
def test_a_lowered_graph_alone(model, tmp_path):
    """What it does not say is said once; with its origin in the file it says all."""
    program, path = lower(load_graph(model), "dp2.tp2+zero1"), tmp_path / "exec.fxpar"
    save_graph(path, program)
    out = explain(path, "head.weight")
    assert out.count("alternatives and prices cannot be computed") == 1
    assert "stored as f32[131@tp@dp, 64]" in out
    assert "zero_shard and bucket_collectives" in out
    assert explain(path) == explain(model, "-s", "dp2.tp2+zero1")
    assert "moves activations" in explain(path, "all_reduce_2")
    status, _, err = fxpar("explain", path, "mm_3")
    assert (status, "has nothing called 'mm_3'" in err) == (1, True)
    whole = tmp_path / "whole.fxpar"
    assert fxpar("dump", "llama", "-s", "dp2.tp2+zero1", "-o", whole)[0] == 0
    assert "S(1)" in explain(whole, "head.weight")


def test_an_annotated_graph_alone(model, tmp_path):
    path = tmp_path / "annotated.fxpar"
    save_graph(path, annotate(load_graph(model), Strategy.parse("tp2")))
    out = explain(path, "mm_3")
    assert out.count("alternatives and prices cannot be computed") == 1
    assert "by all_reduce on tp" in out
    assert fxpar("explain", path, "mm_3", "-s", "tp4")[0] == 1


# ------------------------------------------------------------------------------------------------------------- display
@pytest.mark.parametrize(
    "words", [("-s", "dp2.tp2+sp"), ("-s", "tp2+sp", "layers.*.q_proj.weight"), ("-s", "cp2", "layers.1")]
)
def test_sixty_columns(model, words):
    document = answer(model, *words)
    wide = "\n".join(line.text for line in report(document))
    narrow = [line.text for line in report(document, 60)]
    assert all(len(line) <= 60 or " " not in line.strip() for line in narrow)
    number = re.compile(r"[\d.]+(?: [kMG]?B|%)")
    assert sorted(number.findall(wide)) == sorted(number.findall(" ".join(" ".join(narrow).split())))


def test_piped_text_is_plain(model):
    out = explain(model, "-s", "tp2", "head.weight")
    assert "\x1b" not in out
    assert "price" in out


def test_padded_tokens_are_said():
    """Figures are for as many tokens as a run has, and both are said."""
    for tokens, said in ((61, "(example: T=61, figures are for 64): "), (64, "(example: T=64): ")):
        status, out, err = fxpar("explain", "llama", "-s", "cp4", "--tokens", tokens)
        assert status == 0, err
        assert said in out
    out = fxpar("dump", "llama", "-s", "cp4", "--brief", "--tokens", "61")[1]
    assert "dim T: 61 in the example, padded to a multiple of 4 when it runs; figures are for 64\n" in out
    out = fxpar("dump", "llama", "-s", "cp4", "--brief", "--tokens", "64")[1]
    assert "padded to a multiple of 4 when it runs\n" in out
