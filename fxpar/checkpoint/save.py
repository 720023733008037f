"""Write a checkpoint aside, rename it when all of it is on the disk, then remove what is too old."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fxpar.checkpoint.agree import agreed, gathered, group_of, rank_in, watched
from fxpar.checkpoint.folder import complete, free_path, remove, unfinished
from fxpar.checkpoint.lock import take
from fxpar.checkpoint.manifest import FileSum, Manifest, sum_file, write_json, write_manifest
from fxpar.checkpoint.state import Content, collect
from fxpar.data.cache import sync
from fxpar.errors import CheckpointError, CheckpointInUseError, CheckpointValueError, CheckpointWriteError

PLAIN = "state.json"
_VISIBLE_WITHIN_S = 10.0  # network file systems show a new folder to other machines after a while


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    *,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-00000030` and keep the last `keep` checkpoints; call it on all ranks of the process group.

    Parameters and their optimizer states may be DTensors, each rank then writes its shard; plain tensors must be equal
    on all ranks and are written once. `extra` (rank 0's) takes plain values: loader, engine, scheduler. The folder
    belongs to one job, and all ranks must see it: the process of rank 0 locks it until it ends. A crash leaves the
    checkpoints before intact, and a folder with `.tmp-` in its name, which the next save removes.

    Raises, the same on all ranks: CheckpointValueError for what cannot be stored, CheckpointInUseError for a folder
    that another job saves to, CheckpointWriteError for a full disk, a missing permission, or a folder that not all
    ranks see; the checkpoints before are then untouched. PeerLostError if a rank is gone; the model's monitor names it.
    """
    group, folder = group_of(process_group), Path(folder)
    rank, _ = rank_in(group)
    with watched(model, rank, f"saving the checkpoint of step {step}"):
        return _save(group, rank, folder, step, model, optimizer, extra, keep)


def _save(
    group: dist.ProcessGroup | None,
    rank: int,
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    keep: int,
) -> Path:
    wrap = _Wrap(folder)
    content = _collected(group, folder, step, keep, model, optimizer, extra)
    needed = gathered(group, lambda: content.local_bytes + (content.shared_bytes if rank == 0 else 0), wrap)
    with contextlib.ExitStack() as guard:
        places = gathered(group, lambda: _prepare(folder, step, sum(needed), guard) if rank == 0 else None, wrap)
        place = places[0]
        assert place is not None
        _write(place, step, content, keep, group)
    return place.final


def _write(place: _Place, step: int, content: Content, keep: int, group: dist.ProcessGroup | None) -> None:
    """All of it; what is there of it is removed where it fails."""
    rank, wrap = rank_in(group)[0], _Wrap(place.final.parent)
    try:
        agreed(group, lambda: _check_visible(place.aside), wrap)
        _write_tensors(place, content, group)
        sums = gathered(group, lambda: _sums(place.aside, f"__{rank}_*"), wrap)
        agreed(group, lambda: _finish(place, step, content, sums, keep) if rank == 0 else None, wrap)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(place.aside, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint is written, and what it is called when it is complete."""

    aside: Path
    final: Path


@dataclass(frozen=True)
class _Wrap:
    """Makes a CheckpointWriteError of what went wrong on a rank."""

    path: Path

    def __call__(self, error: BaseException) -> CheckpointWriteError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        name = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(self.path).free / 1e9:.3f} GB are free there"
        return CheckpointWriteError(
            self.path,
            f"cannot be written: {type(error).__name__}: {reason}{name}{free}. Free space or choose another folder; "
            "the checkpoints before are intact",
        )


def _collected(
    group: dist.ProcessGroup | None,
    folder: Path,
    step: int,
    keep: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
) -> Content:
    """This rank's content, once it is known that no rank failed to collect its own."""
    found: list[Content] = []

    def work() -> None:
        if not isinstance(step, int) or not isinstance(keep, int) or step < 0 or keep < 1:
            raise CheckpointValueError(
                folder, f"step {step!r} must be an integer of at least 0, and keep={keep!r} one of at least 1"
            )
        found.append(collect(folder, model, optimizer, extra))

    agreed(group, work, _Wrap(folder))
    return found[0]


def _prepare(folder: Path, step: int, needed_bytes: int, guard: contextlib.ExitStack) -> _Place:
    """A folder to write to, locked until `guard` is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        why = f"{str(file)!r} is not a folder but a file. Name a folder; one that does not exist is made"
        raise CheckpointWriteError(folder, why) from error
    other = take(folder, "saves checkpoints")
    if other is not None:
        raise CheckpointInUseError(folder, f"{other} saves to this folder; {_ELSEWHERE}")
    for path in unfinished(folder):
        _lock(path, guard)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointWriteError(
            folder,
            f"the checkpoint of step {step} needs {needed_bytes / 1e9:.3f} GB, and {free_bytes / 1e9:.3f} GB are free. "
            "Free space or choose another folder; the checkpoints before are intact",
        )
    final = free_path(folder, step)
    aside = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    _lock(aside, guard)
    return _Place(aside, final)


_ELSEWHERE = "wait until that has ended, or save to another folder"


def _lock(path: Path, guard: contextlib.ExitStack) -> None:
    """Lock an unfinished checkpoint until `guard` is closed: other threads of this process do not see the folder's
    lock. Raises CheckpointInUseError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    guard.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = f"another thread of this process is saving {path.name}; {_ELSEWHERE}"
        raise CheckpointInUseError(path.parent, why) from error
    except OSError:  # a file system without locks
        pass


def _check_visible(aside: Path) -> None:
    """Else each machine would write its part to its own disk."""
    end = time.monotonic() + _VISIBLE_WITHIN_S
    while not aside.is_dir():
        if time.monotonic() > end:
            raise CheckpointWriteError(
                aside.parent, "rank 0 made a folder here that another rank does not see; use a shared file system"
            )
        time.sleep(0.1)


def _write_tensors(place: _Place, content: Content, group: dist.ProcessGroup | None) -> None:
    """All ranks write their shards; CheckpointWriteError on all if it fails on one."""
    writer = dcp.FileSystemWriter(place.aside)
    try:
        with without_group_warning(group):
            dcp.save(content.tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        wrapped = _Wrap(place.final.parent)(error)
        mine = CheckpointWriteError(wrapped.path, f"rank {rank}: {wrapped.why}")
        # That of rank 0 on all: each sees another free space.
        raise gathered(group, lambda: mine, _Wrap(place.final.parent))[0] from error


@contextlib.contextmanager
def without_group_warning(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A process on its own is a supported case here, so torch's warning about it says nothing."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sums(folder: Path, pattern: str) -> dict[str, FileSum]:
    return {path.name: sum_file(path) for path in sorted(folder.glob(pattern))}


def _finish(place: _Place, step: int, content: Content, sums: list[dict[str, FileSum]], keep: int) -> None:
    """Rank 0: plain values, manifest, rename, then remove what is too old or was never finished."""
    folder = place.final.parent
    write_json(place.aside / PLAIN, content.plain)
    files = {name: entry for part in sums for name, entry in part.items()}
    files |= _sums(place.aside, ".metadata") | _sums(place.aside, PLAIN)
    # A file that no rank has counted would be loaded without a check.
    uncounted = {path.name for path in place.aside.iterdir()} ^ set(files)
    if uncounted:
        raise CheckpointWriteError(folder, f"the ranks do not see the same files: {', '.join(sorted(uncounted))}")
    before = complete(folder, skip_unreadable=True)
    sequence = 1 + max((entry.manifest.sequence for entry in before), default=0)
    write_manifest(place.aside, Manifest(step, sequence, len(sums), files))
    sync(place.aside)
    place.aside.rename(place.final)
    sync(folder)
    with contextlib.suppress(OSError):  # the checkpoint is written; what cannot be removed now is the next save's
        for entry in complete(folder, skip_unreadable=True)[:-keep]:
            remove(entry.path)
        for path in unfinished(folder):
            remove(path)
