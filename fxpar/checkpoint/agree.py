"""All ranks go on, or all raise the same error: nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from fxpar.errors import CheckpointError, PeerLostError
from fxpar.monitor import Monitor, looks_like_peer_loss, unwatched

T = TypeVar("T")


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group to agree in: the given one, the default one, or None for a process on its own."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def rank_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process' rank in the group and the group's size; (0, 1) for a process on its own."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


@contextmanager
def watched(model: nn.Module, rank: int, phase: str) -> Iterator[None]:
    """In the block, what fails because a rank is gone raises PeerLostError; the model's monitor names that rank."""
    monitor = getattr(model, "fxpar_monitor", None)
    if isinstance(monitor, Monitor):
        with monitor.explained(phase):
            yield
        return
    try:
        yield
    except PeerLostError:
        raise
    except Exception as error:
        if not looks_like_peer_loss(error):
            raise
        raise unwatched(error, rank, phase) from error


def agreed(group: dist.ProcessGroup | None, work: Callable[[], T], wrap: Callable[[Exception], CheckpointError]) -> T:
    """`work()` on every rank; where it raises on any, all raise the error of the lowest such rank.

    `wrap` makes a CheckpointError of an error that is none. A small all-gather, so each rank must call it.
    """
    return gathered(group, work, wrap)[rank_in(group)[0]]


def gathered(
    group: dist.ProcessGroup | None, work: Callable[[], T], wrap: Callable[[Exception], CheckpointError]
) -> list[T]:
    """As `agreed`, with the results of all ranks in order; they must pickle."""
    result: T | None = None
    error: CheckpointError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except CheckpointError as known:
        error = known
    except Exception as other:
        error, cause = wrap(other), other
    rank, world = rank_in(group)
    pairs: list[tuple[CheckpointError | None, T | None]] = [(error, result)] * world
    if group is not None:
        dist.all_gather_object(pairs, (error, result), group=group)
    for sender, (failure, _) in enumerate(pairs):
        if failure is None:
            continue
        if sender == rank:
            raise failure from cause
        raise failure
    return [value for _, value in pairs]  # pyrefly: ignore[bad-return]  # each is T where no rank failed
