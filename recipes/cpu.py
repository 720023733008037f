"""torchtitan on CPU and gloo, for laptops and continuous integration: `enable()` before the trainer is built.

torchtitan takes a GPU for granted in a handful of places. What is replaced, and why:

    device_type, device_module   copied by value into several modules when they were imported
    memory figures               torch.cpu has none: the resident memory of the process stands in
    set_pg_timeouts              its barrier names a device, which gloo refuses
    FSDP2's gradient division    by a pre-multiplied sum, which gloo has not: a plain sum (the factor is 1 anyway)
    create_block_mask            compiled, which takes a C++ compiler minutes: run as it is

Stock recipes train with it too (`to_fxpar(recipe, strategies=None)`); their FlexAttention, which has no backward on
CPU, becomes dense (`fxpar.recipes.attention.dense_attention`).
"""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask

from fxpar.recipes import torchtitan_api as titan


class CpuDevice(ModuleType):
    """`torch.cpu` with the functions that torchtitan asks of a device module. Memory is that of this process."""

    def __init__(self) -> None:
        super().__init__("fxpar_cpu_device", CpuDevice.__doc__)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        """As many devices as local ranks: torchtitan gives each rank its own."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def set_device(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def is_enabled() -> bool:
    """Whether torchtitan runs on CPU in this process."""
    return isinstance(titan.tools.device_module, CpuDevice)


def enable() -> None:
    """Make torchtitan train on CPU in this process. Call it before a trainer is built; calling it again is harmless."""
    if is_enabled():
        return
    replaced = {
        "device_type": "cpu",
        "device_module": CpuDevice(),
        "set_pg_timeouts": _set_pg_timeouts,
        "disable_fsdp_gradient_division": _plain_sums,
        "create_attention_mask": create_block_mask,
    }
    for module in titan.holders(replaced):
        for name in replaced.keys() & vars(module).keys():
            setattr(module, name, replaced[name])


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """torchtitan's `set_pg_timeouts`, with a barrier that names no device."""
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in (*groups, None):
        dist.set_timeout(timeout, group)  # type: ignore[attr-defined]


def _plain_sums(model: nn.Module) -> None:
    """torchtitan's `disable_fsdp_gradient_division`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
