"""Memory that messages are packed into and received in: allocated once, used in every run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxpar.errors import ExecutionError

ALIGNMENT = 64  # bytes; every message starts at a multiple of it
CHUNK = 16  # bytes; within a buffer of a collective parts start at multiples, so that every dtype may stand there


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes`, rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(eq=False)
class Arena:
    """Hands out a slot piece by piece."""

    memory: Tensor
    used: int = 0

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes`, from an aligned byte on."""
        piece = self.memory[self.used : self.used + nbytes]
        assert piece.numel() == nbytes, "the slot was made too small"
        self.used += aligned(nbytes)
        return piece


@dataclass(eq=False)
class Staging:
    """Two slots, for the phase on the wire and the one that is packed meanwhile.

    Switches that never run at the same time may share one; each slot grows to what the largest one needs (a switch
    compiled before keeps the smaller memory that it was compiled for).
    """

    device: torch.device | str = "cpu"
    slots: list[Tensor] = field(default_factory=list)

    def slot(self, index: int, nbytes: int) -> Tensor:
        """At least `nbytes` bytes (uint8) of slot 0 or 1."""
        while len(self.slots) <= index:
            self.slots.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if self.slots[index].numel() < nbytes:
            self.slots[index] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.slots[index]

    @property
    def nbytes(self) -> int:
        """Bytes of both slots."""
        return sum(slot.numel() for slot in self.slots)


def staging_on(device: torch.device, given: Staging | None) -> Staging:
    """`given`, or staging of one's own. Raises ExecutionError if it lies elsewhere than the tensors."""
    if given is None:
        return Staging(device)
    if torch.device(given.device).type != device.type:
        raise ExecutionError("any", f"staging is on {given.device}, the tensors on {device}")
    return given
