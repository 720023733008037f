"""The program as a user starts it: quick help, plain pipes, narrow terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxpar.cli.app import COMMANDS, app
from fxpar.cli.console import stdout_console

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, code: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "fxpar"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([*start, *words], capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_help_is_quick():
    """Without torch, and without pydantic, which typer would read values with: neither the help nor a mistake of usage
    waits for them.
    """
    code = (
        "import sys\n"
        "from fxpar.cli import run\n"
        "try:\n    run()\nexcept SystemExit: pass\n"
        "print({'torch', 'pydantic'} & {*sys.modules})\n"
    )
    for words in (["--help"], ["check", "--help"], ["dump"], ["passes"]):
        result = run(*words, code=code)
        assert result.stdout.endswith("set()\n"), result.stdout + result.stderr


def test_help_fits_60_columns():
    """With an example of every command; in one process, as each start takes half a second."""
    code = (
        "from typer.testing import CliRunner\n"
        "from fxpar.cli.app import COMMANDS, app\n"
        "for words in ([], *([name] for name, *_ in COMMANDS)):\n"
        "    print(CliRunner().invoke(app, [*words, '--help'], terminal_width=60).output)\n"
    )
    result = run(code=code, COLUMNS="60", TERMINAL_WIDTH="60")
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert len(re.findall(r"^  Examples?:\n    fxpar ", result.stdout, re.MULTILINE)) == len(COMMANDS)


def test_help_takes_the_whole_width():
    lines = run("check", "--help", COLUMNS="150").stdout.splitlines()
    assert 120 < max(map(len, lines)) <= 150


def test_help_names_each_command_in_whole_words():
    listed = CliRunner().invoke(app, ["--help"], terminal_width=80).output.partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == [name for name, *_ in COMMANDS]
    assert not [line for line in listed if line.endswith("...")]


def test_version():
    import fxpar

    assert run("--version").stdout == f"fxpar {fxpar.__version__}\n"


def test_pipe_is_plain_even_where_colours_are_forced_off():
    result = run("passes", NO_COLOR="1", COLUMNS="60")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert "bucket_collectives" in result.stdout


def test_tables_leave_a_closed_pipe_to_the_command():
    """Else `fxpar diff ... | head` ends with rich's exit status 1."""
    with pytest.raises(BrokenPipeError):
        stdout_console().on_broken_pipe()


def test_closed_pipe_is_no_error():
    """As in `fxpar dump llama | head`."""
    start = subprocess.Popen(
        [sys.executable, "-m", "fxpar", "dump", "mlp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert start.stdout is not None
    assert start.stderr is not None
    start.stdout.close()
    with start.stderr as stream:
        assert stream.read() == ""
    assert start.wait(60) == 0
