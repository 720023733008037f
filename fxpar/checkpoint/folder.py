"""Names and order of the checkpoints in a folder: `step-00000030`, and `step-00000030.tmp-...` while one is written."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fxpar.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fxpar.errors import CheckpointError, MissingCheckpointError
from fxpar.errors.base import nearest, warn

# A second checkpoint of the same step gets the suffix .1 instead of replacing the first: a replacement would need two
# renames, and a crash between them would leave none.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"step-\d{8,}(?:\.\d+)?\.tmp-\w+")


@dataclass(frozen=True)
class CheckpointEntry:
    """One complete checkpoint of a folder."""

    path: Path
    manifest: Manifest


def free_path(folder: Path, step: int) -> Path:
    """The first unused name for a checkpoint of `step`."""
    path, version = folder / f"step-{step:08d}", 0
    while path.exists():
        version += 1
        path = folder / f"step-{step:08d}.{version}"
    return path


def complete(folder: Path, *, skip_unreadable: bool = False) -> list[CheckpointEntry]:
    """The complete checkpoints of a folder, the one written last at the end; incomplete ones and others are left out.

    Raises CorruptCheckpointError for one whose manifest cannot be read, unless it is to be skipped.
    """
    entries = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not _NAME.fullmatch(path.name) or not (path / MANIFEST).exists():
            continue
        try:
            entries.append(CheckpointEntry(path, read_manifest(path)))
        except CheckpointError:
            if not skip_unreadable:
                raise
    return sorted(entries, key=lambda entry: entry.manifest.sequence)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of a folder that was written last; None if there is none. A folder that does not exist
    has none either, as before the first save, and gives an FxparWarning, as its name may be a mistake.

    Written last, not of the highest step: a run that went back to step 20 goes on from its own step 25, not from step
    40 of the run that it left. Raises CorruptCheckpointError if a manifest cannot be read, and MissingCheckpointError
    for a path that is a file.
    """
    path = Path(folder)
    if path.is_dir():
        return newest_in(path)
    if path.exists():
        raise MissingCheckpointError(path, "is a file. Name the folder that save_checkpoint was given")
    warn(
        f"latest_checkpoint: there is no folder {str(path)!r}{_beside(path)} Before the first save_checkpoint this is "
        f"as it should be; if checkpoints were saved, name their folder (this process works in {Path.cwd()})"
    )
    return None


def newest_in(folder: Path) -> Path | None:
    """The complete checkpoint of a folder that was written last. Raises CorruptCheckpointError."""
    entries = complete(folder)
    return entries[-1].path if entries else None


def require_checkpoint(path: Path) -> None:
    """See that a path may be a checkpoint; who reads it says what is missing or damaged in it.

    Raises MissingCheckpointError for one that does not exist, a file, and a folder that holds checkpoints.
    """
    if (path / MANIFEST).exists():
        return
    if not path.exists():
        newest = newest_in(path.parent)
        other = f"; the newest one in {str(path.parent)!r} is {newest.name!r}" if newest else _beside(path, "")
        raise MissingCheckpointError(path, f"there is no such folder{other}. Nothing was loaded")
    if not path.is_dir():
        raise MissingCheckpointError(path, "is a file, and a checkpoint is a folder such as step-00000030")
    for folder in (path, path / "checkpoints"):  # a folder of checkpoints, or that of a run of `fxpar train`
        newest = newest_in(folder)
        if newest is not None:
            why = f"is a folder with checkpoints in it. Load one of them: the newest is {str(newest)!r}"
            raise MissingCheckpointError(path, why)


def _beside(path: Path, end: str = ".") -> str:
    """`; did you mean 'checkpoints'?`: the folder of the closest name at the same place, else `end`."""
    try:
        names = [one.name for one in path.absolute().parent.iterdir() if one.is_dir()]
    except OSError:
        names = []
    return nearest(path.name, names) or end


def unfinished(folder: Path) -> list[Path]:
    """What runs that crashed while they wrote a checkpoint have left."""
    return [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Delete a checkpoint; under another name first, so that a crash on the way leaves nothing that looks complete."""
    if _NAME.fullmatch(path.name):
        aside = path.with_name(f"{path.name}.tmp-removed")
        path.rename(aside)
        path = aside
    shutil.rmtree(path, ignore_errors=True)
