"""What torch 2.13 has and torch 2.11 has not, under the names of 2.13: GPU machines are sometimes on 2.11.

The package asks for 2.13, with which it is tested; `make gpu` may run on a torch that is there already.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes


class _NeverRaised(RuntimeError):
    """In place of an error that torch 2.11 does not tell from others."""


class _CountingShapeEnv(symbolic_shapes.ShapeEnv):
    """A ShapeEnv of torch 2.11 that counts how often a guard has fixed a size, as that of 2.13 does."""

    _replacements_version_counter = 0

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        before = self.replacements.get(a)
        super()._set_replacement(a, tgt, msg)
        self._replacements_version_counter += before != self.replacements.get(a)


def _make_fake(mode: Any, elem: Tensor, device: Any, *, requires_grad: bool) -> Tensor:
    """FakeTensor(...) where the class does not take `requires_grad`."""
    if elem.requires_grad != requires_grad:
        elem.requires_grad_(requires_grad)
    return fake_tensor.FakeTensor(mode, elem, device)


_TAKES_GRAD = "requires_grad" in inspect.signature(fake_tensor.FakeTensor.__new__).parameters
make_fake: Any = fake_tensor.FakeTensor if _TAKES_GRAD else _make_fake
_COUNTS = "_replacements_version_counter" in vars(symbolic_shapes.ShapeEnv())
ShapeEnv: Any = symbolic_shapes.ShapeEnv if _COUNTS else _CountingShapeEnv
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
FakeTensorDeviceMismatchError: Any = getattr(fake_tensor, "FakeTensorDeviceMismatchError", _NeverRaised)
non_strict_tracing_context: Any = getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)

__all__ = ["FakeTensorDeviceMismatchError", "ShapeEnv", "all_gather_single", "make_fake", "non_strict_tracing_context"]
