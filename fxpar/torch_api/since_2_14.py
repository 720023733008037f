"""What torch 2.14 has and torch 2.13 has not, under the names and signatures of 2.14."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.set_timeout`: how long an operation of this process group (None: of the world) may take."""
    _set_pg_timeout(timeout, group)


def step_on_micro_batches(
    schedule: Any,
    *,
    arg_mbs: list[tuple[Any, ...]] | None = None,
    kwarg_mbs: list[dict[str, Any]] | None = None,
    target_mbs: list[Any] | None = None,
    losses: list[Any] | None = None,
    loss_kwargs: dict[str, Any] | None = None,
    return_outputs: bool = True,
) -> None:
    """`step` of a torch.distributed.pipelining schedule on inputs that are cut into micro-batches already.

    None for a list means that this rank's stage takes none of these. Outputs are not merged.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    count = schedule._n_microbatches
    schedule._step_microbatches(
        arg_mbs if arg_mbs is not None else [()] * count,
        kwarg_mbs if kwarg_mbs is not None else [{}] * count,
        target_mbs,
        losses,
        return_outputs,
        loss_kwargs=loss_kwargs,
    )


__all__ = ["set_timeout", "step_on_micro_batches"]
