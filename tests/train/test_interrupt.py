"""Ctrl-C before a command does anything of its own, and ranks whose launcher is gone: in processes without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxpar.train.interrupt import hear

ROOT = Path(__file__).resolve().parents[2]
# Ctrl-C in the middle of an import that loses the KeyboardInterrupt, as that of torch may.
LOSES_IT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    pass
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=folder,
        # A suite that runs in the background of a script ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_while_torch_is_imported_is_one_line_and_status_130(tmp_path):
    (tmp_path / "torch.py").write_text(LOSES_IT)
    process = start(tmp_path, "-m", "fxpar", "train", "--demo")
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


def test_ctrl_c_before_a_command_has_begun_is_one_line(tmp_path):
    code = "import fxpar.cli, signal\nfxpar.cli.run = lambda: signal.raise_signal(signal.SIGINT)\nfxpar.cli.main()"
    process = start(tmp_path, "-c", code)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


def test_ctrl_c_elsewhere_unwinds():
    """What has begun is undone: ranks are ended, files closed."""
    before = signal.signal(signal.SIGINT, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_whose_launcher_is_gone_ends_before_torch_is_there(tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    process = start(tmp_path, "-m", "fxpar.train.worker", str(tmp_path), "1")  # the launcher was another process
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (1, "", "")
