"""What becomes of every setting of torchtitan's trainer in a recipe that fxpar runs: one table, for code and docs.

Nothing is left out without a word: a setting that is not kept is refused, or a warning names it where it is set to
something else than torchtitan's default; so does one that is not in the table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal

from fxpar.recipes import torchtitan_api as titan

# It means what it means in torchtitan; a strategy or another setting of fxpar says it instead; it has no effect; it is
# an error that says what to set, unless it has the value that fxpar takes. Of the two in the middle one is warned.
Verdict = Literal["kept", "strategy", "unused", "refused"]
# Settings whose fields have verdicts of their own; any other is one of torchtitan's components, judged as a whole.
SECTIONS = ("training", "parallelism", "compile", "comm", "debug")


@dataclass(frozen=True)
class Setting:
    """`option` is a name such as `training.seq_len`, or a glob over such names; the first that matches counts.

    `with_degree` names the degree of `parallelism` without which torchtitan does not look at the setting either.
    """

    option: str
    verdict: Verdict
    says: str
    with_degree: str = ""


_PP = "pipeline"
SETTINGS = (
    Setting(
        "model_spec",
        "kept",
        "decoders, with plain or gpt_oss's experts; its `parallelize_fn` and `pipelining_fn` are not called",
    ),
    Setting("hf_assets_path", "kept", ""),
    Setting("dump_folder", "kept", ""),
    Setting("profiler", "kept", ""),
    Setting("metrics", "kept", "`tps` counts padding, as there; fxpar logs valid tokens"),
    Setting("tokenizer", "kept", ""),
    Setting("dataloader", "kept", "one rank of each node draws, see Data"),
    Setting("optimizer", "kept", ""),
    Setting("lr_scheduler", "kept", ""),
    Setting("checkpoint", "kept", "see Checkpoints"),
    Setting("validator", "kept", "see Validation; a validator of your own runs as it is"),
    Setting("override", "kept", "with fxpar's attention added"),
    Setting("loss", "kept", "CrossEntropyLoss, others are refused; never chunked: the kernel needs no copy of logits"),
    Setting("activation_checkpoint", "strategy", "`+remat`, `+remat(selective)` or `+remat(GLOB)` of each strategy"),
    Setting("training.local_batch_size", "kept", "rows that the loader draws at once"),
    Setting("training.global_batch_size", "kept", "rows of a step; if not set, local_batch_size for each replica"),
    Setting("training.seq_len", "kept", "the longest strategy must take it"),
    Setting("training.max_norm", "kept", ""),
    Setting("training.steps", "kept", ""),
    Setting("training.gc_*", "kept", ""),
    Setting("training.enable_cpu_offload", "refused", "`--fxpar.memory-budget-gib` bounds the memory of strategies"),
    Setting("training.disable_cuda_graphs", "unused", "there are none: micro-batches have different lengths"),
    Setting("training.dtype", "refused", "float32: masters are; `mixed_precision_param` says what is computed in"),
    Setting("training.mixed_precision_param", "kept", "bfloat16 is the [precision rewrite](precision.md)"),
    Setting("training.mixed_precision_reduce", "kept", "float32, as there"),
    Setting("parallelism.expert_parallel_degree", "refused", "1: `ep` in `fxpar.strategies` says where experts are"),
    Setting("parallelism.*_degree", "strategy", "`fxpar.strategies`; they only say how many rows a step takes"),
    Setting("parallelism.fsdp_reshard_after_forward", "strategy", "`+zero2` keeps weights whole, `+zero3` does not"),
    Setting("parallelism.enable_fsdp_symm_mem", "unused", "there is no FSDP2"),
    Setting("parallelism.enable_sequence_parallel", "strategy", "`+sp`", "tensor"),
    Setting("parallelism.spmd_backend", "unused", "torchtitan shards nothing"),
    Setting(
        "parallelism.pipeline_parallel_schedule", "strategy", "a schedule in the strategy, such as `pp4+gpipe`", _PP
    ),
    Setting(
        "parallelism.pipeline_parallel_schedule_csv", "unused", "schedules are chosen by name in the strategy", _PP
    ),
    Setting("parallelism.pipeline_parallel_microbatch_size", "strategy", "`fxpar.token_budget`", _PP),
    Setting("parallelism.module_fqns_per_model_part", "unused", "stages are cut by FLOPs", _PP),
    Setting("parallelism.pipeline_parallel_*", "unused", "stages are cut by FLOPs", _PP),
    Setting("parallelism.context_parallel_*", "unused", "`cp` swaps tokens for heads, which is balanced", "context"),
    Setting("compile.enable", "kept", "programs are compiled by inductor"),
    Setting("compile.components", "kept", "`model` is what counts; the loss is part of it"),
    Setting("compile.backend", "refused", "inductor"),
    Setting("compile.enable_async_tensor_parallel", "unused", ""),
    Setting("comm.init_timeout_seconds", "kept", "for the whole run"),
    Setting("comm.train_timeout_seconds", "unused", "a silent rank is named after `comm.init_timeout_seconds`"),
    Setting("comm.trace_buf_size", "kept", ""),
    Setting("comm.save_traces_*", "kept", ""),
    Setting("comm.mode", "refused", "default"),
    Setting("debug.seed", "kept", "of weights, data order and dropout"),
    Setting("debug.deterministic", "kept", "[deterministic kernels](precision.md), or an error that names one"),
    Setting("debug.deterministic_warn_only", "kept", "a warning in place of that error"),
    Setting("debug.detect_anomaly", "unused", "no autograd runs in a step; an error names the line of the model"),
    Setting("debug.batch_invariant", "refused", "torchtitan's trainer refuses it itself"),
    Setting("debug.spmd_typechecking", "unused", "torchtitan shards nothing"),
    Setting("debug.moe_force_load_balance", "refused", "off: it routes by the place in a row, which packing changes"),
    Setting("debug.*config*", "kept", ""),
    Setting("debug.enable_structured_logging", "kept", ""),
    Setting("fxpar", "kept", "fxpar's own settings, see above"),
)


def setting_of(option: str) -> Setting | None:
    """The row of an option; None for one that torchtitan has got since."""
    return next((row for row in SETTINGS if fnmatch.fnmatchcase(option, row.option)), None)


def options(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, torchtitan's default) of every setting of a recipe, in order."""
    for field in fields(config):
        value, default = getattr(config, field.name), _default(field)
        if field.name in SECTIONS and is_dataclass(value):
            for inner in fields(value):
                yield f"{field.name}.{inner.name}", getattr(value, inner.name), _default(inner)
        else:
            yield field.name, value, default


def unheard(config: Any) -> list[str]:
    """A line for every setting of a recipe that has no effect, and what says it instead; those that a trainer of the
    user's own has beside torchtitan's are its own business.
    """
    found = []
    theirs = {field.name for field in fields(titan.Trainer.Config)}
    for option, value, default in options(config):
        row = setting_of(option)
        if row is None and value != default and option.partition(".")[0] in theirs:
            found.append(f"{option}={value!r} is unknown to fxpar: whether it has an effect is not known")
        if row is not None and value != default and _is_lost(row, config):
            found.append(f"{option}={value!r} has no effect{f': {row.says}' if row.says else ''}")
    return [*found, *_own_lines(config)]


def _is_lost(row: Setting, config: Any) -> bool:
    """Whether a setting that is not the default does something in torchtitan, and nothing here."""
    if row.verdict not in ("strategy", "unused") or row.option in _OWN:
        return False
    return not row.with_degree or getattr(config.parallelism, f"{row.with_degree}_parallel_degree") > 1


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# Said more exactly than by a comparison with the default: every recipe of torchtitan sets it.
_OWN = {"activation_checkpoint"}


def _own_lines(config: Any) -> Iterator[str]:
    strategies = config.fxpar.strategies or {}
    keep = [text for text in strategies.values() if "+remat" not in text]
    if config.activation_checkpoint is not None and keep:
        yield (
            f"activation_checkpoint ({type(config.activation_checkpoint).__qualname__.removesuffix('.Config')}) has no "
            f"effect: {', '.join(keep)} keep all activations; add +remat or +remat(selective) to a strategy"
        )
    for name in ("parallelize_fn", "pipelining_fn"):
        function = getattr(config.model_spec, name)
        if function is not None and not str(getattr(function, "__module__", "")).startswith("torchtitan."):
            yield f"model_spec.{name} is your own and is not called: the strategies say how the model is cut"


def table() -> str:
    """The table for the documentation, in Markdown."""
    lines = ["| setting | | |", "|---|---|---|"]
    lines += [f"| `{row.option}` | {row.verdict} | {row.says} |" for row in SETTINGS if row.option != "fxpar"]
    return "\n".join(lines) + "\n"


__all__ = ["SECTIONS", "SETTINGS", "Setting", "Verdict", "options", "setting_of", "table", "unheard"]
