"""torchtitan on CPU: what `enable()` replaces is replaced everywhere, once, and does what torchtitan needs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fxpar.recipes import cpu
from fxpar.recipes import torchtitan_api as titan
from fxpar.runtime.forked import run_forked

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys, types
from fxpar.recipes import cpu, torchtitan_api as titan

was = [cpu.is_enabled(), titan.tools.device_type]
cpu.enable()
device = titan.tools.device_module
cpu.enable()
import torchtitan.models.llama3.config_registry  # imported later: copies what is there

def of(name):
    found = {}
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "torchtitan" and name in vars(module):
            found[key] = vars(module)[name]
    return found

from torchtitan.components.metrics import build_device_memory_monitor
monitor = build_device_memory_monitor()
kept = bytearray(300 << 20)
kept[::4096] = b"x" * len(kept[::4096])
stats = monitor.get_peak_stats()
print(json.dumps({
    "was": was,
    "is_enabled": cpu.is_enabled(),
    "same_device": titan.tools.device_module is device,
    "types": {k: v for k, v in of("device_type").items() if not isinstance(v, types.ModuleType)},
    "modules": {k: v is device for k, v in of("device_module").items()},
    "masks": {k: v.__module__ for k, v in of("create_attention_mask").items()},
    "sums": {k: v.__module__ for k, v in of("disable_fsdp_gradient_division").items()},
    "timeouts": {k: v.__module__ for k, v in of("set_pg_timeouts").items()},
    "name": monitor.device_name,
    "capacity_gib": monitor.device_capacity_gib,
    "active_gib": stats.max_active_gib,
    "active_pct": stats.max_active_pct,
    "bad": [stats.num_alloc_retries, stats.num_ooms],
}))
"""


@pytest.mark.titan
def test_enabled_in_a_fresh_process():
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["was"] == [False, "cuda"]
    assert found["is_enabled"]
    assert found["same_device"]
    assert set(found["types"].values()) == {"cpu"}
    assert {"torchtitan.tools.utils", "torchtitan.distributed.utils", "torchtitan.components.metrics"} <= set(
        found["types"]
    )
    assert found["modules"]
    assert all(found["modules"].values())
    assert "torchtitan.models.common" in found["masks"]
    assert set(found["masks"].values()) == {"torch.nn.attention.flex_attention"}
    assert set(found["sums"].values()) == {"fxpar.recipes.cpu"}
    assert set(found["timeouts"].values()) == {"fxpar.recipes.cpu"}
    assert found["name"] == "CPU"
    assert 0.3 < found["active_gib"] < found["capacity_gib"]  # 300 MiB were touched
    assert 0 < found["active_pct"] < 100
    assert max(found["bad"]) <= 0


def test_a_device_for_each_local_rank(monkeypatch):
    device = cpu.CpuDevice()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert device.device_count() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert device.device_count() == 1
    assert device.is_available() == torch.cpu.is_available()  # the rest is torch.cpu's


def test_figures_are_positive_and_of_this_process():
    device = cpu.CpuDevice()
    stats = device.memory_stats()
    assert stats["active_bytes.all.peak"] == stats["reserved_bytes.all.peak"] > 2**24
    assert stats["active_bytes.all.peak"] < device.get_device_properties().total_memory
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        assert getattr(device, name)() is None
    device.set_device("cpu:1")
    assert device.current_device() == 0


def test_timeouts_of_all_process_groups_on_gloo():
    def work(rank: int) -> list[float]:
        cpu.enable()
        titan.bridge_torch()
        own = dist.new_group([0, 1])
        meshes = {"tp": SimpleNamespace(get_group=lambda: own)}
        dims = SimpleNamespace(get_all_one_dimensional_meshes=lambda: meshes)
        titan.dist_utils.set_pg_timeouts(timedelta(seconds=45), dims)  # type: ignore[arg-type]
        groups = (own, dist.group.WORLD)
        return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]  # type: ignore

    assert run_forked(2, work) == [[45, 45], [45, 45]]


def test_fsdp_sums_gradients_on_gloo():
    """torchtitan divides by tokens itself: FSDP must neither average nor ask gloo for a pre-multiplied sum."""

    def work(rank: int) -> tuple[torch.Tensor, int]:
        cpu.enable()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=dist.init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        titan.fsdp.disable_fsdp_gradient_division(model)
        model(torch.full((3, 4), 1.0 + rank)).sum().backward()
        sharded = sum(isinstance(m, FSDPModule) for m in model.modules())
        return model[0].weight.grad.full_tensor(), sharded  # type: ignore

    ranks = run_forked(2, work)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for value in (1.0, 2.0):
        model(torch.full((3, 4), value)).sum().backward()
    for grad, sharded in ranks:
        assert sharded == 2
        torch.testing.assert_close(grad, model[0].weight.grad)
