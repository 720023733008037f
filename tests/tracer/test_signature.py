"""Where a model is traced: calls like an earlier one are not computed again, and the graph is the same."""

from __future__ import annotations

import pytest
from torch import nn
from torch._subclasses import FakeTensorMode

from fxpar import losses
from fxpar.ir.printer import format_graph
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.torch_api.fake_calls import RepeatingFakeMode
from fxpar.tracer import capture
from tests.captured import Mlp, squared, tokens, vectors

MODELS = {
    "mlp": lambda: (Mlp(nn.functional.gelu, (6, 6, 6, 6)), squared, vectors(6, 6, 5)[0]),
    "llama": lambda: (Llama(LlamaOptions(2, 16, 4, 2, 24, 31)), losses.causal_lm, tokens(31, 9, rows=2)[0]),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_captured_is_the_same(name, monkeypatch):
    graphs, computed = [], []
    compute = FakeTensorMode._dispatch_impl

    def counted(*args):
        computed[-1] += 1
        return compute(*args)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", counted)
    for remembering in (True, False):
        if not remembering:
            monkeypatch.setattr(RepeatingFakeMode, "_remember", lambda *_: None)
        computed.append(0)
        graphs.append(format_graph(capture(*MODELS[name]()), fold=False))
    assert graphs[0] == graphs[1]
    assert computed[0] < (1.0 if name == "mlp" else 0.7) * computed[1]
