"""What tasks become, made by rank 0 and handed to the others as graph files are written: capturing takes longest of all
that a run does before its first step, and ranks of a machine share its cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import GraphFormatError, SharedCaptureError
from fxpar.graph_files.file import load_value, save_value
from fxpar.runtime.compiling import compile_task
from fxpar.runtime.planned import on_rank_0
from fxpar.runtime.task import CompiledModel, Task
from fxpar.train.config import TrainConfig

Compiled = Mapping[str, CompiledModel]


def compiled_tasks(config: TrainConfig, module: nn.Module, tasks: Mapping[str, Task], cluster: ClusterSpec) -> Compiled:
    """By task what `fxpar.compile_task` makes of it; all ranks call it alike. Graphs that a file cannot hold, such as
    those with roles of other packages, are made by every rank.

    Raises what capture and lowering raise, SharedCaptureError on the ranks that have waited for it.
    """
    mine: dict[str, CompiledModel] = {}

    def make() -> dict[str, Any] | None:
        mine.update(_compiled(config, module, tasks, cluster))
        try:
            return {name: _written(one) for name, one in mine.items()} if dist.get_world_size() > 1 else None
        except GraphFormatError:
            return None

    sent = on_rank_0(make, SharedCaptureError)
    if mine:
        return mine
    if sent is None:
        return _compiled(config, module, tasks, cluster)
    return {name: _read(one) for name, one in sent.items()}


def _compiled(
    config: TrainConfig, module: nn.Module, tasks: Mapping[str, Task], cluster: ClusterSpec
) -> dict[str, CompiledModel]:
    others, precision = dict(config.strategies) or None, config.precision.compute
    return {name: compile_task(module, task, others, precision, cluster=cluster) for name, task in tasks.items()}


def _written(model: CompiledModel) -> tuple[CompiledModel, bytes]:
    """Without its graphs, which are in the bytes. Raises GraphFormatError."""
    with tempfile.TemporaryDirectory(prefix="fxpar-") as folder:
        path = Path(folder, "task.fxpar")
        save_value(path, {"logical": model.logical, "programs": dict(model.programs)}, {"kind": "task"})
        return replace(model, logical=None, programs={}), path.read_bytes()  # type: ignore[bad-argument-type]


def _read(sent: tuple[CompiledModel, bytes]) -> CompiledModel:
    with tempfile.TemporaryDirectory(prefix="fxpar-") as folder:
        path = Path(folder, "task.fxpar")
        path.write_bytes(sent[1])
        return replace(sent[0], **load_value(path))
