"""torchtitan's graph_trainer with passes of fxpar, and its passes in fxpar's ladder.

    torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.graph_trainer --config debug_fxpar_passes

graph_trainer traces forward, loss and backward into one graph after parallelism was applied. `with_fxpar_passes` adds
passes of fxpar to what it does with that graph; `as_fxpar_pass` takes one of its passes the other way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpar.errors import PipelineNameError, UnsupportedRecipeError
from fxpar.recipes.torchtitan_api import bridge_torch, shown_import_errors

with shown_import_errors(__name__):
    import torch

    from fxpar.ir.pass_base import GraphPass
    from fxpar.recipes import cpu, debug
    from fxpar.recipes import graph_trainer_api as host
    from fxpar.recipes.passes_in import as_fxpar_pass
    from fxpar.recipes.passes_out import for_graph_trainer, resolve
    from fxpar.recipes.stock import stock

DEFAULT_PASSES = ("bucket_collectives", "reuse_buffers", "sink_waits", "write_in_place")
"""Passes of fxpar that do something for a graph of graph_trainer, in the order of fxpar's own ladder."""

_NOT_WITH_FULL_INDUCTOR = ("bucket_collectives", "write_in_place")


@dataclass(frozen=True)
class FxparPipeline:
    """graph_trainer's default pipeline with passes of fxpar in front of those that compile.

    Called by graph_trainer with what it traced and its configuration; returns its list of passes.
    """

    passes: tuple[GraphPass, ...]

    def __call__(self, traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Callable[..., Any]]:
        _check(config.compile, self.passes)
        theirs = host.construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
        names = [_name(step) for step in theirs]
        cut = next((i for i, name in enumerate(names) if name in host.COMPILING), len(theirs))
        return [*theirs[:cut], *(for_graph_trainer(step) for step in self.passes), *theirs[cut:]]


def register_pipeline(name: str = "fxpar", passes: Sequence[GraphPass | str] = DEFAULT_PASSES) -> FxparPipeline:
    """Make `--compile.pass_pipeline NAME` the default pipeline with these passes (fxpar's, or their names) added.

    Registering the same twice is harmless. Raises PipelineNameError if another pipeline has the name (torchtitan would
    replace it in silence), UnknownPassError, and ForeignGraphPassError for a pass that needs a strategy.
    """
    pipeline = FxparPipeline(tuple(resolve(step) for step in passes))
    other = host.PASS_PIPELINE_REGISTRY.get(name)
    if name == "default" or other not in (None, pipeline):
        raise PipelineNameError(name, "torchtitan's own" if other is None else _describe(other))
    host.register_pass_pipeline(name)(pipeline)
    return pipeline


def with_fxpar_passes(recipe: Any, passes: Sequence[GraphPass | str] = DEFAULT_PASSES, *, name: str = "fxpar") -> Any:
    """A graph_trainer recipe that runs these passes too; the given one is left alone. Raises as `register_pipeline`."""
    pipeline = register_pipeline(name, passes)
    _check(recipe.compile, pipeline.passes)
    return replace(recipe, compile=replace(recipe.compile, pass_pipeline=name))


def debug_default_passes() -> host.GraphTrainer.Config:
    """graph_trainer's debug model on two ranks with its default passes (of those that its machine can run)."""
    if not torch.cuda.is_available():
        cpu.enable()
    bridge_torch()
    recipe = host.llama3_recipes.graph_trainer_llama3_debugmodel_sdpa()
    recipe.hf_assets_path = debug.hf_assets()
    recipe.dataloader.dataset = debug.add_dataset()
    recipe.training.local_batch_size = 2
    recipe.training.seq_len = 512
    recipe.debug.seed = 42
    if cpu.is_enabled():
        recipe.compile.disable_passes = [*recipe.compile.disable_passes, *host.NOT_ON_CPU]
    return replace(stock(recipe), override=recipe.override)  # there is no FlexAttention to replace


def debug_fxpar_passes() -> host.GraphTrainer.Config:
    """The same with fxpar's passes: collectives in buckets, late waits, results written in place. The losses are the
    same to every digit.
    """
    return with_fxpar_passes(debug_default_passes())


def _check(compile_config: Any, passes: tuple[GraphPass, ...]) -> None:
    if compile_config.precompile_artifact_dir:
        raise UnsupportedRecipeError(
            "compile.precompile_artifact_dir",
            "the artifact's graph is compiled already, without fxpar's passes",
            "Unset it",
        )
    refused = [step.name for step in passes if step.name in _NOT_WITH_FULL_INDUCTOR]
    if refused and compile_config.inductor_compilation == "full":
        raise UnsupportedRecipeError(
            "compile.inductor_compilation",
            f"'full' takes no graph that {refused[0]!r} has changed (Inductor fuses and plans memory by itself)",
            f"Set it to regional, or leave out {', '.join(refused)}",
        )


def _name(step: Callable[..., Any]) -> str:
    return getattr(step.func if isinstance(step, functools.partial) else step, "__name__", "")


def _describe(pipeline: Any) -> str:
    if isinstance(pipeline, FxparPipeline):
        return f"fxpar passes {', '.join(step.name for step in pipeline.passes)}"
    return f"{getattr(pipeline, '__module__', '?')}.{getattr(pipeline, '__qualname__', pipeline)}"


__all__ = [
    "DEFAULT_PASSES",
    "FxparPipeline",
    "as_fxpar_pass",
    "debug_default_passes",
    "debug_fxpar_passes",
    "register_pipeline",
    "with_fxpar_passes",
]
