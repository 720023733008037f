"""Where another thread stands, seen from outside of it and without harm to it."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fxpar.monitor.stack import WatchedThread, _stack_by_frames


def waiting(made: list[WatchedThread], ready: threading.Event, go_on: threading.Event) -> None:
    made.append(WatchedThread())
    ready.set()
    go_on.wait()


@pytest.fixture
def waiter():
    """A watched thread that waits, and what ends it."""
    made, ready, go_on = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=waiting, args=(made, ready, go_on))
    thread.start()
    ready.wait()
    while made[0].stack()[0].function != "wait":
        time.sleep(0.001)
    time.sleep(0.01)

    def end():
        go_on.set()
        thread.join()

    yield made[0], end
    end()


def test_where_a_thread_waits(waiter):
    thread, end = waiter
    line = waiting.__code__.co_firstlineno + 3
    frames = [frame for frame in thread.stack() if frame.file == __file__]
    assert frames == [(__file__, line, "waiting")]
    assert thread.where() == f"test_stack.py:{line} in waiting"  # frames of threading.py are passed over
    assert thread.stack() == thread.stack() == _stack_by_frames(thread.ident)
    end()
    assert (thread._has_ended, thread.stack(), thread.where()) == (True, (), "")


def test_own_stack_begins_at_the_call():
    thread, function = WatchedThread(), sys._getframe().f_code.co_name
    assert thread.stack()[0].function == "stack"
    assert thread.where().endswith(f" in {function}")


def test_a_forked_process_that_ends_asks_nobody(waiter):
    """Its copy of the lock may be shut for good."""
    thread = WatchedThread()
    thread._lock.acquire()
    child = os.fork()
    if child == 0:
        del thread._kept.until_the_end
        os._exit(0)
    thread._lock.release()
    assert os.waitpid(child, 0)[1] == 0


# Frames of torch, which are passed over: who looks for the caller goes through all of them.
_CALLS = """
def nested(depth):
    if depth:
        yield from nested(depth - 1)
    yield from range(3)

def deep(depth):
    return deep(depth - 1) if depth else 0
"""


def _run_while_others_look(work: Callable[[], object], seconds: float) -> None:
    """The interpreter goes from thread to thread as fast as it can."""
    sys.setswitchinterval(1e-6)
    looked, thread, end = [0], WatchedThread(), time.monotonic() + seconds

    def look():
        while True:
            thread.where()
            looked[0] += 1

    threading.Thread(target=look, daemon=True).start()
    while time.monotonic() < end or looked[0] < 1000:
        work()


def calls() -> Callable[[], object]:
    """Frames come and go. A bare loop over `f_back` of `sys._current_frames` ends the process in 0.1 s here."""
    made: dict[str, Any] = {}
    exec(compile(_CALLS, f"{os.sep}torch{os.sep}calls.py", "exec"), made)
    return lambda: (list(made["nested"](10)), made["deep"](random.randrange(700)))


def threads_of_a_library() -> Callable[[], object]:
    """They become threads of the interpreter and cease to be. `faulthandler.dump_traceback` ends the process."""
    library = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

    def call():
        threads = [ctypes.c_ulong() for _ in range(4)]
        for thread in threads:
            library.pthread_create(ctypes.byref(thread), None, callback, None)
        for thread in threads:
            library.pthread_join(thread, None)

    return call


@pytest.mark.parametrize("work", [calls, threads_of_a_library])
def test_looking_does_not_end_the_process(work):
    child = os.fork()
    if child == 0:
        _run_while_others_look(work(), 0.5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
