"""Dynamic loss scaling for fp16 gradients (Micikevicius et al., Mixed Precision Training, 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class LossScaler:
    """The factor on the loss: a power of two, so that nothing is rounded when gradients are divided by it.

    It is halved by an overflow, down to `least`, and doubled after `interval` steps without one.
    """

    scale: float = 2.0**16
    interval: int = 2000
    least: float = 1.0
    most: float = 2.0**32
    good: int = 0

    def update(self, overflow: bool) -> None:
        """After a mini-batch, alike on all ranks."""
        if overflow:
            self.scale, self.good = max(self.scale / 2, self.least), 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = min(self.scale * 2, self.most), 0

    @property
    def is_exhausted(self) -> bool:
        """No smaller factor is left: what overflows now is no matter of scaling."""
        return self.scale <= self.least

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale, self.good = float(state["scale"]), int(state["good"])


def overflows_anywhere(tensors: Iterable[Tensor], group: Any, device: torch.device) -> bool:
    """Whether any rank's tensors hold an infinity or NaN; the same on all ranks."""
    found = torch.zeros((), device=device)
    for tensor in tensors:
        # A sum is infinite or NaN if any of its terms is, and reads the memory once; in fp64 it cannot overflow itself.
        found += (~torch.isfinite(tensor.sum(dtype=torch.float64))).float()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found > 0)
