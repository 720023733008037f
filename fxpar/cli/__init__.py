"""The command line, `fxpar` and `python -m fxpar`. Torch is imported when a command needs it."""

from __future__ import annotations

import atexit
import gc
import os
import sys

# A graph is millions of small objects that all stay: looking through them every 700 allocations costs a fifth of a
# capture and half of reading a graph file.
_ALLOCATIONS = 100_000


def main() -> None:
    """Entry point of the console script `fxpar` and of `python -m fxpar`; the process ends with it.

    It ends without freeing what torch and graphs hold, object by object: that takes 0.3 CPU seconds, and would be most
    of what somebody waits for after Ctrl-C.
    """
    from fxpar.train.interrupt import INTERRUPTED, hear_from_now, say_interrupted

    try:
        hear_from_now()
        run()
        status: object = 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:  # before a command has begun, or after it
        say_interrupted()
        status = INTERRUPTED
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        pass  # whoever read has seen enough
    os._exit(status if isinstance(status, int) else 1)


def run() -> None:
    """Do what the words say. Raises SystemExit."""
    gc.set_threshold(_ALLOCATIONS, 50, 50)
    from fxpar.cli.app import app

    app(prog_name="fxpar")
