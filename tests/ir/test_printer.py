"""The text form: goldens of seven strategies, folding, names, and that nothing of the machine gets in.

To accept a change of the goldens: EXPECTTEST_ACCEPT=1 pytest tests/ir/test_printer.py, then read the diff.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.annotate import annotate
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import canonical, format_graph, format_part, parts, runs, without_folders
from fxpar.ir.printer_tables import columns
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.tracer import capture
from tests.captured import squared, take, vectors

GOLDEN = Path(__file__).parents[1] / "golden"
STRATEGIES = ["dp2", "tp2", "tp2+sp", "cp2", "dp2.tp2+sp+zero3", "dp4+zero1"]


@functools.cache
def logical() -> LogicalGraph:
    """Two layers."""
    model = load("llama", device="meta")
    return capture(model.model, model.loss_fn, model.example_batch, name=model.name)


@functools.cache
def gpt() -> LogicalGraph:
    model = load("gpt", device="meta")
    return capture(model.model, model.loss_fn, model.example_batch, name=model.name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_golden(strategy):
    """Header, parameters, collectives, and the nodes of the second layer's forward."""
    program = lower(logical(), strategy)
    body = next(part for part in parts(program) if part.name == "body")
    layer = takewhile(lambda line: line != "-- layers.1, backward", format_part(body, fqn="layers.1"))
    lines = [format_graph(program, nodes=False), "forward of the second layer:", *layer]
    compare(strategy, "\n".join(lines) + "\n")


def test_golden_pipeline():
    """Stages, messages, parameters, collectives, and the forward of the second stage with what it is given."""
    program = lower(logical(), "pp2.tp2")
    assert isinstance(program, PipelineGraph)
    forward = next(part for part in parts(program.stages[1]) if part.name == "forward")
    lines = [format_graph(program, nodes=False), "forward of the second stage:", *format_part(forward)]
    compare("pp2.tp2", "\n".join(lines) + "\n")


def test_one_stage_or_all():
    program = lower(logical(), "pp2+zb_h1")
    assert isinstance(program, PipelineGraph)
    whole, first, second = (format_graph(program, stage=stage) for stage in (None, 0, 1))
    assert first.endswith("collectives (one micro-batch, T=61; bytes that one rank sends):\n  none\n")
    assert whole == first + "\n" + second[second.index("stage 1:") :]
    sent = [fqn for stage in program.stages for kind in ("sent", "sent_grad") for fqn in stage.given(kind)]
    assert all(f"    %{fqn} : f32[1, T, 64] to stage" in whole for fqn in sent)


def test_tied_weights_are_named():
    assert format_graph(lower(gpt(), "pp2"), nodes=False).count("embedding.weight is on other stages too") == 2


def compare(name: str, text: str) -> None:
    """With what the golden file holds."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        file.write_text(text)
    expected = file.read_text() if file.exists() else ""
    diff = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm="", n=1))
    assert text == expected, f"accept with EXPECTTEST_ACCEPT=1 if it is meant:\n{diff}"


def test_two_captures_print_alike():
    assert format_graph(gpt.__wrapped__()) == format_graph(gpt())


@pytest.mark.parametrize("stage", ["logical", "annotated", "exec"])
def test_every_node_has_a_line(stage):
    graph = {"logical": lambda: logical(), "annotated": _annotated, "exec": lambda: lower(logical(), "dp4+zero1")}[
        stage
    ]()
    text = format_graph(graph, fold=False)
    calls = sum(node.op == "call_function" for part in parts(graph) for node in part.graph.nodes)
    assert len(re.findall(r"^  %\S+ : .+ = \S+\(", text, re.MULTILINE)) == calls
    assert text.startswith(f"fxpar {stage} graph of llama\n")


def _annotated():
    return annotate(logical(), Strategy.parse("tp2+sp"))


def test_annotated_graph_says_what_must_move():
    text = format_graph(_annotated())
    assert re.search(r"%embedding_0 : f32\[1, T, 64\] P\(tp\) = embedding\(", text)
    assert "wants %embedding_0 as f32[1, T@tp, 64]" in text
    assert re.search(r"operands to move:\n +\d+ x ", text)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_equal_layers_fold():
    graph = take(Layers(), squared, vectors(6, 6, 12)).graph
    text, full = format_graph(graph), format_graph(graph, fold=False)
    assert "-- layers.1 .. layers.4: as layers.0 (" in text
    assert ", x4)" in text
    assert "-- layers.3, backward .. layers.0, backward: as layers.4, backward (" in text
    assert "%layers.3.0.weight)" not in text
    assert "%layers.3.0.weight)" in full
    assert re.search(r"layers\.\*\.\*\.weight +x5  f64\[9, 6\]", text)


def test_folded_run_differs_by_one_operand():
    same = ["%add_1 : f32[4] = add(%mul_1, %layers.0.w)", "%add_2 : f32[4] = add(%add_1, %x)"]
    like = ["%add_7 : f32[4] = add(%mul_4, %layers.1.w)", "%add_8 : f32[4] = add(%add_7, %x)"]
    other = ["%add_7 : f32[4] = add(%mul_4, %layers.1.w)", "%add_8 : f32[4] = add(%mul_4, %x)"]
    assert list(canonical(same, "layers.0")) == list(canonical(like, "layers.1"))
    assert list(canonical(same, "layers.0")) != list(canonical(other, "layers.1"))


def test_runs_follow_blocks_and_direction():
    titles = [run.title for run in runs(logical().gm.graph)]
    assert titles[:3] == ["outside of blocks", "layers.0", "layers.1"]
    assert titles.index("layers.1, backward") < titles.index("layers.0, backward")


def test_short_interruptions_do_not_cut_a_run():
    graph = fx.Graph()
    for fqn, count in (("layers.0.a", 8), ("head", 2), ("layers.0.b", 3), ("layers.1.a", 2), ("head", 2)):
        for _ in range(count):
            graph.call_function(torch.neg).meta["fqn"] = fqn
    assert [(run.title, len(run.nodes)) for run in runs(graph)] == [
        ("layers.0", 13),
        ("layers.1", 2),
        ("outside of blocks", 2),
    ]


def test_parameters_of_an_exec_graph_show_their_local_shape():
    text = format_graph(lower(logical(), "tp2"), nodes=False)
    assert re.search(r"embedding\.weight +x1  f32\[131@tp, 64\]   local f32\[66, 64\]", text)
    assert re.search(r"layers\.\*\.attention_norm\.weight +x2  f32\[64\]\n", text)


def test_table_adds_up():
    program = lower(logical(), "dp2.tp2+sp")
    rows = re.findall(r"^  (?:body|prologue|epilogue) +(\w+) +\S+ +(\d+) +\d+ +([\d,]+)$", format_graph(program), re.M)
    assert sum(int(count) for _, count, _ in rows) == sum(program.collectives().values())
    total = sum(int(sent.replace(",", "")) for _, _, sent in rows)
    assert abs(total - program.collective_bytes()) <= len(rows)


def test_no_machine_paths():
    assert (
        without_folders("op x (first at /usr/lib/python/models/llama.py:41) has") == "op x (first at llama.py:41) has"
    )
    assert without_folders(r"at C:\models\llama.py:41") == "at llama.py:41"


def test_sources_are_file_names():
    graph = logical()
    node = next(n for n in graph.gm.graph.nodes if n.op == "call_function")
    before = node.meta.get("source")
    node.meta["source"] = "/somewhere/else/model.py:7"
    try:
        text = format_graph(graph)
    finally:
        node.meta["source"] = before
    assert "# model.py:7" in text
    assert "somewhere" not in text


def test_columns_align():
    assert columns([("a", "1"), ("bcd", "22")], right=(1,)) == ["  a     1", "  bcd  22"]
