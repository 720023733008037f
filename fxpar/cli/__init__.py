"""The command line: `fxpar check`, `fxpar dump`, `fxpar passes`. Torch is imported when a command needs it."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script `fxpar` and of `python -m fxpar`."""
    from fxpar.cli.app import app

    app(prog_name="fxpar")
