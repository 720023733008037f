"""Graph modules write their Python code when somebody reads or calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from fxpar.checking.widen import widen
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering.pipeline import cut
from fxpar.passes.pack_documents import pack_documents
from fxpar.precision import with_precision
from fxpar.runtime.compiling import as_precision
from fxpar.torch_api.modules import lazy_module
from tests.captured import llama


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Graphs whose code was written."""
    found, write = [], fx.Graph.python_code

    def python_code(graph: fx.Graph, *args, **options):
        found.append(graph)
        return write(graph, *args, **options)

    monkeypatch.setattr(fx.Graph, "python_code", python_code)
    return found


def add_one() -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    return graph


@pytest.mark.parametrize("use", [lambda module: module(torch.ones(2)), lambda module: module.code, str])
def test_whoever_reads_or_calls_it_gets_it_once(use, written):
    module = lazy_module(nn.Module(), add_one())
    assert written == []
    use(module)
    assert module(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "torch.add" in module.code
    assert len(written) == 1


def read(graph: LogicalGraph, folder: Path) -> LogicalGraph:
    save_graph(folder / "g.fxpar", graph)
    return load_graph(folder / "g.fxpar")


MAKERS = {
    "read": read,
    "packed": lambda graph, _: pack_documents(graph, force=True),
    "wide": lambda graph, _: widen(graph),
    "in bf16": lambda graph, _: with_precision(graph, as_precision("bf16")),
    "a stage": lambda graph, _: cut(graph, Strategy.parse("pp2")).stages[0],
}


@pytest.mark.parametrize("name", MAKERS)
def test_graphs_that_are_walked_have_none(name, written, tmp_path):
    graph = llama(layers=2, dtype=torch.float32).graph
    written.clear()
    made = MAKERS[name](graph, tmp_path)
    assert made.gm is not graph.gm
    assert written == []
