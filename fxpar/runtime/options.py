"""What `fxpar.parallelize` is told."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fxpar.batching import GroupCost
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import (
    ParallelizeError,
    PlannerError,
    nearest,
)
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.strategy import Strategy
from fxpar.losses import LossFunction, causal_lm
from fxpar.monitor import Monitor
from fxpar.precision import Precision
from fxpar.runtime.compiling import Ladder, as_printed
from fxpar.runtime.gradients import Mode
from fxpar.runtime.runner import Backend
from fxpar.runtime.task import CompiledModel, Task, check_tasks
from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.search.plan_file import Plan
from fxpar.store.folder import Weights
from fxpar.switch.by_turns import TURNS
from fxpar.switch.planners import planner_names
from fxpar.transport.executions import EXECUTIONS

CostModel = Callable[[Program, ClusterSpec], GroupCost]
"""What a micro-batch of a program takes on a cluster."""


def cluster_here(described: ClusterSpec | None, world: int, device: torch.device) -> ClusterSpec:
    """What was described, else all ranks on nodes of equal size (a node is what the launcher calls one). What is not
    said of devices and links is usual for `device`.
    """
    if described is not None:
        return described.on(device.type)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # set by torchrun
    return usual_cluster(world, local if 0 < local <= world else world, device.type)


def _only(kinds: Any, meant: str) -> dict[str, Any]:
    """Of a field whose kind of value is looked at: what it may be, and in words. Numbers are above 0."""
    return {"kinds": kinds, "meant": meant}


@functools.cache  # reading them takes as long as opening a small session does
def _hints() -> dict[str, Any]:
    return get_type_hints(ParallelizeOptions)


@dataclass(frozen=True, kw_only=True)
class ParallelizeOptions:
    """The keyword arguments of `fxpar.parallelize`, which says what they mean: each with its type, its default, and the
    values that it takes (those of a `Literal`, of `words`, or of the kinds that are looked at).

    Raises ParallelizeError for another value, PlannerError for a planner that nobody has.
    """

    strategies: Mapping[int, Strategy | str] | Literal["auto"] | None = None
    plan: Plan | str | os.PathLike[str] | None = field(
        default=None, metadata=_only(Plan | str | os.PathLike | None, "file of `fxpar plan`, or a Plan")
    )
    lengths: Sequence[int] | str | None = None
    tokens_per_step: int | None = field(default=None, metadata=_only(int | None, "number of tokens above 0"))
    loss: LossFunction = field(
        default=causal_lm,
        metadata=_only(Callable, "function of a model and a batch, such as fxpar.losses.causal_lm"),
    )
    example: Mapping[str, Tensor] | None = None
    token_budget: int | Mapping[int, int] | None = None
    packed: bool | None = None
    length_multiple: int = field(default=1, metadata=_only(int, "whole number of 1 or more"))
    order: Sequence[str] | None = field(
        default=None, metadata=_only(list | tuple | None, 'list of strategies, such as ["cp2", "dp2"]')
    )
    merge: bool = True
    home: Mapping[str, str | DistConfig] | None = field(
        default=None, metadata=_only(Mapping | None, 'dict from globs to placements, such as {"*.norm.*": "R"}')
    )
    resident: Sequence[str] | None = field(
        default=None, metadata=_only(list | tuple | None, 'list of strategies, such as ["dp2"]')
    )
    memory_budget_bytes: int | None = field(
        default=None, metadata=_only(int | float | None, "number of bytes above 0, such as 8e9")
    )
    gradients: Mode = "home"
    overlap: bool = True
    cluster: ClusterSpec | None = field(
        default=None, metadata=_only(ClusterSpec | None, "ClusterSpec; a file is read with fxpar.ClusterSpec.from_file")
    )
    cost: CostModel | None = field(default=None, metadata=_only(Callable | None, "function of a program and a cluster"))
    planner: str = field(default="auto", metadata=_only(str, 'name of a planner, such as "auto"'))
    execution: str = field(default="auto", metadata={"words": EXECUTIONS})
    staging_bytes: int = field(
        default=STAGING_BYTES, metadata=_only(int | float, "number of bytes above 0, such as 64 << 20")
    )
    checked: bool = False
    nan: Literal["error", "skip"] = "error"
    compile: Backend = "eager"
    precision: Precision | str | None = field(
        default=None, metadata=_only(str | Precision | None, 'precision; write its text, such as "bf16"')
    )
    loss_scale: float | None = field(default=None, metadata=_only(int | float | None, "number above 0, such as 2**16"))
    deterministic: bool = False
    record: bool = False
    timeout_s: float | None = field(default=None, metadata=_only(int | float | None, "number of seconds above 0"))
    monitor: bool | Monitor = True
    plain: str | None = field(default=None, metadata=_only(str | None, 'strategy, such as "dp2"'))
    passes: Ladder | None = None
    compiled: CompiledModel | None = field(
        default=None, metadata=_only(CompiledModel | None, "result of fxpar.compile_strategies")
    )
    initializer: Callable[[nn.Module], object] | None = field(
        default=None, metadata=_only(Callable | None, "function of a module")
    )
    meta_init: Literal["slice", "whole"] = "slice"
    weights: Weights | str | os.PathLike[str] | None = field(
        default=None, metadata=_only(Weights | str | os.PathLike | None, "folder of weights, such as './llama-8b'")
    )
    tasks: Mapping[str, Task] | None = field(
        default=None, metadata=_only(Mapping | None, 'dict of tasks, such as {"caption": fxpar.Task(loss, example)}')
    )
    absent_tasks: Literal["count", "rescale"] = "count"
    seed: int = field(default=0, metadata={"kinds": int, "meant": "whole number", "signed": True})

    def __post_init__(self) -> None:
        hints = _hints()
        for one in fields(self):
            value, hint = getattr(self, one.name), hints[one.name]
            if isinstance(value, Integral) and not isinstance(value, int):  # a numpy integer
                value = int(value)
                object.__setattr__(self, one.name, value)
            words = get_args(hint) if get_origin(hint) is Literal else one.metadata.get("words")
            if words and value not in words:
                wanted = f"none of {', '.join(words)}{nearest(str(value), words)}"
                raise ParallelizeError(f"{one.name}={value!r} is {wanted}")
            if bool in (hint, *get_args(hint)) and not isinstance(value, hint):  # else "no" would be yes
                raise ParallelizeError(f"{one.name}={value!r} must be True or False")
            if "kinds" in one.metadata:
                fits = isinstance(value, one.metadata["kinds"]) and not isinstance(value, bool)
                if not fits or (
                    isinstance(value, int | float) and not ("signed" in one.metadata or 0 < value < math.inf)
                ):
                    raise ParallelizeError(f"{one.name}={value!r} is not a {one.metadata['meant']}")
        for key in ("order", "resident"):
            if (named := getattr(self, key)) is not None:
                object.__setattr__(self, key, type(named)(map(as_printed, named)))
        if self.plain is not None:
            object.__setattr__(self, "plain", as_printed(self.plain))
        for glob, placement in (self.home or {}).items():
            if not isinstance(glob, str) or not isinstance(placement, str | DistConfig):
                raise ParallelizeError(
                    f'home={{{glob!r}: {placement!r}}} is not a glob and placement, such as {{"*.norm.*": "R"}}'
                )
        if self.tasks is not None:
            check_tasks(self.tasks)
        planners = (*planner_names(), TURNS)
        if self.planner not in planners:
            raise PlannerError(self.planner, planners)
