"""The examples and the README's program run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fxpar.cli.app import app
from tests.cli.helpers import fxpar

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False
    )


def test_my_model():
    status, out, err = fxpar("check", f"{ROOT}/examples/my_model.py:make", "-s", "dp2,tp2", "--set", "width=96")
    assert status == 0, out + err
    assert "2 of 2 strategies agree" in out


@pytest.mark.slow
def test_tour():
    result = run("examples/tour.py")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    layer = re.search(r"dp2\.tp2\+sp +4 reduce_scatter on tp.*\n +4 all_gather on tp", result.stdout)
    assert layer, result.stdout  # Megatron's sequence parallelism
    assert "MISS" not in result.stdout
    assert result.stdout.count(" ok ") == 3


MINE = """
import torch
from fxpar.models import load
MyModel = lambda: load("llama", noise=False, seed=1).model
loader = [[torch.arange(n) % 131 for n in (9, 700, 40)] for _ in range(2)]
"""
SAY = """
import os
os.write(1, f"<{report.loss} {[g.strategy for g in report.groups]}>\\n".encode())  # one write, so one piece
"""


@pytest.mark.slow
def test_program_of_the_readme(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(program + SAY)
    result = run("-m", "torch.distributed.run", "--nproc-per-node", "4", str(tmp_path / "train.py"))
    assert result.returncode == 0, result.stderr
    said = re.findall(r"<(.*?) \[(.*?)\]>", result.stdout)  # ranks share one pipe: lines can run into each other
    assert len(said) == 4, result.stdout
    assert len(set(said)) == 1  # all ranks report the same
    assert 3 < float(said[0][0]) < 6
    assert "dp" in said[0][1]


def test_commands_of_the_documentation_are_understood():
    """Every `fxpar ...` line of a code block in README and docs/cli.md names commands and options that exist."""
    group: Any = typer.main.get_command(app)
    known = {name: {word for p in command.params for word in p.opts} for name, command in group.commands.items()}
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "cli.md").read_text()
    blocks = "\n".join(text.split("```")[1::2])
    lines = re.findall(r"^fxpar (\w+)(.*)$", blocks, re.MULTILINE)
    assert len(lines) > 8
    for command, words in lines:
        used = set(re.findall(r"--?[a-z]+\b", words.split("#")[0]))
        assert {word for word in used if f" {word} " in f"{words} "} <= known[command], (command, used)
