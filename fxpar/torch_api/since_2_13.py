"""What torch 2.13 has and torch 2.11 has not, under the names of 2.13: GPU machines are sometimes on 2.11.

The package asks for 2.13, with which it is tested; `make gpu` may run on a torch that is there already.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.launcher.api import LaunchConfig


class _NeverRaised(RuntimeError):
    """In place of an error that torch 2.11 does not tell from others."""


def counting(shape_env: Any) -> Any:
    """A class of ShapeEnvs that count how often a guard has fixed a size, as that of 2.13 does."""
    if torch.__version__ >= "2.13":
        return shape_env

    class Counting(shape_env):
        _replacements_version_counter = 0

        def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
            before = self.replacements.get(a)
            super()._set_replacement(a, tgt, msg)
            self._replacements_version_counter += before != self.replacements.get(a)

    return Counting


def _make_fake(mode: Any, elem: Tensor, device: Any, *, requires_grad: bool) -> Tensor:
    """FakeTensor(...) where the class does not take `requires_grad`."""
    if elem.requires_grad != requires_grad:
        elem.requires_grad_(requires_grad)
    return fake_tensor.FakeTensor(mode, elem, device)


def launch_config(*, shutdown_timeout: int, **options: Any) -> LaunchConfig:
    """LaunchConfig(...); that of 2.11 waits as long as it likes for ranks to shut down."""
    if "shutdown_timeout" in {one.name for one in fields(LaunchConfig)}:
        options["shutdown_timeout"] = shutdown_timeout
    return LaunchConfig(**options)


make_fake: Any = fake_tensor.FakeTensor if torch.__version__ >= "2.13" else _make_fake
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
FakeTensorDeviceMismatchError: Any = getattr(fake_tensor, "FakeTensorDeviceMismatchError", _NeverRaised)
non_strict_tracing_context: Any = getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)

__all__ = [
    "FakeTensorDeviceMismatchError",
    "all_gather_single",
    "counting",
    "launch_config",
    "make_fake",
    "non_strict_tracing_context",
]
