"""Processes that are fxpar's own, the command and its ranks: how they look for garbage, and how they end.

A graph is millions of small objects that all stay: looking through them every 700 allocations costs a fifth of a
capture and half of reading a graph file, and freeing them at the end one by one takes more than a CPU second.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import NoReturn

_ALLOCATIONS = 100_000


def collect_seldom() -> None:
    """Look for garbage after so many allocations; call it before torch is imported."""
    gc.set_threshold(_ALLOCATIONS, 50, 50)


def end_process(status: int) -> NoReturn:
    """End this process: what was registered with `atexit` is done and what was printed is written, but nothing is
    freed, which somebody would wait longest for after Ctrl-C.
    """
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        pass  # whoever read has seen enough
    os._exit(status)
