"""graph_trainer under torchrun: fxpar's passes change no printed digit of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repeat import thinned

pytest.importorskip("torchtitan", reason="torchtitan is an extra")

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 3
_STEP = re.compile(r"step:\s*(\d+)\s.*?loss:\s*([\d.]+|nan).*?grad_norm:\s*([\d.]+|nan)")
OURS = ("bucket_collectives", "reuse_buffers", "sink_waits", "write_in_place")

LAYOUTS = {
    "fsdp2": (),
    "tp2": ("--parallelism.tensor_parallel_degree", "2"),
}


def train(config: str, folder: Path, *args: str) -> str:
    """The log of a run of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0"]
    command += ["-m", "torchtitan.train", "--module", "fxpar.recipes.graph_trainer", "--config", config]
    command += ["--training.steps", str(STEPS), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    return log


def figures(log: str) -> list[tuple[str, ...]]:
    """(step, loss, gradient norm) as printed."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", log)
    return [found.groups() for found in _STEP.finditer(plain)]


@pytest.mark.titan
@pytest.mark.parametrize("layout", thinned(LAYOUTS, ["fsdp2"]))
def test_losses_are_those_of_the_default_pipeline(tmp_path, layout):
    default = train("debug_default_passes", tmp_path, *LAYOUTS[layout])
    ours = train("debug_fxpar_passes", tmp_path, *LAYOUTS[layout])
    assert len(figures(default)) == STEPS
    assert figures(ours) == figures(default)
    assert not any(name in default for name in OURS)
    assert all(re.search(rf"\d+\. {name}\n", ours) for name in OURS)
