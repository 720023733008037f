"""Running the command line in this process."""

from __future__ import annotations

import io
import os
import re
import sys
from unittest import mock

from typer.testing import CliRunner

from fxpar.cli.app import app


def fxpar(*words: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of `fxpar WORDS`."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="fxpar")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(width: int, *words: str) -> str:
    """What a terminal of so many columns shows on stdout, without colours."""
    kept, sys.stdout = sys.stdout, Terminal()
    try:
        with mock.patch.dict(os.environ, {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "xterm"}):
            app([str(word) for word in words], prog_name="fxpar")
    except SystemExit:
        pass
    finally:
        said, sys.stdout = sys.stdout, kept
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue())
