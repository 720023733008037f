"""graph_trainer's command on two ranks: fxpar's passes change no printed digit of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is an extra")

from fxpar.recipes import graph_trainer
from tests.titan.runs import command

STEPS = 3
_STEP = re.compile(r"step:\s*(\d+)\s.*?loss:\s*([\d.]+|nan).*?grad_norm:\s*([\d.]+|nan)")
OURS = ("bucket_collectives", "reuse_buffers", "sink_waits", "write_in_place")

LAYOUTS = {
    "fsdp2": (),
    "tp2": ("--parallelism.tensor_parallel_degree", "2"),
}


def two_layers_default_passes() -> Any:
    """The recipe with a third of its layers, which is traced in a third of the time."""
    recipe = graph_trainer.debug_default_passes()
    recipe.model_spec.model.layers = recipe.model_spec.model.layers[:2]
    return recipe


def two_layers_fxpar_passes() -> Any:
    return graph_trainer.with_fxpar_passes(two_layers_default_passes())


def train(config: str, folder: Path, *args: str) -> str:
    """The log of a run of two ranks."""
    module = __name__ if config in globals() else graph_trainer.__name__
    recipe = ("--module", module, "--config", config, "--training.steps", str(STEPS))
    small = ("--training.seq-len", "128", "--training.local-batch-size", "1")
    return command(2, folder, *recipe, *small, *args, timeout_s=600)


def figures(log: str) -> list[tuple[str, ...]]:
    """(step, loss, gradient norm) as printed."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", log)
    return [found.groups() for found in _STEP.finditer(plain)]


RUNS = [("two_layers", "fsdp2"), *(("debug", layout) for layout in LAYOUTS)]


@pytest.mark.titan
@pytest.mark.nightly  # by day: test_graph_trainer.py has the pipeline, test_passes_out.py a step as it is traced there
@pytest.mark.parametrize(("recipe", "layout"), RUNS)
def test_losses_are_those_of_the_default_pipeline(tmp_path, recipe, layout):
    default = train(f"{recipe}_default_passes", tmp_path, *LAYOUTS[layout])
    ours = train(f"{recipe}_fxpar_passes", tmp_path, *LAYOUTS[layout])
    assert len(figures(default)) == STEPS
    assert figures(ours) == figures(default)
    assert not any(name in default for name in OURS)
    assert all(re.search(rf"\d+\. {name}\n", ours) for name in OURS)
