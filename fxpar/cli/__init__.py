"""The command line, `fxpar` and `python -m fxpar`. Torch is imported when a command needs it."""

from __future__ import annotations


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

    app(prog_name="fxpar")
