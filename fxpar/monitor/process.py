"""The processes of this machine: which one is this, who runs beside it, and the moment at which one ends."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path


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
