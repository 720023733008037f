"""The command line, `fxpar` and `python -m fxpar`. Torch is imported when a command needs it."""

from __future__ import annotations

import gc

# A graph is millions of small objects that all stay: looking through them every 700 allocations costs a fifth of a
# capture and half of reading a graph file.
_ALLOCATIONS = 100_000


def main() -> None:
    """Entry point of the console script `fxpar` and of `python -m fxpar`."""
    gc.set_threshold(_ALLOCATIONS, 50, 50)
    from fxpar.cli.app import app

    app(prog_name="fxpar")
