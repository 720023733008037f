"""What a rank writes about itself into the store, once per interval."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

RUN = "run"  # works, or waits for a peer
EXPLAIN = "explaining"  # an operation of it failed; it looks for the peer that is missing
LEFT = "left"  # ended because of another rank
FAILED = "failed"  # ended by an error of its own
DONE = "done"  # ended because its work is done
ENDED = (LEFT, FAILED, DONE)

# Frames that do not say where the program stands.
PASSED_OVER = (f"{os.sep}torch{os.sep}", f"{os.sep}threading.py", f"{os.sep}fxpar{os.sep}monitor{os.sep}")


@dataclass(frozen=True)
class Beat:
    """One heartbeat. Peers only see whether `count` and `progress` change: no clock is compared between machines."""

    rank: int
    count: int
    elapsed_s: float  # since the start of rank 0's monitor, by this rank's monotonic clock
    progress: int
    status: str
    phase: str
    where: str
    host: str
    pid: int
    timed_out: bool = False  # an operation of this rank failed after its timeout, not because a peer closed

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> Beat:
        return Beat(**json.loads(text))


def host_identity() -> str:
    """`name/boot/pids`: equal for two processes exactly if one can look at the other's process id."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")  # no procfs: process_state() answers "" as well
    return "/".join(parts)


def process_state(beat: Beat, own_host: str) -> str:
    """`running`, `stopped` or `gone` for a process of this host; an empty string where that cannot be known."""
    if beat.host != own_host or not Path("/proc/self/stat").exists():
        return ""
    try:
        # The name of the program stands in parentheses and may hold any character; the state comes after it.
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")


def where_is(thread_id: int) -> str:
    """`file.py:12 in name` for the innermost frame of a thread outside of torch; empty if the thread has ended."""
    innermost: FrameType | None = sys._current_frames().get(thread_id)
    frame = innermost
    while frame is not None and any(part in frame.f_code.co_filename for part in PASSED_OVER):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
