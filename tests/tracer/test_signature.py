"""Where a model is traced: results of ops are kept where layers repeat often enough to be met again."""

from __future__ import annotations

import pytest
from torch import nn

from fxpar.ir.printer import format_graph
from fxpar.tracer import capture, signature
from fxpar.tracer.signature import make_world
from tests.captured import Mlp, squared, vectors


@pytest.mark.parametrize(("layers", "kept"), [(1, False), (63, False), (64, True)])
def test_results_are_kept_for_models_of_many_modules(layers, kept):
    """The container is a module too."""
    assert make_world(nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))).mode.cache_enabled == kept


def test_what_is_captured_is_the_same(monkeypatch):
    found = []
    for most in (0, 1000):
        monkeypatch.setattr(signature, "_MODULES_OF_FEW_LAYERS", most)
        graph = capture(Mlp(nn.functional.gelu, (6, 6, 6, 6)), squared, vectors(6, 6, 5)[0])
        found.append(format_graph(graph, fold=False))
    assert found[0] == found[1]
