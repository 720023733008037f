"""What torch 2.13 has and torch 2.11 has not, under the names of 2.13: GPU machines are sometimes on 2.11.

The package asks for 2.13, with which it is tested; `make gpu` may run on a torch that is there already.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor


class _NeverRaised(RuntimeError):
    """In place of an error that torch 2.11 does not tell from others."""


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
FakeTensorDeviceMismatchError: Any = getattr(fake_tensor, "FakeTensorDeviceMismatchError", _NeverRaised)
non_strict_tracing_context: Any = getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)

__all__ = ["FakeTensorDeviceMismatchError", "all_gather_single", "non_strict_tracing_context"]
