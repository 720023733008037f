"""The door to torchtitan: versions, bridges over what torch lacks, and errors that it would hide."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, schedules

from fxpar.errors import HostVersionError
from fxpar.recipes import torchtitan_api as titan
from fxpar.runtime.forked import run_forked
from tests.repeat import thinned

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------------------------- versions
@pytest.mark.parametrize(
    ("torchtitan_version", "torch_version"),
    [
        ("0.3.0", "2.13.0+cpu"),
        ("0.3.0+cu129", "2.14.0a0+git1234"),
        ("0.3.1.dev20261001", "2.15.1"),
        ("0.3rc2", "2.14rc1"),
    ],
)
def test_supported_versions(torchtitan_version, torch_version):
    titan.check_versions(torchtitan_version, torch_version)


@pytest.mark.parametrize(
    ("torchtitan_version", "torch_version"),
    [
        ("0.2.2", "2.13.0"),
        ("0.4.0", "2.14.0"),
        ("0.4.0.dev20261001", "2.14.0"),
        ("0.4rc1", "2.14.0"),
        ("1.0", "2.14.0"),
        ("0.3.0", "2.12.1+cu129"),
        ("0.3.0", "2.9.0"),
        ("unknown", "2.13.0"),
    ],
)
def test_an_unsupported_pair_is_named_with_what_is_supported(torchtitan_version, torch_version):
    with pytest.raises(HostVersionError) as error:
        titan.check_versions(torchtitan_version, torch_version)
    assert str(error.value) == (
        f"fxpar.recipes need torchtitan>=0.3,<0.4 and torch>=2.13; found torchtitan {torchtitan_version} and torch "
        f"{torch_version}. Install a supported pair: pip install 'fxpar[torchtitan]'"
    )


def test_torchtitan_is_not_installed(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(HostVersionError, match=r"torchtitan>=0\.3,<0\.4 .* found torchtitan not installed"):
        titan.check_versions()


@pytest.mark.titan
def test_an_unsupported_version_fails_on_import(tmp_path):
    """At once, before anything of torchtitan is imported; no stack of torchtitan's own in front of it."""
    info = tmp_path / "torchtitan-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    (tmp_path / "torchtitan.py").write_text("raise SystemError('imported')")
    done = python("-c", "import fxpar.recipes.llama3", path=tmp_path)
    assert done.returncode == 1
    assert "found torchtitan 0.2.2 and torch " in done.stderr
    assert "imported" not in done.stderr


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git", (2, 14, 0)), ("0.4rc1", (0, 4)), ("3", (3,)), ("git", ())],
)
def test_release(version, numbers):
    assert titan.release(version) == numbers


def test_spmd_types_need_torch_2_14():
    assert titan.has_spmd_types("2.14.0")
    assert titan.has_spmd_types("2.14.0a0+git")
    assert not titan.has_spmd_types("2.13.0+cpu")
    assert titan.has_spmd_types() == (titan.release(torch.__version__) >= (2, 14))


def test_a_dataset_is_found_under_its_name(monkeypatch):
    monkeypatch.setattr(titan.text_datasets, "DATASETS", {})
    titan.add_dataset("My_Text", lambda path: [{"body": path}], lambda sample: sample["body"])
    (entry,) = titan.text_datasets.DATASETS.items()
    name, config = entry
    assert name == "My_Text".lower()  # as torchtitan looks for it
    assert [config.sample_processor(sample) for sample in config.loader("there")] == ["there"]


# -------------------------------------------------------------------------------------------------------------- bridges
@pytest.fixture
def bare_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as it comes, whatever an earlier test built; put back at the end."""
    for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        monkeypatch.setattr(cls, "step", getattr(cls.step, "__wrapped__", cls.step))
    if titan.release(torch.__version__) < (2, 14):
        monkeypatch.setattr(dist, "set_timeout", None, raising=False)
        monkeypatch.delattr(dist, "set_timeout")


@pytest.mark.skipif(titan.release(torch.__version__) >= (2, 14), reason="this torch lacks nothing")
@pytest.mark.usefixtures("bare_torch")
def test_bridges_are_built_once():
    assert titan.bridge_torch() == tuple(bridge.name for bridge in titan.BRIDGES)
    steps = [cls.step for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)]
    assert titan.bridge_torch() == ()
    assert [cls.step for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)] == steps
    assert callable(dist.set_timeout)


@pytest.mark.usefixtures("bare_torch")
def test_nothing_is_built_where_torch_has_it(monkeypatch):
    def step(self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None) -> None:
        """As in torch 2.14."""

    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        """As in torch 2.14."""

    monkeypatch.setattr(dist, "set_timeout", set_timeout, raising=False)
    for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        monkeypatch.setattr(cls, "step", step)
    assert titan.bridge_torch() == ()
    assert dist.set_timeout is set_timeout
    assert schedules.PipelineScheduleSingle.step is step


def test_set_timeout_is_of_the_process_group():
    def work(rank: int) -> tuple[float, float, float]:
        titan.bridge_torch()
        group = dist.new_group([0])
        dist.set_timeout(timedelta(seconds=77), group)
        before = timeout_s(dist.group.WORLD)
        dist.set_timeout(timedelta(seconds=33))
        return before, timeout_s(group), timeout_s(dist.group.WORLD)

    def timeout_s(group: Any) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    before, of_group, of_world = run_forked(1, work)[0]
    assert before not in (77, 33)
    assert (of_group, of_world) == (77, 33)


WIDTH, ROWS, MICRO_BATCHES = 8, 8, 4


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + shift


def mean_of_tokens(out: Tensor, target: Tensor, *, tokens: Tensor) -> Tensor:
    return (out - target).square().sum() / tokens


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, target, torch.arange(ROWS, dtype=torch.float64)[:, None]


def whole_batch(blocks: int) -> tuple[float, list[Tensor]]:
    model = [Block(i) for i in range(blocks)]
    x, target, shift = batch()
    for block in model:
        x = block(x, shift)
    loss = mean_of_tokens(x, target, tokens=torch.tensor(10.0))
    loss.backward()
    return float(loss.detach()), [block.linear.weight.grad for block in model]


def pipelined(rank: int, per_rank: int, by_micro_batch: bool) -> tuple[float | None, dict[int, Tensor], int]:
    """Loss (on the rank of the last stage), gradients by block, losses that were collected; a stage per block."""
    titan.bridge_torch()
    count = 2 * per_rank
    stages = [PipelineStage(Block(i), i, count, torch.device("cpu")) for i in range(rank, count, 2)]
    kind = Schedule1F1B if per_rank == 1 else ScheduleInterleaved1F1B
    schedule: Any = kind(
        stages[0] if per_rank == 1 else stages,  # type: ignore[arg-type]
        MICRO_BATCHES,
        loss_fn=mean_of_tokens,
        scale_grads=False,  # as torchtitan: its loss is divided by the tokens of the whole batch
    )
    x, target, shift = batch()
    is_first, is_last = rank == 0, rank == 1
    losses: list[Tensor] | None = [] if is_last else None
    common: dict[str, Any] = {"losses": losses, "loss_kwargs": {"tokens": torch.tensor(10.0)}, "return_outputs": False}
    for _ in range(2):  # state of a step must not leak into the next
        if losses is not None:
            losses.clear()
        for stage in stages:
            stage.submod.zero_grad()
        if by_micro_batch:
            schedule.step(
                arg_mbs=[(part,) for part in x.chunk(MICRO_BATCHES)] if is_first else None,
                kwarg_mbs=[{"shift": part} for part in shift.chunk(MICRO_BATCHES)],
                target_mbs=list(target.chunk(MICRO_BATCHES)) if is_last else None,
                **common,
            )
        else:
            schedule.step(*([x] if is_first else []), shift=shift, target=target if is_last else None, **common)
    grads = {stage.stage_index: stage.submod.linear.weight.grad for stage in stages}
    return float(torch.stack(losses).sum().detach()) if losses else None, grads, len(losses or ())


@pytest.mark.parametrize("per_rank", [1, 2], ids=["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("by_micro_batch", [True, False], ids=["micro-batches", "whole"])
def test_a_pipeline_step_on_micro_batches(per_rank, by_micro_batch):
    """The bridged `step` takes what torchtitan gives it, and what torch's own takes."""
    loss, grads = whole_batch(2 * per_rank)
    ranks = run_forked(2, lambda rank: pipelined(rank, per_rank, by_micro_batch), timeout_s=60)
    assert ranks[1][0] == pytest.approx(loss, rel=1e-12)
    assert ranks[1][2] == MICRO_BATCHES
    found = ranks[0][1] | ranks[1][1]
    for index, grad in enumerate(grads):
        torch.testing.assert_close(found[index], grad, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- import errors
def python(*args: str, path: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(ROOT))), "PYTHONWARNINGS": "ignore"}
    return subprocess.run((sys.executable, *args), capture_output=True, text=True, timeout=120, env=env, check=False)


RECIPES = {
    "bad_recipe.py": "import fxpar.recipes.convert\nimport not_there\n",
    "pkg/__init__.py": "",
    "pkg/config_registry.py": "import fxpar.recipes.convert\nfrom not_there import x\n",
    "good/__init__.py": "",
    "good/config_registry.py": "from fxpar.recipes.llama3 import debug_stock\n",
    "plain.py": "from fxpar.recipes.llama3 import debug_stock\n",
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    for name, text in RECIPES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.titan
@pytest.mark.parametrize(
    ("how", "module", "failed"),
    thinned(
        [
            ("torchtitan.config.manager", "bad_recipe", "bad_recipe"),
            ("torchtitan.train", "pkg", "pkg.config_registry"),
        ],
        [("torchtitan.train", "pkg", "pkg.config_registry")],
    ),  # both forms by day: test_import_errors_are_shown_once_fxpar_is_there
)
def test_an_import_error_inside_of_a_recipe_is_shown(recipes, how, module, failed):
    """Also when the recipe was what imported fxpar first."""
    done = python("-m", how, "--module", module, "--config", "x", path=recipes)
    assert done.returncode == 1
    assert f"fxpar.errors.RecipeImportError: {failed} cannot be imported: ModuleNotFoundError: " in done.stderr
    assert done.stderr.rstrip().endswith("No module named 'not_there'")


class Manager:
    """What torchtitan's config manager does with `--module`, in this process."""

    @staticmethod
    def load(module: str, config: str = "debug_stock") -> Any:
        return titan.config_manager.ConfigManager()._load_config(["--module", module, "--config", config])[0]


@pytest.mark.parametrize("module", ["good", "plain", "good.config_registry"])
def test_recipes_are_found_as_before(recipes, monkeypatch, module):
    monkeypatch.syspath_prepend(str(recipes))
    assert Manager.load(module).fxpar.strategies is None


@pytest.mark.parametrize("module", ["llama3", "torchtitan.models.llama3"])
def test_torchtitans_own_recipes_are_found_as_before(module):
    assert Manager.load(module, "llama3_debugmodel").model_spec.name == "llama3"


@pytest.mark.parametrize(("module", "failed"), [("bad_recipe", "bad_recipe"), ("pkg", "pkg.config_registry")])
def test_import_errors_are_shown_once_fxpar_is_there(recipes, monkeypatch, module, failed):
    monkeypatch.syspath_prepend(str(recipes))
    with pytest.raises(titan.RecipeImportError, match=f"^{failed} cannot be imported: .*not_there"):
        Manager.load(module, "x")


@pytest.mark.parametrize("module", ["not_there", "torchtitan.models.not_there"])
def test_a_module_that_is_not_there_is_torchtitans_error(module):
    with pytest.raises(ImportError, match=f"Cannot import module '{module}' or"):
        Manager.load(module, "x")
