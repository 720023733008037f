"""What a torchtitan recipe may not ask of fxpar; every refusal names the option and what to set instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fxpar.errors import StrategyWorldsError, UnsupportedRecipeError
from fxpar.ir.strategy import Strategy
from fxpar.recipes import torchtitan_api as titan


@dataclass(frozen=True)
class Refusal:
    """An option that is not supported: `found(config)` says how it is set, or returns None."""

    option: str
    found: Callable[[Any], str | None]
    instead: str


def _converted(config: Any) -> str | None:
    """A Linear that is none of torchtitan's plain ones: float8, MX and NV formats, LoRA, collectives in the GEMM. One
    that scales its bias by torchtitan's tensor parallelism, which is not used, is plain.
    """
    for fqn, linear, _, _ in config.model_spec.model.traverse(titan.Linear.Config):
        if type(linear) not in (titan.Linear.Config, titan.ScaledBiasRowwiseLinear.Config):
            return f"{fqn} is a {type(linear).__qualname__.removesuffix('.Config')}"
    return None


def mixtures(config: Any) -> Iterator[tuple[str, Any]]:
    """Each mixture of experts of the model: its name, and its configuration."""
    for index, layer in enumerate(getattr(config.model_spec.model, "layers", ())):
        if getattr(layer, "moe", None) is not None:
            yield f"layers.{index}.moe", layer.moe


def _other_moe(config: Any) -> str | None:
    """Experts for which `fxpar.recipes.experts` has no products."""
    for name, moe in mixtures(config):
        parts = (moe, moe.routed_experts, moe.routed_experts.inner_experts)
        for part, kinds in zip(parts, _MIXTURES, strict=True):
            if type(part) not in [kind.Config for kind in kinds]:
                return f"{name} has a {type(part).__qualname__.removesuffix('.Config')}"
    return None


# What a mixture, its routed part, and its experts may be.
_MIXTURES: tuple[tuple[Any, ...], ...] = (
    (titan.MoE, titan.GptOssMoE),
    (titan.RoutedExperts,),
    (titan.GroupedExperts, titan.GptOssGroupedExperts),
)


def _uncounted(config: Any) -> str | None:
    """A bias of the router that tokens per expert move, where they are not known: nobody looks into compiled programs,
    and compressed experts see means of rows.
    """
    for name, moe in mixtures(config):
        if moe.load_balance_coeff is None:
            continue
        said = f"{name}.load_balance_coeff is {moe.load_balance_coeff:g}, and tokens per expert are not counted "
        if config.compile.enable and "model" in config.compile.components:
            return said + "in compiled programs (compile.enable)"
        for text in (config.fxpar.strategies or {}).values() if hasattr(config, "fxpar") else ():
            if Strategy.parse(text).most("lsh"):
                return said + f"under {text}, where experts see means of them"
    return None


def _other_model(config: Any) -> str | None:
    """Models whose attention is not plain causal attention over packed documents."""
    model, name = config.model_spec.model, config.model_spec.name
    owner = getattr(type(model), "_owner", None)
    if owner is None or not issubclass(owner, titan.decoder_module.Decoder):
        return f"{name} is not a decoder"
    if getattr(model, "mtp_layers", None):
        return f"{name} has mtp_layers, which predict tokens after the next one"
    for method, owners in _KNOWN_METHODS.items():
        if getattr(owner, method) not in [getattr(one, method) for one in owners]:
            return f"{name} has a {method} of its own"
    return None


# Whose forward, and whose masks, are those of causal attention over packed documents. A decoder for MTP layers without
# any is a plain one; windows of gpt_oss are in the configuration of its layers.
_KNOWN_METHODS = {
    "get_attention_masks": (titan.decoder_module.Decoder, titan.GptOssModel),
    "forward": (titan.decoder_module.Decoder, titan.MTPDecoder),
}


def _other_loss(config: Any) -> str | None:
    loss = config.loss
    if isinstance(loss, titan.ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    return None if type(loss) is titan.CrossEntropyLoss.Config else f"it is a {type(loss).__qualname__}"


# An option of the model says more than what follows from it, so the order matters.
REFUSALS = (
    Refusal("model_spec (MoE)", _other_moe, "Use a model with plain GroupedExperts, such as qwen3, or a dense one"),
    Refusal("model_spec", _other_model, "Use a model such as llama3 or qwen3"),
    Refusal(
        "model_spec (MoE)",
        _uncounted,
        "Leave that out, or set the coefficient to None in every layer of model_spec.model",
    ),
    Refusal(
        "model_spec (converters)",
        _converted,
        "Build the model without quantization and LoRA converters, and without tp_gemm_backend",
    ),
    Refusal("loss", _other_loss, "Use CrossEntropyLoss, chunked or not"),
    Refusal(
        "training.dtype",
        lambda c: None if c.training.dtype == "float32" else f"it is {c.training.dtype}",
        "Set --training.dtype float32: masters are fp32, --training.mixed-precision-param bfloat16 computes in bf16",
    ),
    Refusal(
        "training.enable_cpu_offload",
        lambda c: "it is set" if c.training.enable_cpu_offload else None,
        "Unset it; --fxpar.memory-budget-gib bounds the memory of the strategies",
    ),
    Refusal(
        "parallelism.expert_parallel_degree",
        lambda c: (
            None if c.parallelism.expert_parallel_degree == 1 else f"it is {c.parallelism.expert_parallel_degree}"
        ),
        "Set it to 1, and write ep in fxpar.strategies",
    ),
    Refusal(
        "debug.moe_force_load_balance",
        lambda c: "it is set" if c.debug.moe_force_load_balance else None,
        "Unset it: it routes tokens by their place in a row, which packing changes",
    ),
    Refusal(
        "comm.mode",
        lambda c: None if c.comm.mode == "default" else f"it is {c.comm.mode!r}",
        "Set --comm.mode default",
    ),
    Refusal(
        "compile.backend",
        lambda c: f"it is {c.compile.backend!r}" if c.compile.enable and c.compile.backend != "inductor" else None,
        "Set --compile.backend inductor",
    ),
    Refusal(
        "fault_tolerance (torchft)",
        lambda c: "it is set" if hasattr(c, "fault_tolerance") else None,
        "Use a recipe without torchft; fxpar checkpoints resume on another number of ranks",
    ),
)


def refusals(config: Any) -> Iterator[UnsupportedRecipeError]:
    """An error for every option of a recipe that fxpar does not support."""
    if config.model_spec is None:
        yield UnsupportedRecipeError("model_spec", "there is none", "Set it, as torchtitan's recipes do")
        return
    for refusal in REFUSALS:
        found = refusal.found(config)
        if found is not None:
            yield UnsupportedRecipeError(refusal.option, found, refusal.instead)


def check_options(config: Any) -> None:
    """Raises UnsupportedRecipeError for the first unsupported option."""
    for error in refusals(config):
        raise error


# Methods of torchtitan's trainer that no step calls, and those that the mixin has in their place.
NOT_CALLED = ("post_dataloading_process", "pp_forward_backward_step", "_forward_backward_body")
REPLACED = ("init_distributed", "forward_backward_step")


def check_trainer(trainer: type, mixin: type) -> None:
    """Raises UnsupportedRecipeError for a trainer whose own part of a step would be left out without a word: a method
    that is not called, or that stands behind the mixin, which does not call it.
    """
    order = trainer.__mro__
    own = order[: order.index(titan.Trainer)]
    for cls in own:
        hidden = REPLACED if own.index(cls) > own.index(mixin) else ()
        for name in (*NOT_CALLED, *hidden):
            if cls is not mixin and name in vars(cls):
                why = "no step calls" if name in NOT_CALLED else f"{mixin.__name__} replaces"
                raise UnsupportedRecipeError(
                    f"trainer ({trainer.__name__})",
                    f"{cls.__name__} has a {name} of its own, which {why}",
                    "Do it in forward_backward_step of a class in front of the mixin, in the model or in the loader; "
                    "or leave fxpar.strategies unset",
                )


def check_recipe(config: Any, settings: Any, world: int) -> None:
    """Everything that can be said before the process group is there.

    Raises UnsupportedRecipeError (also for degrees that do not fit), StrategyWorldsError for strategies of another
    number of ranks, and the errors of parsing a strategy.
    """
    check_options(config)
    strategies: dict[int, str] = settings.strategies
    if not strategies:
        raise UnsupportedRecipeError(
            "fxpar.strategies", "there is none", "Write for example --fxpar.strategies 512 dp2"
        )
    if settings.token_budgets and settings.token_budget is not None:
        raise UnsupportedRecipeError(
            "fxpar.token_budget", "fxpar.token_budgets, of a plan, say it for each limit", "Leave one of them out"
        )
    parsed = {limit: (text, Strategy.parse(text).world) for limit, text in sorted(strategies.items())}
    if any(ranks != world for _, ranks in parsed.values()):
        raise StrategyWorldsError(parsed, world)
    _check_batches(config, settings.data_ranks, world)
    longest, seq_len = max(strategies), config.training.seq_len
    if longest < seq_len:
        raise UnsupportedRecipeError(
            "training.seq_len",
            f"documents have up to {seq_len} tokens, the strategies take up to {longest}",
            f"Give {strategies[longest]} the limit {seq_len} in fxpar.strategies, or set --training.seq-len {longest}",
        )


def data_parallel_degree(parallelism: Any, world: int) -> int | None:
    """The replicas that torchtitan would train with on so many ranks; None if it would not start."""
    other = (
        parallelism.context_parallel_degree * parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree
    )
    if world % other:
        return None
    shard, replicate = parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree
    fits = world // other % replicate == 0 if shard == -1 else world // other == shard * replicate
    return world // other if fits else None


def rows_of_step(config: Any, world: int) -> int:
    """Rows of a step: `training.global_batch_size`, or those that torchtitan would take on so many ranks.

    Raises UnsupportedRecipeError where that is not set and the recipe's degrees do not give this number of ranks.
    """
    training, parallelism = config.training, config.parallelism
    if training.global_batch_size >= 0:
        return training.global_batch_size
    replicas = data_parallel_degree(parallelism, world)
    if replicas is None:
        names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
        degrees = {name: getattr(parallelism, f"{name}_degree") for name in (*names, "pipeline_parallel")}
        said = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree not in (1, -1))
        raise UnsupportedRecipeError(
            "parallelism.*_degree",
            f"{said} do not give {world} ranks, so how many rows a step takes is not known",
            "Set --training.global-batch-size, or the degrees to what they are on so many ranks",
        )
    return training.local_batch_size * replicas


def _check_batches(config: Any, ranks: int, world: int) -> None:
    """Raise UnsupportedRecipeError if a step is not whole batches of the recipe's loader on each of so many data ranks.

    The loader says so too, but it is made after the model was captured and lowered.
    """
    rows, batch = rows_of_step(config, world), config.training.local_batch_size
    if rows < 1 or rows % (batch * ranks):
        raise UnsupportedRecipeError(
            "training.global_batch_size",
            f"{rows} rows are not a multiple of training.local_batch_size ({batch}) times fxpar.data_ranks ({ranks})",
            f"Set it to a multiple of {batch * ranks}",
        )


def validation_turns(config: Any, world: int) -> int:
    """Batches of the validation loader that each of `fxpar.data_ranks` gives in a step, so that a step takes as many
    rows as torchtitan's would: a batch for each replica, gradient accumulation or not.
    """
    batches = max(1, rows_of_step(config, world) // config.training.local_batch_size)
    replicas = min(batches, data_parallel_degree(config.parallelism, world) or batches)
    return max(1, replicas // config.fxpar.data_ranks)


__all__ = [
    "check_options",
    "check_recipe",
    "check_trainer",
    "data_parallel_degree",
    "mixtures",
    "refusals",
    "rows_of_step",
    "validation_turns",
]
