"""The door to torchtitan: the only module of fxpar that imports it, and what its releases lack beside this torch.

torchtitan has no stable API; its releases are cut for one torch and do not say which. So everything that moves stands
here: names under one roof, the versions that work, and bridges over the three gaps between torchtitan 0.3 and torch
2.13, which are no longer built on torch 2.14.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from fxpar.errors import HostVersionError, RecipeImportError
from fxpar.torch_api import since_2_14

SUPPORTED_TORCHTITAN = ((0, 3), (0, 4))
"""From this version on, and below this one."""
SUPPORTED_TORCH = ((2, 13), None)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0), "2.14.0a0" -> (2, 14, 0), "0.4rc1" -> (0, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_versions(torchtitan_version: str | None = None, torch_version: str | None = None) -> None:
    """Raises HostVersionError for versions of torchtitan and torch that these recipes were not made for."""
    if torchtitan_version is None:
        try:
            torchtitan_version = importlib.metadata.version("torchtitan")
        except importlib.metadata.PackageNotFoundError:
            raise HostVersionError("not installed", torch.__version__, _range(), _torch_range()) from None
    torch_version = torch_version or torch.__version__
    low, high = SUPPORTED_TORCHTITAN
    found = release(torchtitan_version)
    if not (low <= found < high) or release(torch_version) < SUPPORTED_TORCH[0]:
        raise HostVersionError(torchtitan_version, torch_version, _range(), _torch_range())


def _range() -> str:
    low, high = SUPPORTED_TORCHTITAN
    return f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"


def _torch_range() -> str:
    return f">={'.'.join(map(str, SUPPORTED_TORCH[0]))}"


@contextmanager
def shown_import_errors(module: str) -> Iterator[None]:
    """An ImportError in the block becomes RecipeImportError, which torchtitan does not swallow.

    torchtitan looks for a recipe under two names and goes on to the next after any ImportError, also one inside of the
    recipe.
    """
    try:
        yield
    except ImportError as error:
        raise RecipeImportError(module, error) from error


check_versions()
with shown_import_errors("torchtitan (pip install 'fxpar[torchtitan]')"):
    from torchtitan.components.checkpoint import MODEL, CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import manager as config_manager
    from torchtitan.config.override import derive, override
    from torchtitan.distributed import ParallelDims, fsdp
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.common import attention as attention_module
    from torchtitan.models.common import decoder as decoder_module
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
    from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
    from torchtitan.models.deepseek_v3.mtp import MTPDecoder
    from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
    from torchtitan.models.gpt_oss.model import GptOssModel
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
    from torchtitan.models.gpt_oss.moe import swiglu as gpt_oss_swiglu
    from torchtitan.protocols.module import Module
    from torchtitan.tools import utils as tools
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer

__all__ = [
    "BRIDGES",
    "MODEL",
    "BaseDataLoader",
    "BaseTokenizer",
    "Bridge",
    "CheckpointManager",
    "ChunkedLossWrapper",
    "CrossEntropyLoss",
    "FlexAttention",
    "GptOssAttention",
    "GptOssGroupedExperts",
    "GptOssMoE",
    "GptOssModel",
    "GroupedExperts",
    "Linear",
    "MTPDecoder",
    "MoE",
    "Module",
    "OneDevice",
    "ParallelDims",
    "RoutedExperts",
    "ScaledBiasRowwiseLinear",
    "ScaledDotProductAttention",
    "Trainer",
    "Validator",
    "VarlenAttention",
    "add_dataset",
    "attention_module",
    "bridge_torch",
    "check_versions",
    "config_manager",
    "decoder_module",
    "derive",
    "dist_utils",
    "fsdp",
    "gpt_oss_swiglu",
    "has_spmd_types",
    "holders",
    "logger",
    "override",
    "show_import_errors",
    "shown_import_errors",
    "sinks_of",
    "stock_recipe",
    "text_datasets",
    "tools",
]


def stock_recipe(family: str, name: str) -> Trainer.Config:
    """The result of a config function of torchtitan's own, such as ("llama3", "llama3_8b")."""
    module = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    return getattr(module, name)()


def add_dataset(name: str, loader: Callable[[str], Any], text: Callable[[dict[str, Any]], str]) -> None:
    """Make a dataset known by name: `loader(path)` returns a `datasets.Dataset`, `text(sample)` its text."""
    text_datasets.DATASETS[name.lower()] = DatasetConfig(path=name, loader=loader, sample_processor=text)


def sinks_of(out_transform: Callable[..., Any]) -> Tensor | None:
    """The sinks [H] of the gpt_oss attention whose epilogue this is; None if it is another one's."""
    owner = getattr(out_transform, "__self__", None)
    if isinstance(owner, GptOssAttention) and out_transform == owner._apply_sinks:
        return owner.sinks
    return None


# ---------------------------------------------------------------------------------------------------------- one device
class OneDevice(ParallelDims):
    """What torchtitan sees of a world that fxpar runs: one device, whose parameters happen to be DTensors.

    So each rank gets the whole mini-batch; losses and token counts are whole already; no meshes are made. `ranks` is
    the true number of ranks, by which throughput is divided.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(
            dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1, spmd_backend="partial_dtensor"
        )
        self.ranks = ranks

    @property
    def non_data_parallel_size(self) -> int:
        return self.ranks

    def get_optional_mesh(self, dims: str | list[str], *, include_singleton_axes: bool = False) -> None:
        return None

    def get_all_one_dimensional_meshes(self) -> dict[str, Any]:
        return {}


# ------------------------------------------------------------------------------------------------------------- bridges
@dataclass(frozen=True)
class Bridge:
    """Something that torchtitan 0.3 calls and older torch has not. `missing()` looks, `build()` puts it there."""

    name: str
    missing: Callable[[], bool]
    build: Callable[[], None]


def _add_set_timeout() -> None:
    dist.set_timeout = since_2_14.set_timeout  # type: ignore[attr-defined]


def _steps_without_arg_mbs() -> list[type]:
    """torch's pipeline schedules whose `step` takes whole batches only."""
    return [
        cls
        for cls in vars(pipelining.schedules).values()
        if isinstance(cls, type)
        and "step" in vars(cls)
        and cls.__name__.startswith("PipelineSchedule")
        and not hasattr(vars(cls)["step"], "takes_micro_batches")
        and "arg_mbs" not in inspect.signature(vars(cls)["step"]).parameters
    ]


def _add_arg_mbs() -> None:
    def bridged(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if {"arg_mbs", "kwarg_mbs", "target_mbs"} & set(kwargs):
                return since_2_14.step_on_micro_batches(schedule, *args, **kwargs)
            return step(schedule, *args, **kwargs)

        run.takes_micro_batches = True  # type: ignore[attr-defined]
        return run

    for cls in _steps_without_arg_mbs():
        cls.step = bridged(cls.step)  # type: ignore[attr-defined]


BRIDGES = (
    Bridge("torch.distributed.set_timeout", lambda: not hasattr(dist, "set_timeout"), _add_set_timeout),
    Bridge("step(arg_mbs=...) of pipeline schedules", lambda: bool(_steps_without_arg_mbs()), _add_arg_mbs),
)


def bridge_torch() -> tuple[str, ...]:
    """Build what torch lacks, once; the names of what was built. Nothing from torch 2.14 on."""
    built = []
    for bridge in BRIDGES:
        if bridge.missing():
            bridge.build()
            built.append(bridge.name)
    return tuple(built)


def has_spmd_types(torch_version: str | None = None) -> bool:
    """Whether FSDP2 of this torch takes torchtitan's default `spmd_backend="spmd_types"`, the third gap."""
    return release(torch_version or torch.__version__) >= (2, 14)


class _Importer:
    """`importlib` as torchtitan's config manager sees it: errors inside of a recipe module are shown.

    The manager asks for `name.config_registry` and then for `name`.
    """

    def import_module(self, name: str) -> ModuleType:
        try:
            module = importlib.import_module(name)
            registry = f"{name}.config_registry"
            if registry not in sys.modules and hasattr(module, "__path__") and importlib.util.find_spec(registry):
                name = registry  # it is there but failed, before this importer was: the same error once more
                module = importlib.import_module(name)
            return module
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                raise  # there is no such recipe module: torchtitan tries another name
            raise RecipeImportError(_failed(name), error) from error
        except ImportError as error:
            raise RecipeImportError(_failed(name), error) from error


def _failed(name: str) -> str:
    """The recipe module that failed when `name` was imported: itself, or the package it would be in."""
    package = name.removesuffix(".config_registry")
    return name if package in sys.modules else package


def show_import_errors() -> None:
    """From now on an ImportError inside of a module given by `--module` is shown."""
    for module in (config_manager, sys.modules["__main__"]):  # python -m torchtitan.config.manager is a second copy
        if getattr(getattr(module, "__spec__", None), "name", None) == config_manager.__name__:
            module.importlib = _Importer()  # type: ignore[attr-defined]


show_import_errors()


def holders(names: Iterable[str]) -> Sequence[ModuleType]:
    """The loaded torchtitan modules that hold one of these names, or a copy: many are imported by value."""
    wanted = set(names)
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "torchtitan" and wanted & vars(module).keys()
    ]
