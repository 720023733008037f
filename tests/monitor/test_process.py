"""Where another thread stands, seen from outside of it and without harm to it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any

from fxpar.monitor.process import stack_of, where_is


def waiting(ready: threading.Event, go_on: threading.Event) -> None:
    ready.set()
    go_on.wait()


def test_where_a_thread_waits():
    ready, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=waiting, args=(ready, go_on))
    thread.start()
    ready.wait()
    line = waiting.__code__.co_firstlineno + 2
    while stack_of(thread.ident)[0].function != "wait":
        time.sleep(0.001)
    time.sleep(0.01)
    frames = [frame for frame in stack_of(thread.ident) if frame.file == __file__]
    assert frames == [(__file__, line, "waiting")]
    assert where_is(thread.ident) == f"test_process.py:{line} in waiting"  # frames of threading.py are passed over
    assert stack_of(thread.ident) == stack_of(thread.ident)
    go_on.set()
    thread.join()
    assert (stack_of(thread.ident), where_is(thread.ident)) == ((), "")


def test_own_stack_begins_at_the_call():
    (process, *_), function = stack_of(threading.get_ident()), sys._getframe().f_code.co_name
    assert process.function == "stack_of"
    assert where_is(threading.get_ident()).endswith(f" in {function}")


# Frames of torch, which are passed over: who looks for the caller goes through all of them.
_CALLS = """
def nested(depth):
    if depth:
        yield from nested(depth - 1)
    yield from range(3)

def deep(depth):
    return deep(depth - 1) if depth else 0
"""


def _run_while_others_look(seconds: float) -> None:
    """Frames come and go as fast as they can, the interpreter goes from thread to thread."""
    calls: dict[str, Any] = {}
    exec(compile(_CALLS, f"{os.sep}torch{os.sep}calls.py", "exec"), calls)
    sys.setswitchinterval(1e-6)
    looked, ident, end = [0], threading.get_ident(), time.monotonic() + seconds

    def look():
        while True:
            where_is(ident)
            looked[0] += 1

    threading.Thread(target=look, daemon=True).start()
    while time.monotonic() < end or looked[0] < 1000:
        list(calls["nested"](10))
        calls["deep"](random.randrange(700))


def test_looking_does_not_end_the_process():
    """A bare loop over `f_back` of `sys._current_frames` does in Python 3.11, under a load like this, in 0.1 s."""
    child = os.fork()
    if child == 0:
        _run_while_others_look(0.5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
