"""The command line, `fxpar` and `python -m fxpar`. Torch is imported when a command needs it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext


def main() -> None:
    """Entry point of the console script `fxpar` and of `python -m fxpar`; the process ends with it."""
    from fxpar.train.interrupt import INTERRUPTED, hear_from_now, say_interrupted
    from fxpar.train.process import end_process

    try:
        hear_from_now()
        run()
        status: object = 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:  # before a command has begun, or after it
        say_interrupted()
        status = INTERRUPTED
    end_process(status if isinstance(status, int) else 1)


def run() -> None:
    """Do what the words say. Raises SystemExit."""
    from fxpar.train.process import collect_seldom

    collect_seldom()
    from fxpar.cli.app import app

    with _shell():
        app(prog_name="fxpar")


def _shell() -> AbstractContextManager[None]:
    """What bash needs beside other shells where it asks for completions, by the script that typer makes for it."""
    if os.environ.get("_FXPAR_COMPLETE") != "complete_bash":
        return nullcontext()
    from fxpar.cli.complete import words_of_bash

    return words_of_bash()
