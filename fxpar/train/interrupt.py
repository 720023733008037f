"""Ctrl-C while modules are imported, which takes a command its first seconds: it ends at once.

A KeyboardInterrupt out of the import of torch may be lost, as C++ code that is called there drops Python's errors, or
abort the process (`terminate called after throwing an instance of 'pybind11::error_already_set'`).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def hear(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT: KeyboardInterrupt, or the end of the process where something is imported meanwhile."""
    if _is_importing(frame):
        say_interrupted()
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def hear_from_now() -> None:
    """Make `hear` the handler, unless SIGINT is ignored, as it is in the background of a script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, hear)


def say_interrupted() -> None:
    """The one line; without a buffer, which may just be in use, and with the cursor that a spinner has hidden."""
    clear = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{clear}interrupted\n".encode())


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
