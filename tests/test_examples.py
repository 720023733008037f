"""The examples and the README's program run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import fxpar

pytestmark = pytest.mark.docs

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
@pytest.mark.parametrize("name", ["clip", "translate", "llava"])
def test_tasks(name, tmp_path):
    """Real pictures and captions: what is trained gets better, in steps of all tasks."""
    where = f"run.folder={tmp_path}"
    result = run("-m", "fxpar", "train", f"examples/{name}.toml", "--steps", "12", "--set", where)
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 12
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    assert all(set(step["tasks"]) == set(steps[0]["tasks"]) for step in steps)
    assert steps[-1]["validation_loss"] is not None


@pytest.mark.slow
def test_tour(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / "tour.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert "\x1b" not in printed
    layer = re.search(r"dp2\.tp2\+sp +4 all_gather on tp.*\n +4 reduce_scatter on tp", printed)
    assert layer, printed  # Megatron's sequence parallelism
    assert "MISS" not in printed
    assert printed.count(" ok ") == 3
