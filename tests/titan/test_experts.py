"""Mixtures of torchtitan under fxpar: losses, norms, weights and biases of routers of stock torchtitan on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.debug import DATASET, debug_recipe

from .runs import train

# Half a minute of CPU time each; by day: tests/recipes/test_experts.py. torchtitan's router asks for float32.
pytestmark = [pytest.mark.titan, pytest.mark.nightly, pytest.mark.filterwarnings("ignore:In CPU autocast")]
STRATEGIES = {48: "dp2", 96: "ep2+remat", 128: "tp2+sp"}


def recipe(kind: str, strategies: dict[int, str] | None) -> Any:
    """Two layers, three steps of two rows of 128 tokens in fp32. So are experts: in bf16, in which they compute on both
    sides, the least difference in what comes in may round otherwise.
    """
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign, assignment] # of this forked rank
    given = debug_recipe(kind)
    given.model_spec.model.layers = given.model_spec.model.layers[:2]
    config = to_fxpar(given, strategies=strategies, **({} if strategies is None else {"merge": False}))
    config.activation_checkpoint = None
    config.training.seq_len, config.training.steps = 128, 3
    config.training.global_batch_size = 2
    config.training.mixed_precision_param = "float32"
    data = HuggingFaceTextDataLoader.Config(dataset=DATASET, infinite=True)
    config.validator = Validator.Config(enable=True, freq=3, steps=2, dataloader=data)
    config.lr_scheduler.warmup_steps = 10
    return config


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_three_steps(kind, tmp_path):
    stock = train(1, lambda: recipe(kind, None), tmp_path / "stock", weights=True)
    found = train(2, lambda: recipe(kind, STRATEGIES), tmp_path / "fxpar", weights=True)
    assert list(found.losses) == [1, 2, 3]
    assert max(abs(found.losses[step] - loss) for step, loss in stock.losses.items()) < 1e-5
    assert max(abs(found.norms[step] / norm - 1) for step, norm in stock.norms.items()) < 1e-5
    assert found.validation.keys() == {1, 3} == stock.validation.keys()
    assert max(abs(found.validation[step] - loss) for step, loss in stock.validation.items()) < 1e-5
    assert found.weights.keys() == stock.weights.keys()
    biases = [name for name in stock.weights if name.endswith("expert_bias_E")]
    assert biases
    for name, want in stock.weights.items():
        if name in biases:
            assert torch.equal(found.weights[name], want), name
            assert want.any()
        else:
            assert (found.weights[name] - want).norm() < 2e-5 * want.norm(), name
