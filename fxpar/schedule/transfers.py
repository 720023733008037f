"""Sends and receives of a schedule, derived from its actions.

Forwards send activations to the next stage, B and I send gradients to the one before. Stages on one rank hand over
without a message. Between two ranks, messages of one direction are received in the order in which they are sent, so a
receive is posted early if an earlier message is needed later. The two directions are not ordered among each other:
where operations of a process group run in order (NCCL), each direction between two ranks needs one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from fxpar.schedule.actions import Action, Schedule


@dataclass(frozen=True)
class Transfer:
    """Activations (to stage + 1) or gradients (to stage - 1) of one micro-batch, as `stage` sends them."""

    what: Literal["activation", "gradient"]
    stage: int
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.stage + 1 if self.what == "activation" else self.stage - 1

    def __str__(self) -> str:
        return f"{self.what} {self.micro_batch} {self.stage}->{self.target}"


@dataclass(frozen=True)
class Send:
    """Start to send; nobody waits for its end but the owner of the memory."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True)
class Receive:
    """Start to receive."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"receive {self.transfer}"


@dataclass(frozen=True)
class Wait:
    """Wait for the end of a receive."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"wait {self.transfer}"


Step = Action | Send | Receive | Wait


def sent_by(plan: Schedule, action: Action) -> Transfer | None:
    """What a rank sends to another one when `action` has ended."""
    if action.part == "W":
        return None
    transfer = Transfer("activation" if action.part == "F" else "gradient", action.stage, action.micro_batch)
    if not 0 <= transfer.target < plan.stages or plan.ranks == 1:
        return None
    return transfer


def needed_by(plan: Schedule, action: Action) -> Transfer | None:
    """What must have come from another rank before `action` starts."""
    sources = {"F": ("activation", action.stage - 1), "B": ("gradient", action.stage + 1)}
    what, stage = sources.get("B" if action.part == "I" else action.part, ("", -1))
    if not 0 <= stage < plan.stages or plan.ranks == 1:
        return None
    return Transfer(what, stage, action.micro_batch)  # type: ignore[arg-type]


def with_transfers(plan: Schedule, *, ahead: int = 1) -> tuple[tuple[Step, ...], ...]:
    """The steps of each rank: its actions; a send right behind the action that makes the value; a receive posted before
    the `ahead`-th action in front of the one that needs it, so that it runs beside computation; and a wait right before
    the action that needs it.
    """
    channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            transfer = sent_by(plan, action)
            if transfer is not None:
                channels[rank, plan.rank_of(transfer.target)].append(transfer)
    return tuple(_steps(plan, rank, channels, ahead) for rank in range(plan.ranks))


def _steps(plan: Schedule, rank: int, channels: dict[tuple[int, int], list[Transfer]], ahead: int) -> tuple[Step, ...]:
    actions = plan.actions[rank]
    wanted = [needed_by(plan, action) for action in actions]
    where = {t: i for (_, to), sent in channels.items() if to == rank for i, t in enumerate(sent)}
    posted: dict[int, int] = defaultdict(int)  # source rank -> receives posted so far
    steps: list[Step] = []
    for i, action in enumerate(actions):
        for transfer in wanted[0 if i == 0 else i + ahead : i + ahead + 1]:
            if transfer is not None:
                source = plan.rank_of(transfer.stage)
                upto = max(posted[source], where[transfer] + 1)
                steps += [Receive(t) for t in channels[source, rank][posted[source] : upto]]
                posted[source] = upto
        incoming, sent = wanted[i], sent_by(plan, action)
        steps += [Wait(incoming)] if incoming is not None else []
        steps.append(action)
        steps += [Send(sent)] if sent is not None else []
    return tuple(steps)


__all__ = ["Receive", "Send", "Step", "Transfer", "Wait", "needed_by", "sent_by", "with_transfers"]
