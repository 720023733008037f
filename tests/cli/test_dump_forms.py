"""`fxpar dump`: a rank's view, modules by glob, DOT, the graph behind each pass."""

from __future__ import annotations

import json
import re

import pytest

from fxpar.cli.after_pass import step_name
from fxpar.cli.commands import DumpRequest
from fxpar.cli.options import GraphSource
from fxpar.lowering.ladder import default_passes
from tests.cli.helpers import fxpar


def test_as_a_rank_runs_it():
    status, out, err = fxpar("dump", "llama", "-s", "dp2.tp2+sp", "--rank", "2")
    assert status == 0, err
    head = "as rank 2: dp 1, tp 0\nprocess group @dp: ranks 0, 2\nprocess group @dp.tp: ranks 0-3\n"
    assert out.startswith(head + "process group @tp: ranks 2, 3\n")
    assert "ranks 2, 3)" in out
    assert not re.search(r"[(,] [@#]\w", out), "a token is left"
    data = json.loads(fxpar("dump", "llama", "-s", "dp2.tp2+sp", "--rank", "2", "--json", "-")[1])
    assert data["as_rank"] == {
        "rank": 2,
        "coordinate": {"dp": 1, "tp": 0},
        "groups": {"dp": [0, 2], "dp.tp": [0, 1, 2, 3], "tp": [2, 3]},
        "stages": [],
    }


def test_a_rank_of_a_pipeline_has_its_stages():
    out = fxpar("dump", "llama", "-s", "pp2.dp2", "--rank", "3", "--brief")[1]
    assert out.startswith("as rank 3: pp 1, dp 1, pipeline stage 1\nprocess group @dp: ranks 2, 3\n")
    assert re.findall(r"^stage (\d):$", out, re.MULTILINE) == ["1"]


def test_modules_by_glob():
    out = fxpar("dump", "llama", "-s", "tp2", "--fqn", "layers.1.attention")[1]
    assert "-- layers.1\n" in out
    assert "layers.*.attention.q_proj.weight  x1" in out
    assert "ffn" not in out.replace("ffn_norm", "")
    data = json.loads(fxpar("dump", "llama", "-s", "tp2", "--fqn", "layers.*.ffn*", "--json", "-")[1])
    found = {node["fqn"] for nodes in data["parts"].values() for node in nodes}
    assert found
    assert all(re.match(r"layers\.\d\.ffn", fqn) for fqn in found)


def test_dot():
    text = fxpar("dump", "llama", "-s", "dp2.tp2", "--format", "dot")[1]
    assert text.startswith('digraph "llama" {')
    assert text.count("{") == text.count("}")
    assert 'subgraph "cluster 0.body layers.1.attention" { label="layers.1.attention";' in text
    ids = set(re.findall(r'^ +("0\.\S+ [^"]+") \[label', text, re.MULTILINE))
    edges = re.findall(r'^  ("[^"]+") -> ("[^"]+");', text, re.MULTILINE)
    assert edges
    assert {end for edge in edges for end in edge} <= ids
    assert "%all_reduce_0 = all_reduce" in text
    stages = fxpar("dump", "llama", "-s", "pp2", "--format", "dot", "--stage", "1")[1]
    assert 'label="body"' not in stages
    assert '"0.forward' in stages


def test_after_each_pass():
    """By name or number; the collectives appear with the pass that makes them."""
    before = fxpar("dump", "mlp", "-s", "tp2", "--after", "annotate")[1]
    assert before.startswith("fxpar annotated graph of mlp")
    assert "all_reduce" not in before
    names = [step.name for step in default_passes()]
    number = names.index("lower_collectives") + 1
    by_name = fxpar("dump", "mlp", "-s", "tp2", "--after", "lower_collectives")[1]
    assert by_name == fxpar("dump", "mlp", "-s", "tp2", "--after", str(number))[1]
    assert "all_reduce" in by_name
    assert step_name("0") == "annotate"
    assert fxpar("dump", "llama", "-s", "pp2", "--after", "casts", "--stage", "1")[0] == 0


@pytest.mark.parametrize("words", [("--full",), ("--brief",), ("--format", "json")])
def test_plain_in_a_pipe(words):
    out = fxpar("dump", "mlp", "-s", "tp2", *words)[1]
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("file", "form"), [("g.json", "json"), ("g.DOT", "dot"), ("g.fxpar", "graph"), ("g.txt", "text"), ("g", "text")]
)
def test_the_form_is_that_of_the_name(file, form):
    assert DumpRequest(GraphSource("mlp"), output=file).form == form
    assert DumpRequest(GraphSource("mlp"), output=file, format="text").form == "text"
