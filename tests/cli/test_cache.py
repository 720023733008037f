"""The cache of captures: found again while nothing changed, and only then."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from fxpar.annotate import driver
from fxpar.cli import cache as cache_module
from fxpar.cli import source as source_module
from fxpar.cli.cache import CaptureCache
from fxpar.cli.source import (
    GraphSource,
    read_annotated,
    read_for_store,
    read_layouts,
    read_logical,
    read_lowered,
    read_origin,
    rows_once,
)
from fxpar.errors import FxparWarning, warn
from fxpar.ir.printer import format_graph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models.user_function import run_file
from fxpar.switch import layout_of
from tests.cli.helpers import fxpar

MODEL = """
from torch import nn
import torch
from fxpar import losses
from sizes import WIDTH

def make(out: int = 4):
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, out))
    batch = {"x": torch.randn(5, 6), "labels": torch.randint(0, 4, (5,))}
    return model, lambda model, batch: losses.cross_entropy_sum(model(batch["x"]), batch["labels"]), batch
"""


@pytest.fixture
def captures(monkeypatch, tmp_path):
    """How many captures there were, in a cache of its own."""
    monkeypatch.setattr(cache_module, "default_cache_dir", lambda: tmp_path / "cache")
    seen = []
    real = source_module.capture_model
    monkeypatch.setattr(source_module, "capture_model", lambda model: (seen.append(model.name), real(model))[1])
    return seen


@pytest.fixture
def user_model(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "sizes.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield GraphSource("mine.py:make")
    import sys

    sys.modules.pop("sizes", None)


def test_a_model_is_captured_once(captures):
    source, tp2 = GraphSource("mlp"), Strategy.parse("tp2")
    first = read_logical(source)
    assert format_graph(read_logical(source)) == format_graph(first)
    lowered = read_lowered(source, tp2)
    assert read_lowered(source, tp2).fingerprint() == lowered.fingerprint()
    assert read_annotated(source, tp2).strategy == tp2
    assert read_origin(source, lowered).batches[0]["x"].shape[1] == 24
    assert captures == ["mlp"]


def test_layouts_are_those_of_the_programs_of_a_run(captures):
    source, strategies = GraphSource("mlp"), [Strategy.parse(text) for text in ("dp2.tp2+zero3", "pp2.tp2", "dp4")]
    expected = [layout_of(read_for_store(source, strategy)) for strategy in strategies]
    assert [one.params for one in read_layouts(source, strategies[:2])] == expected[:2]
    assert [one.params for one in read_layouts(source, strategies)] == expected  # two of them from the cache
    assert captures == ["mlp"]
    assert [one.params for one in read_layouts(replace(source, cache=False), strategies)] == expected
    assert captures == ["mlp"] * 2


def test_other_words_are_other_entries(captures):
    read_logical(GraphSource("mlp"))
    read_logical(GraphSource("mlp", dtype="float64"))
    read_logical(GraphSource("mlp", options=("dim=48",)))
    read_logical(GraphSource("mlp", cache=False))
    assert captures == ["mlp"] * 4
    source, tp2 = GraphSource("mlp"), Strategy.parse("tp2")
    whole = replace(tp2, overrides=(("layers.0.weight", "R@tp"),))
    programs = [read_lowered(source, s) for s in (tp2, whole)] + [read_lowered(replace(source, storage="float64"), tp2)]
    assert len({format_graph(program) for program in programs}) == 3


def test_a_changed_file_of_the_user_counts(captures, user_model, tmp_path):
    """Also one that the model's file imports."""
    read_logical(user_model)
    read_logical(user_model)
    assert len(captures) == 1
    (tmp_path / "sizes.py").write_text("WIDTH = 10\n")
    read_logical(user_model)
    (tmp_path / "mine.py").write_text(MODEL.replace("ReLU", "GELU"))
    read_logical(user_model)
    assert len(captures) == 3
    manifest = json.loads(next((tmp_path / "cache" / "graphs").glob("*.json")).read_text())
    assert {os.path.basename(path) for path in manifest["files"]} >= {"mine.py", "sizes.py"}


def test_a_rule_of_the_user_counts(captures, user_model, tmp_path):
    """Also where the capture is in the cache, and the model is not called again."""
    from fxpar.rules.table import TABLE, aten

    read_logical(user_model)
    rule = "\nfrom fxpar.rules.table import TABLE, OpRule, aten\n"
    rule += "TABLE[aten.relu.default] = OpRule(lambda *args: [])\n"
    (tmp_path / "mine.py").write_text(MODEL + rule)
    before = TABLE.get(aten.relu.default)
    try:
        read_logical(user_model)
        TABLE.pop(aten.relu.default)
        run_file.cache_clear()  # as in another process
        read_lowered(user_model, Strategy.parse("tp2"))
        assert aten.relu.default in TABLE
    finally:
        TABLE.pop(aten.relu.default, None)
        if before is not None:
            TABLE[aten.relu.default] = before
    assert len(captures) == 2


def test_a_change_of_fxpar_counts(captures, monkeypatch):
    read_logical(GraphSource("mlp"))
    monkeypatch.setattr(cache_module, "_own_digest", lambda: "another")
    read_logical(GraphSource("mlp"))
    assert len(captures) == 2


def test_warnings_are_issued_again(captures):
    for _ in range(2):
        status, _, err = fxpar("dump", "mlp", "-s", "tp2", "--brief", "-o", os.devnull)
        assert status == 0, err
    cache = CaptureCache.of_user({"model": "x"})
    cache.write("1", {}, 5, ["take care"])
    with pytest.warns(UserWarning, match="take care"):
        assert cache.read("1", {}) == 5


def test_rows_are_read_once_and_their_warnings_kept_with_all_that_is_made_of_them(captures, monkeypatch):
    source = GraphSource("mlp")
    read, real = [], source_module.read_rows

    def counted(source):
        read.append(source)
        warn("a word about the model")
        return real(source)

    monkeypatch.setattr(source_module, "read_rows", counted)
    searched, search = [], driver.search_placements
    monkeypatch.setattr(
        driver, "search_placements", lambda graph: searched.append(str(graph.strategy)) or search(graph)
    )
    rows = rows_once(source)
    assert not read
    strategies = [Strategy.parse(text) for text in ("dp2", "tp2", "dp2+zero3")]
    for _ in range(2):  # lowered, then from the cache
        for strategy in strategies:
            with pytest.warns(FxparWarning, match="a word about the model"):
                read_lowered(source, strategy, rows)
            with pytest.warns(FxparWarning, match="a word about the model"):
                read_for_store(source, strategy, rows=rows)
        assert len(read) == len(captures) == 1
        assert searched == ["dp2", "tp2"]  # ZeRO places every value alike, and so does a store
        rows = rows_once(source)
    monkeypatch.undo()
    alone = lower(real(source), strategies[2], for_store=True)
    assert read_for_store(source, strategies[2]).fingerprint() == alone.fingerprint()


def test_a_damaged_or_missing_cache_is_no_error(captures, tmp_path):
    read_logical(GraphSource("mlp"))
    for path in (tmp_path / "cache" / "graphs").iterdir():
        path.write_bytes(b"damaged")
    read_logical(GraphSource("mlp"))
    assert len(captures) == 2


def test_a_folder_that_cannot_be_written_is_no_error(captures, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache_module, "default_cache_dir", lambda: tmp_path / "file")
    read_logical(GraphSource("mlp"))
    read_logical(GraphSource("mlp"))
    assert len(captures) == 2


def test_old_entries_go(captures, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_module, "MOST_ENTRIES", 4)
    cache = CaptureCache.of_user({"model": "x"})
    cache.note([])
    for i in range(9):
        cache.write(str(i), {}, i)
    assert len(list((tmp_path / "cache" / "graphs").iterdir())) == 4
    assert cache.read("8", {}) == 8


@pytest.mark.parametrize("strategy", ["tp2", "pp2"])
def test_a_prediction_of_memory_is_kept(captures, monkeypatch, strategy):
    """The second time nothing runs on the meta device, and other tokens are another prediction."""
    words = ("memory", "mlp", "-s", strategy)
    first = fxpar(*words)
    assert first[0] == 0
    again = RuntimeError("predicted again")
    monkeypatch.setattr("fxpar.cli.memory.predict_memory", lambda *args, **options: (_ for _ in ()).throw(again))
    assert fxpar(*words) == first
    assert "predicted again" in fxpar(*words, "--tokens", "32")[2]


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "mlp", "-s", "tp2"),
        ("viz", "mlp", "-s", "tp2,dp2", "-o", "-"),
        ("diff", "mlp", "-s", "tp2", "-s", "dp2"),
    ],
)
def test_an_answer_is_kept(captures, monkeypatch, words):
    """The second time no graph is read, and another question is answered anew."""
    first = fxpar(*words)
    assert first[0] == 0
    again = RuntimeError("read again")
    monkeypatch.setattr(CaptureCache, "read", lambda *args: (_ for _ in ()).throw(again))
    assert fxpar(*words) == first
    assert "read again" in fxpar(*words[:3], "tp4", *words[4:])[2]
    assert captures == ["mlp"]


def test_a_damaged_answer_is_made_again(captures, tmp_path):
    words = ("explain", "mlp", "-s", "tp2")
    first = fxpar(*words)
    (entry,) = (tmp_path / "cache" / "graphs").glob("*.answer")
    entry.write_bytes(entry.read_bytes()[:40])
    assert fxpar(*words) == first
    assert captures == ["mlp"]
