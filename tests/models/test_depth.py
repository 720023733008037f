"""Which shallow models stand for a deep one: layers repeat by their kinds, and by the parameters that they have."""

from __future__ import annotations

import pytest

from fxpar.models.depth import LayerOption, layer_option
from fxpar.search.price import Depth


@pytest.mark.parametrize(
    ("spec", "options", "period"),
    [
        ("llama", {"layers": "7"}, 1),
        ("hf:llama", {}, 1),
        ("hf:gemma3_text", {}, 6),  # by `layer_types`
        ("hf:qwen3_moe", {"decoder_sparse_step": "2"}, 2),
        ("hf:deepseek_v3", {"first_k_dense_replace": "1"}, 1),  # the first layer may be of its own
        ("hf:deepseek_v3", {"first_k_dense_replace": "3"}, 6),  # two and three layers would have no experts
    ],
)
def test_period(spec, options, period):
    name = "layers" if spec == "llama" else "num_hidden_layers"
    assert layer_option(spec, {name: "7"} | options) == LayerOption(name, 7, period)


def test_layers_that_do_not_repeat_are_lowered_whole():
    assert Depth(24, 23).samples(1) == (24,)
    assert Depth(24, 23).most_stages == 1
