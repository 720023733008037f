"""Of checkpoints, and of folders of weights."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError, one_line


class CheckpointError(FxparError):
    """Base of the errors of `fxpar.checkpoint`; the same error is raised on all ranks."""

    what = "checkpoint"

    def __init__(self, path: object, why: str) -> None:
        self.path, self.why = str(path), one_line(why, None)
        super().__init__(f"{self.what} {self.path!r}: {self.why}")


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written (disk full, no permission, no shared folder); the ones before are intact."""


class WeightsWriteError(CheckpointWriteError):
    """A folder of weights, as transformers reads it, cannot be written."""

    what = "folder of weights"


class CheckpointInUseError(CheckpointError):
    """Another process, or another thread of this one, saves its checkpoints to the same folder."""


class MissingCheckpointError(CheckpointError):
    """There is no checkpoint where one is to be read; nothing was loaded."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated or changed; nothing was loaded."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another model or optimizer; nothing was loaded."""


class CheckpointValueError(CheckpointError):
    """Something to save is neither a tensor nor a plain value."""


class WeightsFolderError(FxparError):
    """A folder that weights cannot be read from, or written to."""

    def __init__(self, folder: object, why: str) -> None:
        self.folder, self.why = str(folder), one_line(why, None)
        super().__init__(f"weights in {self.folder!r}: {self.why}")


class WeightsMismatchError(FxparError):
    """A folder holds the weights of another model; nothing was loaded."""

    def __init__(self, folder: object, problems: str, options: Sequence[str]) -> None:
        ways = " or ".join(f"{option}=[globs]" for option in options)
        allow = f". If that is intended, allow it: {ways}" if ways else ""
        if len(options) == 2:  # missing and unused at once: names that changed, most often
            allow = ". A layer that wraps another renames its weights: let them keep their names" + allow
        if "missing" in options:
            allow += "; what is missing starts from random values"
        super().__init__(f"weights in {str(folder)!r} are of another model; {problems}{allow}. Nothing was loaded")
