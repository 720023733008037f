"""Seconds that were measured so far, in a file: what was interrupted goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist


@dataclass
class Kept:
    """`seconds` by what was measured. The file `path` (None: nothing is kept, as on all ranks but the first) has a line
    that says with which settings they were, and a line for each of them.
    """

    path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path | None, settings: Mapping[str, Any]) -> Kept:
        """What the file has if it was begun with these settings, else it begins anew. All ranks call it, and know what
        the first one finds. Raises OSError.
        """
        found = {} if path is None else _read(path, settings)
        if path is not None and not found:
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        if dist.is_initialized():
            told = [found]
            dist.broadcast_object_list(told, src=0)
            (found,) = told
        return cls(path, found)

    def add(self, what: str, seconds: float) -> None:
        """Also to the file, at once."""
        self.seconds[what] = seconds
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([what, seconds]) + "\n")

    def done(self) -> None:
        """All of it is where it belongs."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _read(path: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """What was written line by line, up to one that was torn."""
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != settings:
            return {}
    except (OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            what, seconds = json.loads(line)
            found[str(what)] = float(seconds)
        except (ValueError, TypeError):
            break
    return found
