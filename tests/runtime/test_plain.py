"""`model(x)`, `loss.backward()` with the loss outside: values and gradients equal eager's under every strategy."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.errors import CallMismatchError, PadError, StaleWeightsError, UnsupportedOpError
from fxpar.graph import ForwardGraph
from fxpar.lowering import lower_forward
from fxpar.models import load
from fxpar.runtime.plain import PlainRunner
from fxpar.tracer import capture_forward
from fxpar.widen import widen
from tests.captured import Counter, Norms
from tests.forwards import STRATEGIES, check, eager, error, gathered, local_params, on_ranks, run, token_mean

KEYS = {"vit": ("pixel_values",), "mlp": ("x",)}


@dataclass(frozen=True)
class Case:
    """A model in float64, its forward, two batches of different lengths."""

    model: nn.Module
    graph: ForwardGraph
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batches: tuple[dict[str, Tensor], ...]
    keys: tuple[str, ...]


@functools.cache
def case(spec: str, **options: str) -> Case:
    sizes = (6, 4) if spec in KEYS else (13, 22)
    loaded = load(spec, dtype=torch.float64, tokens=sizes, options=options)
    keys = KEYS.get(spec, ("input_ids", "position_ids"))
    batches = tuple(dict(b) for b in loaded.batches[:2])
    graph = capture_forward(loaded.model, [batches[0][key] for key in keys])
    return Case(loaded.model, graph, loaded.params(), loaded.buffers(), batches, keys)


@functools.cache
def truth(spec: str, count: int, **options: str) -> Any:
    one = case(spec, **options)
    return eager(one.model, one.batches[:count], token_mean, one.keys)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("spec", ["llama", "gpt", "vit", "mlp"])
def test_like_eager(spec, strategy):
    """Lengths that do not divide are padded and cut back."""
    options = {"dropout": "0.0"} if spec == "gpt" else {}
    one, replicas = case(spec, **options), 2 if strategy.startswith("dp2") else 1
    if spec in KEYS and strategy in ("tp2+sp", "cp2"):
        options = dict(options)  # the batch dim divides: nothing says how to pad images or vectors
    found = truth(spec, replicas, **options)
    check(one.graph, strategy, one.params, one.buffers, one.batches, found, one.keys)


def test_tied_weights():
    one = case("llama", tied="true")
    assert "head.weight" not in one.params
    check(one.graph, "dp2.tp2", one.params, one.buffers, one.batches, truth("llama", 2, tied="true"), one.keys)


@functools.cache
def hugging() -> Any:
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    one = case("hf:llama")
    outputs, grads = eager(one.model, one.batches, token_mean, one.keys_by_name if False else one.keys)
    return one, outputs, grads
