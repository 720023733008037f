"""Running the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from fxpar.cli.app import app


def fxpar(*words: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of `fxpar WORDS`."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="fxpar")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
