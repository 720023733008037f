"""`fxpar export`: the weights of a checkpoint as a folder that transformers reads."""

from __future__ import annotations

import os
from pathlib import Path

from fxpar.cli.console import stdout_console
from fxpar.cli.run_commands import ExportRequest
from fxpar.errors import MissingCheckpointError


def run_export(request: ExportRequest) -> None:
    """Raises what `fxpar.checkpoint.export_checkpoint` raises, and DtypeError."""
    from fxpar.checkpoint import export_checkpoint
    from fxpar.precision.precision import parse_dtype

    dtype = None if request.dtype is None else parse_dtype(request.dtype)
    checkpoint = find_checkpoint(Path(request.checkpoint).expanduser())
    export_checkpoint(checkpoint, request.folder, dtype=dtype)
    stdout_console().print(f"{checkpoint} -> {request.folder}", markup=False)


def find_checkpoint(path: Path) -> Path:
    """The folder itself, or the latest checkpoint in it or in its `checkpoints`. Raises MissingCheckpointError,
    CorruptCheckpointError.
    """
    from fxpar.checkpoint.folder import newest_in
    from fxpar.checkpoint.manifest import MANIFEST

    if not os.path.isdir(path):
        raise MissingCheckpointError(path, "there is no such folder; name the folder of a run, or a checkpoint in it")
    if (path / MANIFEST).is_file():
        return path
    found = (newest_in(folder) for folder in (path, path / "checkpoints"))
    latest = next((one for one in found if one is not None), None)
    if latest is None:
        why = "there is no complete checkpoint in this folder; name the folder of a run, such as runs/NAME"
        raise MissingCheckpointError(path, why)
    return latest
