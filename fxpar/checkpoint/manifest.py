"""The manifest of a checkpoint: size and checksum of each file, written last and checked before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxpar.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; `sequence` counts the checkpoints of a folder in the order they were written."""

    step: int
    sequence: int
    world: int
    files: dict[str, FileSum]


def sum_file(path: Path) -> FileSum:
    """Size and sha256 of a file as the page cache or the disk returns it."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSum(os.fstat(file.fileno()).st_size, digest)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON and bring it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with a checksum of itself; OSError if the disk does not take it."""
    body = {"format": FORMAT, **asdict(manifest)}
    write_json(folder / MANIFEST, {**body, "sha256": _digest(body)})


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; CorruptCheckpointError if it is missing, changed, or of a newer format."""
    try:
        body = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        stated = body.pop("sha256")
        if body["format"] != FORMAT:
            raise CorruptCheckpointError(path, f"has format {body['format']}; this fxpar reads format {FORMAT}")
        if stated != _digest(body):
            raise CorruptCheckpointError(path, f"{MANIFEST} does not agree with its own checksum. {advice(path)}")
        files = {_plain_name(name): FileSum(**entry) for name, entry in body["files"].items()}
        numbers = [body["step"], body["sequence"], body["world"], *(entry.size_bytes for entry in files.values())]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number is none")
        return Manifest(body["step"], body["sequence"], body["world"], files)
    except FileNotFoundError:
        raise CorruptCheckpointError(
            path,
            f"there is no {MANIFEST}: no checkpoint, or one that was not written to its end. latest_checkpoint finds "
            "the newest complete one in a folder",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{MANIFEST} cannot be read ({type(error).__name__}: {error}). {advice(path)}"
        raise CorruptCheckpointError(path, why) from error


def _plain_name(name: str) -> str:
    """The name of a file of the checkpoint's own folder. Raises ValueError."""
    if name in (".", "..") or Path(name).name != name or "\\" in name:
        raise ValueError(f"{name!r:.60} is not a file of a checkpoint")
    return name


def check_files(path: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Compare this rank's share of the files with the manifest; CorruptCheckpointError names the first that differs.

    Sizes are compared on every rank; for the checksums, which must read everything, the files are dealt out by size.
    """
    for name, expected in manifest.files.items():
        try:
            status = (path / name).stat()
        except OSError as error:
            raise CorruptCheckpointError(path, f"{name} is missing ({error.strerror}). {advice(path)}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(path, f"{name} is not a file. {advice(path)}")
        found = status.st_size
        if found != expected.size_bytes:
            why = f"{name} has {found:,} bytes instead of {expected.size_bytes:,}. {advice(path)}"
            raise CorruptCheckpointError(path, why)
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size_bytes, name))
    for name in by_size[share::shares]:
        if sum_file(path / name) != manifest.files[name]:
            raise CorruptCheckpointError(path, f"{name} does not agree with its checksum. {advice(path)}")


def advice(path: Path) -> str:
    return f"Nothing was loaded. Restore the file, or remove {path.name!r} and resume from the checkpoint before it"
