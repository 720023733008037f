"""A folder of results that are built once: complete or not there, whoever else builds the same."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fxpar.errors import DataCacheError

_STALE_S = 24 * 3600.0


def default_cache_dir() -> Path:
    """The folder for caches of this user, as each platform has it."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "fxpar"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "fxpar" / "Cache"
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is not valid and has to be ignored.
    return (Path(named) if os.path.isabs(named) else home / ".cache") / "fxpar"


def cache_key(settings: Mapping[str, Any]) -> str:
    """A short hash of settings (JSON values), the same in every process."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A new folder to build into, which becomes `target` at the end of the block.

    The folder stands beside `target` under a name of its own and is renamed when it is complete and on disk. If
    someone else was faster their folder stays and this one is discarded; after an exception it is discarded too.
    Raises DataCacheError if the folder cannot be written.
    """
    building = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        building.mkdir()
    except OSError as error:
        raise DataCacheError(str(target.parent), f"cannot be written: {error.strerror or error}") from error
    try:
        yield building
        for file in building.iterdir():
            sync(file)
        sync(building)
        try:
            os.rename(building, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync(target.parent)
    except OSError as error:
        raise DataCacheError(str(target.parent), f"cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk, so that a rename survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    """Remove what processes that were killed left behind; a day is longer than any build."""
    for path in folder.glob(".*.*.*"):
        try:
            newest = max(item.stat().st_mtime for item in (path, *path.iterdir()))
        except OSError:  # another process removed it
            continue
        if time.time() - newest > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
