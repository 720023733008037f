"""Seconds that were measured so far, in a file: what was interrupted goes on where it was."""

from __future__ import annotations

import json
import math
import os
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
        found, nbytes = ({}, 0) if path is None else _read(path, settings)
        if path is not None and found:
            os.truncate(path, nbytes)  # the next line is not to be written behind a torn one
        elif path is not None:
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


def _read(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """What was written line by line, up to one that was torn or is no measurement, and the bytes of it."""
    found: dict[str, float] = {}
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
        if json.loads(first) != settings:
            return {}, 0
    except (OSError, ValueError):
        return {}, 0
    nbytes = len(first)
    for line in lines:
        try:
            what, seconds = json.loads(line)
            taken_s = float(seconds)
        except (ValueError, TypeError):
            break
        if not (line.endswith(b"\n") and 0 < taken_s < math.inf):
            break
        found[str(what)] = taken_s
        nbytes += len(line)
    return found, nbytes
