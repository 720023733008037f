"""Options of a compiled switch, what it counts, and what a rank exchanges in a phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.transport.messages import Message
from fxpar.transport.reads import Segment

# A slice of so many bytes is a message of its own. Messages of one slice are mostly sent from, and received in, the
# tensors themselves, which saves two copies; a message costs as much as copying some hundred KB.
ALONE_BYTES = 1 << 20


@dataclass(frozen=True)
class TransportOptions:
    """How a switch is compiled; see `Switch`."""

    execution: str = "auto"
    staging_bytes: int = STAGING_BYTES
    checked: bool = False
    add: bool = False
    merge: bool = True
    bucketed: bool = False


@dataclass(eq=False)
class SwitchCounts:
    """What a compiled switch does in every run, on this rank."""

    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0
    skipped_bytes: int = 0  # held and needed at the same address
    staging_bytes: int = 0
    executions: list[str] = field(default_factory=list)  # of the phases that this rank takes part in


@dataclass(frozen=True, eq=False)
class PhaseTraffic:
    """What this rank sends and receives together; `ranks` is empty for messages to single peers."""

    sends: list[tuple[Message, list[list[Segment]]]]
    receives: list[Message]
    ranks: tuple[int, ...] = ()
    room: int = 0  # bytes of one rank's part of an all-gather
