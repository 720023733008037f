"""Each option that fxpar does not support is refused by name, with what to set instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.config import CommConfig, CompileConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3Model

from fxpar.errors import StrategySyntaxError, StrategyWorldsError, UnsupportedRecipeError
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import (
    REFUSALS,
    check_options,
    check_recipe,
    data_parallel_degree,
    mixtures,
    refusals,
    rows_of_step,
    validation_turns,
)
from fxpar.recipes.trainer import FxparConfig


def llama() -> Any:
    return titan.stock_recipe("llama3", "llama3_debugmodel")


class Float8Linear(titan.Linear):
    """As quantization converters put them into a model; torchtitan's own need a package for GPUs."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):
        recipe: str = "rowwise"


def float8() -> Any:
    config = llama()
    linear = config.model_spec.model.layers[1].feed_forward.w1
    config.model_spec.model.layers[1].feed_forward.w1 = titan.derive(linear, Float8Linear.Config)
    return config


def lora() -> Any:
    config = llama()
    converter = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wo"])
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return config


class OtherMasks(Llama3Model):
    """A decoder with masks of its own, such as chunked attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def get_attention_masks(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_attention_masks(*args, **kwargs)


def other_masks() -> Any:
    config = llama()
    config.model_spec = replace(config.model_spec, model=titan.derive(config.model_spec.model, OtherMasks.Config))
    return config


def changed(part: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = llama()
        setattr(config, part, replace(getattr(config, part), **options))
        return config

    return build


def with_torchft() -> Any:
    config = llama()
    return SimpleNamespace(fault_tolerance=object(), **{f.name: getattr(config, f.name) for f in fields(config)})


class OtherExperts(titan.GroupedExperts):
    """As converters to other formats put them into a model."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        pass


def other_experts() -> Any:
    config = titan.stock_recipe("qwen3", "qwen3_moe_debug")
    routed = config.model_spec.model.layers[0].moe.routed_experts
    routed.inner_experts = titan.derive(routed.inner_experts, OtherExperts.Config)
    return config


def balanced(**changes: Any) -> Any:
    """A model whose router's bias is moved by tokens per expert, and what they cannot be counted under."""
    config = titan.stock_recipe("qwen3", "qwen3_moe_debug")
    return SimpleNamespace(**{f.name: getattr(config, f.name) for f in fields(config)} | changes)


CASES = {  # how it is set, and what the error says of the option, of why, and of what to set
    "compiled counts": (
        lambda: balanced(compile=CompileConfig(enable=True, components=["model"])),
        "model_spec (MoE): layers.0.moe.load_balance_coeff is 0.001, and tokens per expert are not counted in compiled "
        "programs (compile.enable). Leave that out, or set the coefficient to None in every layer",
    ),
    "compressed counts": (
        lambda: balanced(fxpar=FxparConfig(strategies={64: "dp2", 2048: "dp2[layers.1: +lsh(0.2)]"})),
        "model_spec (MoE): layers.0.moe.load_balance_coeff is 0.001, and tokens per expert are not counted under "
        "dp2[layers.1: +lsh(0.2)], where experts see means of them. Leave that out",
    ),
    "experts": (
        other_experts,
        "model_spec (MoE): layers.0.moe has a OtherExperts. Use a model with plain GroupedExperts",
    ),
    "balanced": (
        changed("debug", moe_force_load_balance=True),
        "debug.moe_force_load_balance: it is set. Unset it",
    ),
    "mtp": (
        lambda: titan.stock_recipe("deepseek_v3", "deepseek_v3_debugmodel_mtp"),
        "model_spec: deepseek_v3 has mtp_layers, which predict tokens after the next one. Use a model such as",
    ),
    "masks": (other_masks, "model_spec: llama3 has a get_attention_masks of its own. Use a model such as llama3"),
    "no decoder": (
        lambda: titan.stock_recipe("flux", "flux_debugmodel"),
        "model_spec: flux is not a decoder. Use a model such as llama3",
    ),
    "float8": (
        float8,
        "model_spec (converters): layers.1.feed_forward.w1 is a Float8Linear. Build the model without quantization",
    ),
    "lora": (lora, "model_spec (converters): lm_head is a FrozenLinear. Build the model without quantization"),
    "dist_gemm": (
        lambda: titan.stock_recipe("llama3", "llama3_debugmodel_dist_gemm"),
        "model_spec (converters): layers.0.attention.wo is a RowParallelLinear. Build the model without quantization "
        "and LoRA converters, and without tp_gemm_backend",
    ),
    "loss": (
        lambda: replace(llama(), loss=MSELoss.Config()),
        "loss: it is a MSELoss.Config. Use CrossEntropyLoss, chunked or not",
    ),
    "chunked loss": (
        lambda: replace(llama(), loss=ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())),
        "loss: it is a MSELoss.Config. Use CrossEntropyLoss, chunked or not",
    ),
    "dtype": (
        changed("training", dtype="bfloat16"),
        "training.dtype: it is bfloat16. Set --training.dtype float32: masters are fp32, "
        "--training.mixed-precision-param bfloat16",
    ),
    "offload": (
        changed("training", enable_cpu_offload=True),
        "training.enable_cpu_offload: it is set. Unset it; --fxpar.memory-budget-gib",
    ),
    "ep": (
        changed("parallelism", expert_parallel_degree=2),
        "parallelism.expert_parallel_degree: it is 2. Set it to 1, and write ep",
    ),
    "comm": (
        lambda: replace(llama(), comm=CommConfig(mode="fake_backend")),
        "comm.mode: it is 'fake_backend'. Set --comm.mode default",
    ),
    "backend": (
        lambda: replace(llama(), compile=CompileConfig(enable=True, backend="aot_eager")),
        "compile.backend: it is 'aot_eager'. Set --compile.backend inductor",
    ),
    "torchft": (with_torchft, "fault_tolerance (torchft): it is set. Use a recipe without torchft"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case):
    build, said = CASES[case]
    with pytest.raises(UnsupportedRecipeError) as error:
        check_options(build())
    assert str(error.value).startswith(f"recipe option {said}")


def test_every_refusal_has_a_case():
    said = [text for _, text in CASES.values()]
    missing = [r.option for r in REFUSALS if not any(text.startswith(f"{r.option}: ") for text in said)]
    assert not missing


def test_all_that_is_wrong_is_found():
    config = changed("training", dtype="bfloat16", enable_cpu_offload=True)()
    assert [str(e).split(":")[0] for e in refusals(config)] == [
        "recipe option training.dtype",
        "recipe option training.enable_cpu_offload",
    ]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama3", "llama3_debugmodel"),
        ("llama3", "llama3_debugmodel_ce_loss"),
        ("llama3", "llama3_debugmodel_varlen_attn"),
        ("llama3", "llama3_70b"),
        ("llama3", "sft_debugmodel"),
        ("qwen3", "qwen3_debugmodel"),
        ("qwen3", "qwen3_debugmodel_non_fused_qkv"),
        ("qwen3", "qwen3_0_6b"),
        ("qwen3", "qwen3_32b"),
        ("qwen3", "qwen3_moe_debug"),
        ("deepseek_v3", "deepseek_v3_debugmodel"),
        ("gpt_oss", "gpt_oss_debugmodel"),
        ("gpt_oss", "gpt_oss_debugmodel_flex"),
    ],
)
def test_recipes_that_pass(family, name):
    assert list(refusals(titan.stock_recipe(family, name))) == []


def test_a_mixture_of_experts_without_a_bias_that_is_moved():
    config = balanced(compile=CompileConfig(enable=True, components=["model"]))
    for _, moe in mixtures(config):
        moe.load_balance_coeff = None
    assert list(refusals(config)) == []


def test_a_recipe_without_a_model():
    with pytest.raises(UnsupportedRecipeError, match=r"recipe option model_spec: there is none\. Set it"):
        check_options(titan.Trainer.Config())


def test_options_that_pass():
    assert list(refusals(replace(llama(), compile=CompileConfig(enable=True, backend="inductor")))) == []
    assert list(refusals(replace(llama(), compile=CompileConfig(enable=False, backend="aot_eager")))) == []
    assert list(refusals(replace(llama(), loss=CrossEntropyLoss.Config()))) == []


# ----------------------------------------------------------------------------------------------------------- rows
def test_rows_of_a_step():
    assert rows_of_step(changed("training", local_batch_size=3)(), 8) == 24
    given = changed("training", global_batch_size=10)()
    given.parallelism = replace(given.parallelism, tensor_parallel_degree=3)
    assert rows_of_step(given, 2) == 10  # the degrees say nothing then


def test_degrees_that_do_not_fit_are_refused():
    config = changed("parallelism", tensor_parallel_degree=3)()
    with pytest.raises(UnsupportedRecipeError) as error:
        check_recipe(config, FxparConfig(strategies={2048: "dp2"}), 2)
    assert str(error.value) == (
        "recipe option parallelism.*_degree: tensor_parallel 3 do not give 2 ranks, so how many rows a step takes is "
        "not known. Set --training.global-batch-size, or the degrees to what they are on so many ranks"
    )


@pytest.mark.parametrize(
    ("world", "data_ranks", "options", "turns"),
    [
        (8, 1, {}, 8),
        (8, 2, {}, 4),
        (8, 8, {"global_batch_size": 16 * 8}, 1),  # accumulated over two batches
        (8, 1, {"global_batch_size": 16 * 8}, 8),
        (2, 1, {"global_batch_size": 8}, 1),  # less than two ranks would take
        (2, 8, {}, 1),  # goes on from eight ranks
    ],
)
def test_validation_takes_as_many_rows(world, data_ranks, options, turns):
    config = changed("training", local_batch_size=8, **options)()
    config = SimpleNamespace(
        training=config.training, parallelism=config.parallelism, fxpar=FxparConfig(data_ranks=data_ranks)
    )
    assert validation_turns(config, world) == turns


# ----------------------------------------------------------------------------------------------------------- strategies
def checked(strategies: dict[int, str] | None, *, world: int = 2, seq_len: int = 2048) -> None:
    config = changed("training", seq_len=seq_len)()
    check_recipe(config, FxparConfig(strategies=strategies), world)


def test_strategies_that_fit():
    checked({256: "dp2", 2048: "tp2+sp"})
    checked({4096: "dp2.tp2+sp+zero1"}, world=4)  # takes longer documents than there are


def test_no_strategy():
    with pytest.raises(UnsupportedRecipeError) as error:
        checked({})
    assert str(error.value) == (
        "recipe option fxpar.strategies: there is none. Write for example --fxpar.strategies 512 dp2"
    )


def test_documents_longer_than_every_strategy_takes():
    with pytest.raises(UnsupportedRecipeError) as error:
        checked({512: "dp2", 1024: "tp2"})
    assert str(error.value) == (
        "recipe option training.seq_len: documents have up to 2048 tokens, the strategies take up to 1024. Give tp2 "
        "the limit 2048 in fxpar.strategies, or set --training.seq-len 1024"
    )


def test_strategies_of_another_number_of_ranks():
    with pytest.raises(StrategyWorldsError) as error:
        checked({512: "dp4", 2048: "dp2.tp2"}, world=4 * 2)
    assert "all 8 ranks" in str(error.value)
    assert "'dp4' (up to 512 tokens) uses 4, 'dp2.tp2' (up to 2048 tokens) uses 4" in str(error.value)
    with pytest.raises(StrategyWorldsError, match="all 2 ranks"):
        checked({512: "dp2", 2048: "dp2.tp2"})


def test_a_strategy_that_does_not_parse():
    with pytest.raises(StrategySyntaxError, match="td2"):
        checked({2048: "td2"})


def test_options_come_before_strategies():
    config = changed("training", dtype="bfloat16")()
    with pytest.raises(UnsupportedRecipeError, match=r"training\.dtype"):
        check_recipe(config, FxparConfig(strategies={2048: "dp3"}), 2)


@pytest.mark.parametrize(
    ("world", "degrees", "expected"),
    [
        (8, {}, 8),
        (8, {"tensor_parallel_degree": 2}, 4),
        (8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "pipeline_parallel_degree": 2}, 1),
        (8, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, 4),
        (2, {"tensor_parallel_degree": 8}, None),  # a recipe for more ranks than there are
        (2, {"tensor_parallel_degree": 3}, None),
        (8, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, None),
        (8, {"data_parallel_replicate_degree": 3}, None),
    ],
)
def test_data_parallel_degree(world, degrees, expected):
    assert data_parallel_degree(replace(llama().parallelism, **degrees), world) == expected


def test_token_budgets_are_said_once():
    settings = FxparConfig(strategies={512: "dp2"}, token_budget=512, token_budgets={512: 1024})
    with pytest.raises(UnsupportedRecipeError, match="token_budgets, of a plan, say it for each limit"):
        check_recipe(llama(), settings, 2)


@pytest.mark.parametrize(("rows", "ranks", "multiple"), [(10, 1, 8), (8, 2, 16), (0, 1, 8)])
def test_rows_that_are_no_whole_batches_are_refused_before_anything_is_captured(rows, ranks, multiple):
    config = changed("training", global_batch_size=rows, local_batch_size=8, seq_len=512)()
    settings = FxparConfig(strategies={512: "dp2"}, data_ranks=ranks)
    config = SimpleNamespace(**{f.name: getattr(config, f.name) for f in fields(config)}, fxpar=settings)
    with pytest.raises(UnsupportedRecipeError, match=f"global_batch_size: {rows} rows.*multiple of {multiple}"):
        check_recipe(config, settings, 2)
