"""Scans and short convolutions of transformers: numbers as in eager runs at any length, as ops of fxpar."""

from __future__ import annotations

import pytest
import torch

from fxpar import errors, losses
from fxpar.checking.eager import WithoutFloat32
from fxpar.tracer import capture
from tests.tracer.helpers import check, ops
from tests.tracer.host_models import LLAMA, tokens

transformers = pytest.importorskip("transformers")

SMALL = LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": False}
SCAN = {"hidden_size": 16, "vocab_size": 61, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
TYPES = {
    "Mamba": (SCAN, 1, 1),
    "Mamba2": (SCAN | {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, 1, 1),
    "Lfm2": (SMALL | {"layer_types": ["conv"]}, 0, 1),
    "Qwen3_5": (
        SMALL
        | {"layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 4, "linear_value_head_dim": 8, "head_dim": 8},
        1,
        1,
    ),
}


def build(name: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, name + ("TextConfig" if name == "Qwen3_5" else "Config"))
    return getattr(transformers, f"{name}ForCausalLM")(config(**TYPES[name][0] | options)).double().train()


@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_eager_runs(name: str) -> None:
    """Lengths below and above a chunk, and no multiples of it."""
    _, recurrences, convolutions = TYPES[name]
    with WithoutFloat32():
        graph = check(build(name), losses.causal_lm, [tokens(9, B=1), tokens(70, B=1)], 1e-10)
    found = ops(graph)
    assert found.count("fxpar.recurrence") == found.count("fxpar.recurrence_backward") == recurrences
    assert found.count("fxpar.causal_conv") == found.count("fxpar.causal_conv_backward") == convolutions
    assert (graph.dims[0].minimum, graph.dims[0].maximum) == (1, None)


def test_nothing_is_left_changed() -> None:
    module = transformers.models.lfm2.modeling_lfm2
    before = module.causal_conv1d_fn
    capture(build("Lfm2"), losses.causal_lm, tokens(9))
    assert module.causal_conv1d_fn is before


def test_bounds_of_documents_are_an_error() -> None:
    model = build("Lfm2")
    batch = {**tokens(9, [4, 5], B=1), "seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32)}
    with pytest.raises(errors.UnsupportedOpError, match=r"bounds of documents \(seq_idx\).*fxpar packs"):
        capture(model, losses.causal_lm, batch)
