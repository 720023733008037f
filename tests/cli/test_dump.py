"""`fxpar dump`: stages, formats, files, big models without weights."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from fxpar.cli import request, source
from fxpar.ir.dist_config import DistConfig
from tests.cli.helpers import fxpar


@pytest.mark.parametrize(
    ("words", "head"),
    [
        ((), "fxpar logical graph of mlp\n"),
        (("-s", "tp2"), "fxpar exec graph of mlp\nstrategy tp2: mesh tp2, 2 ranks\n"),
        (("-s", "tp2", "--stage", "annotated"), "fxpar annotated graph of mlp\nstrategy tp2"),
        (("-s", "tp2", "--stage", "logical"), "fxpar logical graph of mlp\n"),
    ],
)
def test_stages(words, head):
    status, out, err = fxpar("dump", "mlp", *words)
    assert status == 0, err
    assert out.startswith(head)


def test_text_is_stable_and_plain():
    first, second = (fxpar("dump", "mlp", "-s", "dp2.tp2+zero3")[1] for _ in range(2))
    assert first == second
    assert "\x1b" not in first
    assert str(Path.cwd()) not in first


def test_fold_and_full_and_brief():
    words = ("dump", "mlp", "-s", "tp2", "--set", "layers=6")
    folded, full, brief = (fxpar(*words, *more)[1] for more in ((), ("--full",), ("--brief",)))
    assert len(folded.splitlines()) < len(full.splitlines())
    assert "body:" not in brief
    assert "collectives in order" in brief


def test_file(tmp_path):
    file = tmp_path / "graph.txt"
    status, out, _ = fxpar("dump", "mlp", "-o", file)
    assert (status, out) == (0, "")
    assert file.read_text().startswith("fxpar logical graph of mlp\n")


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (("dump", "mlp", "-s", "dp2.tp2.dp2"), ()),
        (("explain", "mlp", "-s", "dp2.tp2.dp2"), ()),
        (("diff", "mlp", "-s", "dp2.tp2.dp2", "-s", "dp4.tp2"), ("old",)),
    ],
)
def test_the_mesh_has_each_place_of_an_axis(words, at):
    """Else who reads it takes the ranks for others."""
    found = json.loads(fxpar(*words, "--json", "-")[1])
    for key in at:
        found = found[key]
    assert found["mesh"] == [["dp", 2], ["tp", 2], ["dp", 2]]


def test_json(tmp_path):
    file = tmp_path / "graph.json"
    status, out, _ = fxpar("dump", "llama", "-s", "dp2.tp2+sp", "--json", file)
    assert (status, out) == (0, "")
    data = json.loads(file.read_text())
    assert (data["model"], data["stage"], data["strategy"], data["world"]) == ("llama", "exec", "dp2.tp2+sp", 4)
    assert data["mesh"] == [["dp", 2], ["tp", 2]]
    assert data["dims"] == [{"name": "T", "example": 61, "minimum": 1, "maximum": None, "divisor": 2}]
    for key in ("capture_cpu_s", "annotate_cpu_s", "lower_cpu_s", "total_cpu_s"):
        assert data["timings"][key] > 0
    counts = {}
    for entry in data["collectives"]:
        counts[entry["kind"]] = counts.get(entry["kind"], 0) + 1
    assert counts == data["collective_counts"]
    assert abs(sum(entry["bytes"] for entry in data["collectives"]) - data["collective_bytes"]) <= len(
        data["collectives"]
    )
    by_name = {node["name"]: node for node in data["parts"]["body"]}
    mm = by_name["mm_0"]
    assert mm["target"] == "aten.mm.default"
    assert DistConfig.from_json(mm["dist"]).describe(mm["tensor"]["shape"]) == "f32[T, 64@tp]"
    assert all(arg[1:] in by_name for arg in mm["args"])
    assert data["inputs"][0]["local"] == {"dtype": "float32", "shape": [66, 64]}


def test_json_of_the_other_stages():
    logical = json.loads(fxpar("dump", "mlp", "--format", "json")[1])
    assert logical["strategy"] is None
    assert logical["nodes"] == len(logical["parts"]["step"])
    assert set(logical["timings"]) >= {"capture_cpu_s", "annotate_cpu_s", "lower_cpu_s"}
    annotated = json.loads(fxpar("dump", "mlp", "-s", "tp2", "--stage", "annotated", "--format", "json")[1])
    assert any("dist_in" in node for node in annotated["parts"]["step"])


def test_pipeline():
    words = ("dump", "llama", "-s", "pp2.tp2", "--brief")
    whole, second = fxpar(*words)[1], fxpar(*words, "--stage", "1")[1]
    head = "fxpar pipeline graph of llama\nstrategy pp2.tp2: mesh pp2 x tp2, 4 ranks\n"
    assert whole.startswith(head)
    assert second.startswith(head)
    assert ("stage 0:" in whole, "stage 1:" in whole) == (True, True)
    assert ("stage 0:" in second, "stage 1:" in second) == (False, True)
    assert "  1 on ranks 2-3, from layers.1, 51% of the FLOPs\n" in second
    assert re.search(r"%\w+ : f32\[1, T, 64\] to stage 0, 15,616 bytes", second)


def test_pipeline_json(tmp_path):
    file = tmp_path / "graph.json"
    status, _, err = fxpar("dump", "gpt", "-s", "dp2.pp2+zb_h1", "--json", file)
    assert status == 0, err
    data = json.loads(file.read_text())
    assert (data["schedule"], data["world"], len(data["cuts"])) == ("zb_h1", 4, 1)
    assert [stage["ranks"] for stage in data["stages"]] == [[0, 1], [2, 3]]
    assert [(m["from"], m["to"]) for m in data["messages"]] == [(0, 1), (1, 0)]
    assert data["shared_params"] == {"embedding.weight": [0, 1]}
    first, last = data["stages"]
    assert set(first["parts"]) >= {"forward", "backward"}
    assert data["nodes"] == first["nodes"] + last["nodes"]
    assert first["strategy"] == "dp2"
    assert all("local" in info for info in first["inputs"])
    assert {info["fqn"] for info in data["inputs"]} >= {i["fqn"] for i in last["inputs"] if i["kind"] == "param"}
    fxpar("dump", "gpt", "-s", "pp2", "--stage", "1", "--json", file)
    assert [stage["index"] for stage in json.loads(file.read_text())["stages"]] == [1]


def test_schedule(tmp_path):
    words = ("dump", "llama", "-s", "pp2", "--schedule")
    status, out, err = fxpar(*words, "--micro-batches", "4")
    assert status == 0, err
    head, first, second, summary = out.splitlines()
    assert head.startswith("llama under pp2; ")
    assert (first[:8], second[:8]) == ("rank 0  ", "rank 1  ")
    assert re.findall(r"[FB]\d", second) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert summary.endswith("most saved micro-batches by rank: 2, 1")
    data = json.loads(fxpar(*words, "--format", "json")[1])
    assert (data["schedule"], data["micro_batches"], data["peak_saved"]) == (
        "1f1b",
        4,
        [2, 1],
    )  # as many as `fxpar memory`
    assert data["ranks"][0][0]["action"] == "F0@0"
    assert data["makespan_ms"] == max(spans[-1]["end_ms"] for spans in data["ranks"])


def test_storage_dtype():
    _, out, _ = fxpar("dump", "mlp", "-s", "dp2", "--dtype", "bfloat16", "--storage", "float32", "--brief")
    assert "f32[72, 24]" in out
    _, out, _ = fxpar("dump", "mlp", "-s", "dp2", "--dtype", "bfloat16", "--brief")
    assert "bf16[72, 24]" in out


def test_override():
    words = ("dump", "mlp", "-s", "tp2", "--brief")
    assert "layers.*.weight  x1  f32[72@tp, 24]" in fxpar(*words)[1]
    assert "layers.*.weight  x1  f32[72, 24]" in fxpar(*words, "--override", "layers.0.weight=R@tp")[1]


def test_weights_are_on_meta(monkeypatch):
    seen = []

    def capture_model(model):
        seen.append({p.device.type for p in model.model.parameters()})
        return request.capture_model(model)

    monkeypatch.setattr(source, "capture_model", capture_model)
    fxpar("dump", "mlp", "--no-cache")
    assert seen == [{"meta"}]


@pytest.mark.slow
def test_8b_model_needs_no_weights():
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    begun = time.perf_counter()
    status, out, err = fxpar("dump", "hf:llama@8b", "-s", "dp4.tp8+sp", "--set", "num_hidden_layers=4", "--brief")
    assert status == 0, err
    assert "model.layers.*.mlp.up_proj.weight" in out
    assert "f32[14336@tp, 4096]   local f32[1792, 4096]" in out
    assert time.perf_counter() - begun < 120


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("mlp", "--stage", "exec"), 2, "stage exec needs a strategy"),
        (("mlp", "--stage", "annotated"), 2, "stage annotated needs a strategy"),
        (("mlp", "--stage", "final"), 2, "'final' is not one of"),
        (("mlp", "--stage", "0"), 2, "stage 0 needs a strategy"),
        (("llama", "-s", "pp2", "--stage", "2"), 1, "there is no pipeline stage 2: 'pp2' has stages 0 to 1"),
        (("llama", "-s", "tp2", "--stage", "0"), 1, "there is no pipeline stage 0: 'tp2' has none"),
        (("llama", "-s", "tp2", "--schedule"), 1, "strategy 'tp2' has no schedule"),
        (("llama", "--schedule"), 2, "it needs a strategy"),
        (("llama", "-s", "pp2", "--schedule", "--stage", "1"), 2, "it needs a strategy, and takes no --stage"),
        (("llama", "-s", "pp2", "--micro-batches", "4"), 2, "it only works together with --schedule"),
        (("llama", "-s", "pp3"), 1, "3 stages need 3 layers, there are 2"),
        (
            ("mlp", "-s", "pp2+interleaved_1f1b", "--set", "layers=4", "--schedule", "--micro-batches", "1"),
            1,
            "needs a multiple of 2 micro-batches, got 1",
        ),
        (("mlp", "--after", "casts"), 2, "it needs a strategy"),
        (("mlp", "-s", "tp2", "--after", "cast"), 1, "did you mean 'casts'"),
        (("mlp", "-s", "tp2", "--fqn", "layer.*"), 1, "no module or parameter matches 'layer.*'; did you mean 'layers"),
        (("mlp", "-s", "tp2", "--rank", "2"), 1, "there is no rank 2: 'tp2' has ranks 0 to 1"),
        (("mlp", "--rank", "0"), 1, "--rank is for a lowered graph"),
        (("mlp", "--format", "graph"), 1, "Add -o FILE.fxpar"),
        (("mlp", "-s", "tp2", "--rank", "0", "-o", "x.fxpar"), 1, "saves the whole graph"),
        (("mlp", "--format", "xml"), 2, "'xml' is not one of"),
        (("mlp", "-s", "tp2", "--world", "3"), 1, "needs 2 ranks"),
        (("mlp", "-s", "tpp2"), 1, "unknown axis 'tpp'"),
        (("llama", "-s", "pp2", "--stage", "annotated"), 1, "a graph of one mesh for 'pp2'"),
        (("mlp", "-s", "dp2", "--storage", "f8"), 1, "dtype 'f8' is not known"),
        (("mlp", "-o", "no/folder/x"), 1, "there is no folder"),
        (("mlp", "-s", "tp2", "--override", "x*=R@tp"), 1, "matches no parameter"),
    ],
)
def test_bad_input(words, status, message):
    found, out, err = fxpar("dump", *words)
    assert found == status
    assert out == ""
    assert message in err


def test_long_lines_end_between_words_on_a_terminal(monkeypatch, capsys):
    """In a pipe they stay as long as they are; numbers and names are the same."""
    _, piped, _ = fxpar("dump", "mlp", "-s", "tp2")
    assert max(map(len, piped.splitlines())) > 60
    terminal = Console(force_terminal=True, width=60)
    monkeypatch.setattr("fxpar.cli.dump.stdout_console", lambda: terminal)
    _, shown, _ = fxpar("dump", "mlp", "-s", "tp2")
    assert shown.split() == piped.split()
    assert all(len(line) <= 60 or " " not in line.strip() for line in shown.splitlines())
