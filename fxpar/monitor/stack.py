"""Where another thread of this process is, read without harm to it."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import threading
from typing import Any, NamedTuple

# Frames that do not say where the program is.
PASSED_OVER = (f"{os.sep}torch{os.sep}", f"{os.sep}threading.py", f"{os.sep}fxpar{os.sep}monitor{os.sep}")
_MOST_FRAMES = 100
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)  # as the interpreter writes it
_INTERPRETER = ctypes.PyDLL(None)  # its functions run with the interpreter's lock held


class StackFrame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int
    function: str


class WatchedThread:
    """The thread that makes this: other threads may ask where it is, while it runs and after it has ended.

    It is read by the function with which the interpreter reports a crash. That copies names out of the frames of one
    thread, holds the interpreter's lock and allocates nothing. All other ways can end the process, or stop it for good,
    in Python 3.11:
    `faulthandler.dump_traceback` reads all threads, so also one that a library is just making (tokenizers and gloo do);
    frames of `sys._current_frames` are not safe to follow (https://github.com/getsentry/sentry-python/issues/2386), and
    to make them can stop all threads (https://github.com/python/cpython/issues/106883). An interpreter
    without that function is a later one, where these two are mended.
    """

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._lock, self._has_ended = threading.Lock(), False
        self._state = ctypes.c_void_p(_function("PyThreadState_Get", ctypes.c_void_p)())
        self._kept = threading.local()
        self._kept.until_the_end = _AtEnd(self)

    def stack(self) -> tuple[StackFrame, ...]:
        """The at most 100 innermost frames, innermost first; none if the thread has ended."""
        with self._lock:
            if self._has_ended:
                return ()
            if not hasattr(_INTERPRETER, "_Py_DumpTraceback"):
                return _stack_by_frames(self.ident)
            with _scratch() as file:
                _function("_Py_DumpTraceback", None)(ctypes.c_int(file.fileno()), self._state)
                file.seek(0)
                text = file.read().decode(errors="replace")
        return tuple(StackFrame(file, int(line), function) for file, line, function in _FRAME.findall(text))

    def where(self) -> str:
        """`file.py:12 in name` for the innermost frame outside of torch; empty if the thread has ended."""
        stack = self.stack()
        own = (frame for frame in stack if not any(part in frame.file for part in PASSED_OVER))
        frame = next(own, stack[0] if stack else None)
        return "" if frame is None else f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}"

    def _ends(self) -> None:
        with self._lock:
            self._has_ended = True


class _AtEnd:
    """A value of one thread: the interpreter deletes it when that thread ends, before what `stack` reads is freed."""

    def __init__(self, thread: WatchedThread) -> None:
        self._thread, self._pid = thread, os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a forked process has only one thread, and maybe a lock that nobody will open
            self._thread._ends()


def _function(name: str, result: Any) -> Any:
    """A function of the interpreter; an object of our own, as its types are set on it."""
    function = _INTERPRETER[name]
    function.restype = result
    return function


def _stack_by_frames(ident: int) -> tuple[StackFrame, ...]:
    frame, stack = sys._current_frames().get(ident), list[StackFrame]()
    while frame is not None and len(stack) < _MOST_FRAMES:
        stack.append(StackFrame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(stack)


def _scratch() -> Any:
    """A file without a name, in memory where the kernel has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("fxpar-stack"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
