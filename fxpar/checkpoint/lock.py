"""Who works in a folder: a lock file that names the process, for as long as the process lives.

Nobody has to give a lock back. A holder on this machine is gone when no process has its number and start time, as after
a kill; one on another machine is gone when it has not touched the file for `SILENT_S`. `take` waits to see that, so a
refusal means that the holder is alive.

The file is made by a hard link, which only one of several processes can do, on network file systems too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".fxpar-lock"
BEAT_S, SILENT_S = 3.0, 30.0
_LOOK_S = 0.5
_LAUNCHED = "TORCHELASTIC_RUN_ID"  # set for ranks by torchrun and `fxpar train`


@dataclass(frozen=True)
class Holder:
    """A process that works in a folder. `machine` differs between boots and containers, `started` between processes
    that have had the same number; `since` is UTC. `command` is the process that was started by hand: the launcher of a
    rank, else the process itself (0 in locks of versions that did not say).
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str
    work: str
    command: int = 0

    @classmethod
    def here(cls, work: str) -> Holder:
        """This process."""
        command = os.getppid() if _LAUNCHED in os.environ else os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return cls(socket.gethostname(), _machine(), os.getpid(), started(os.getpid()), since, work, command)

    def is_same(self, other: Holder) -> bool:
        """Whether both are one process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    def __str__(self) -> str:
        rank = f", its rank is process {self.pid}" if self.command not in (0, self.pid) else ""
        return f"process {self.command or self.pid} on {self.host} ({self.work}{rank}, since {self.since} UTC)"


def take(folder: Path, work: str) -> Holder | None:
    """Take the lock of a folder for this process, until it ends or calls `release`; `work` says what for.

    None if it is this process' now, else who has it. Waits up to `SILENT_S` where that is a process of another machine.
    Raises OSError where the folder cannot be written.
    """
    path, mine = folder / LOCK, Holder.here(work)
    while True:
        with _one_at_a_time(folder):
            if _make(path, mine):
                atexit.register(release, folder)
                threading.Thread(target=_beat, args=(path, mine), daemon=True, name="fxpar-lock").start()
                return None
            found = _read(path)
        if found is None:
            continue  # given back meanwhile
        other, written = found
        if other is not None and other.is_same(mine):
            return None
        if _is_alive(path, other, mine):
            return other or Holder("(unknown)", "", 0, "", "(unknown)", "its lock cannot be read")
        with _one_at_a_time(folder):
            _remove(path, written)


def holder(folder: Path) -> Holder | None:
    """Who else holds the lock of a folder, as far as can be said without waiting. Takes nothing."""
    found = _read(folder / LOCK)
    mine = Holder.here("")
    if found is None or found[0] is None or found[0].is_same(mine):
        return None
    other = found[0]
    return other if other.machine != mine.machine or started(other.pid) == other.started else None


def release(folder: Path) -> None:
    """Give the lock back, if it is this process'."""
    with contextlib.suppress(OSError):
        found = _read(folder / LOCK)
        if found is not None and found[0] is not None and found[0].is_same(Holder.here("")):
            (folder / LOCK).unlink()


def _make(path: Path, mine: Holder) -> bool:
    """The lock file, complete at once; False if there is one."""
    aside = path.with_name(f"{LOCK}.{uuid.uuid4().hex[:8]}")
    aside.write_text(json.dumps(asdict(mine)), encoding="utf-8")
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: then with nothing in it for a moment
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(mine)))
            return True
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def _read(path: Path) -> tuple[Holder | None, str] | None:
    """(holder, the text of the file); no holder for a file that says none, None if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = Holder(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None, text
    return (
        found if all(type(v) is type(w) for v, w in zip(asdict(found).values(), _KINDS, strict=True)) else None
    ), text


_KINDS = ("", "", 0, "", "", "", 0)


def _is_alive(path: Path, other: Holder | None, mine: Holder) -> bool:
    """Whether the holder still is; of another machine's it is known by its touching the file."""
    if other is not None and other.machine == mine.machine:
        return started(other.pid) == other.started
    first = _touched(path)
    silent = time.monotonic()
    while first is not None and time.monotonic() - silent < SILENT_S:
        time.sleep(_LOOK_S)
        now = _touched(path)
        if now != first:
            return now is not None
    return False


def _touched(path: Path) -> int | None:
    """When the file was touched; opened, as network file systems look at it anew then."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _remove(path: Path, written: str) -> None:
    """Remove a stale lock, and no other that has taken its place."""
    aside = path.with_name(f"{LOCK}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_text(encoding="utf-8", errors="replace") != written:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _beat(path: Path, mine: Holder) -> None:
    """Touch the file while it is this process'."""
    while True:
        time.sleep(BEAT_S)
        with contextlib.suppress(OSError):
            found = _read(path)
            if found is None or found[0] is None or not found[0].is_same(mine):
                return
            os.utime(path)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Among the processes of this machine, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def started(pid: int) -> str:
    """When a process was started, in its machine's ticks; empty if there is none, or no more than its exit status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "" if os.path.isdir("/proc/self") else _exists(pid)
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _exists(pid: int) -> str:
    """Without /proc: whether a process has the number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"


def _machine() -> str:
    """Processes of two machines with the same text can see each other's numbers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
