"""Ending a run between two steps: Ctrl-C on a rank, or a file that the launcher makes."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fxpar.train.interrupt import hear


class StopRequest:
    """Within its `with`: whether this rank was asked to end; before the first step is done, and the second time,
    SIGINT ends it at once.

    `file`: when it exists, that counts as being asked (local ranks are out of the terminal's reach: their launcher
    hears Ctrl-C). `stepping` is made behind the first step. Signals are handled on the main thread only.
    """

    def __init__(self, file: Path | None = None, stepping: Path | None = None) -> None:
        self._file, self._stepping, self._asked = file, stepping, False
        self._is_stepping = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def step_done(self) -> None:
        """From now on there is something to finish and to save: the first step may take seconds, and has nothing."""
        self._is_stepping = True
        if self._stepping is not None:
            self._stepping.touch()

    @property
    def asked(self) -> bool:
        if self._file is not None and self._file.exists():
            self._asked = True
        return self._asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._file is None and (self._asked or not self._is_stepping):
            hear(number, frame)
        self._asked = True


def agree(asked: bool, cpu_s: float, wall_s: float, device: torch.device) -> tuple[bool, float, float]:
    """(any rank was asked to stop, CPU seconds, wall seconds of all ranks): one small all-reduce per step."""
    sums = torch.tensor([float(asked), cpu_s, wall_s], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    asked_count, cpu_sum, wall_sum = sums.tolist()
    return asked_count > 0, cpu_sum, wall_sum
