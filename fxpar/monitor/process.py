"""The processes of this machine: which one is this, who runs beside it, and the moment at which one ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Frames that do not say where the program stands.
PASSED_OVER = (f"{os.sep}torch{os.sep}", f"{os.sep}threading.py", f"{os.sep}fxpar{os.sep}monitor{os.sep}")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)  # as faulthandler writes it


def host_identity() -> str:
    """`name/boot/pids`: equal for two processes exactly if one can look at the other's process id."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")  # no procfs: process_state() answers "" as well
    return "/".join(parts)


def node_of(host: str) -> str:
    """The name of the machine in a `host_identity()`."""
    return host.partition("/")[0]


def process_state(pid: int) -> str:
    """`running`, `stopped` or `gone` for a process of this host; an empty string where that cannot be known."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        # The name of the program stands in parentheses and may hold any character; the state comes after it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")


class Neighbours(threading.Thread):
    """A thread that watches the other ranks of this host, and waits for nothing else.

    It calls `look(gone)` once per interval, and at once when processes of ranks have ended: each is named once.
    """

    def __init__(self, interval_s: float, look: Callable[[list[int]], object]) -> None:
        super().__init__(daemon=True, name="fxpar-neighbours")
        self._interval_s, self._look = interval_s, look
        self._poll = select.poll()
        self._bell, self._bell_lock, self._has_ended = os.pipe(), threading.Lock(), False
        self._poll.register(self._bell[0], select.POLLIN)
        self._come: list[tuple[int, int]] = []
        self._pids: dict[int, int] = {}  # by rank
        self._ranks: dict[int, int] = {}  # by descriptor of a process
        self._closing = False

    def add(self, rank: int, pid: int) -> None:
        """Watch a rank from now on; for any thread."""
        self._come.append((rank, pid))
        self._ring()

    def close(self) -> None:
        """End the thread; for another one."""
        self._closing = True
        self._ring()

    def _ring(self) -> None:
        with self._bell_lock:  # once closed, the descriptor may be another file's
            if not self._has_ended:
                os.write(self._bell[1], b"!")

    def run(self) -> None:
        while True:
            gone = self._wait()
            if self._closing:
                break
            self._look(gone)
        with self._bell_lock:
            self._has_ended = True
            for descriptor in (*self._ranks, *self._bell):
                os.close(descriptor)

    def _wait(self) -> list[int]:
        """The ranks whose processes have ended, after at most one interval."""
        ready = {descriptor for descriptor, _ in self._poll.poll(self._interval_s * 1e3)}
        if self._bell[0] in ready:
            os.read(self._bell[0], 4096)
        gone = {self._ranks[descriptor] for descriptor in ready - {self._bell[0]}}
        while self._come:
            self._meet(*self._come.pop())
        unwatched = set(self._pids) - set(self._ranks.values())
        gone |= {rank for rank in unwatched if process_state(self._pids[rank]) == "gone"}
        for descriptor in [descriptor for descriptor, rank in self._ranks.items() if rank in gone]:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._ranks[descriptor]
        for rank in gone:
            del self._pids[rank]
        return sorted(gone)

    def _meet(self, rank: int, pid: int) -> None:
        """Where the kernel cannot wake us for a process (before Linux 5.3) it is looked at once per interval."""
        self._pids[rank] = pid
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)


def where_is(thread_id: int) -> str:
    """`file.py:12 in name` for the innermost frame of a thread outside of torch; empty if the thread has ended."""
    stack = stack_of(thread_id)
    own = (frame for frame in stack if not any(part in frame.file for part in PASSED_OVER))
    frame = next(own, stack[0] if stack else None)
    return "" if frame is None else f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}"


class StackFrame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int
    function: str


def stack_of(thread_id: int) -> tuple[StackFrame, ...]:
    """The at most 100 innermost frames of a thread, innermost first; none if it has ended.

    By `faulthandler`, which copies names while it holds the interpreter: the frames that `sys._current_frames` gives of
    a thread that goes on to run are not safe to follow in Python 3.11 (a loop over them can end the process by a
    segmentation fault, https://github.com/getsentry/sentry-python/issues/2386), and to make them can stop
    all threads for good (https://github.com/python/cpython/issues/106883).
    """
    with _scratch() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    _, _, stack = text.partition(f"hread 0x{thread_id:0{2 * struct.calcsize('L')}x} ")
    stack, _, _ = stack.partition("\n\n")
    return tuple(StackFrame(file, int(line), function) for file, line, function in _FRAME.findall(stack))


def _scratch() -> Any:
    """A file without a name, in memory where the kernel has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("fxpar-stack"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
