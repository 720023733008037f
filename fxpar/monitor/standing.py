"""A training thread that nothing can interrupt: how long it has stood still, and the end of its process."""

from __future__ import annotations

import os
import sys
import time

from fxpar.errors import PeerLostError
from fxpar.monitor.stack import StackFrame, WatchedThread

# Code that waits for other ranks; `_ops` is where the collectives of a graph are called.
_WAITS = tuple(part.replace("/", os.sep) for part in ("/torch/distributed/", "/torch/_ops.py", "/fxpar/"))


class Standing:
    """How long a thread has been in one and the same call: its stack has stayed the same, line by line.

    Time in which the observer was stopped itself does not count: one look adds at most `most_s`.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_s, self.seconds = time.monotonic(), 0.0
        self._stack: tuple[StackFrame, ...] = ()

    def look(self, thread: WatchedThread) -> float:
        """Take down where the thread is; seconds since the last look, but `most_s` at most."""
        now_s, stack = time.monotonic(), thread.stack()
        passed_s, self._looked_s = min(now_s - self._looked_s, self._most_s), now_s
        self.seconds = self.seconds + passed_s if stack == self._stack else 0.0
        self._stack = stack
        return passed_s

    @property
    def is_in_wait(self) -> bool:
        """Whether the call may be one that waits for other ranks."""
        return any(part in frame.file for frame in self._stack[:1] for part in _WAITS)


def message_of(lost: PeerLostError) -> str:
    """The last line of a traceback."""
    return f"{type(lost).__module__}.{type(lost).__qualname__}: {lost}"


def print_and_exit(lost: PeerLostError) -> None:
    """As python ends on an error, but at once: the thread that should raise it waits for a rank that is gone."""
    print(message_of(lost), file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
