"""Sends and receives of a schedule, derived from its actions.

Forwards send activations to the next stage, B and I send gradients to the one before. Stages on one rank hand over
without a message. Between two ranks, messages of one direction are received in the order in which they are sent, so a
receive is posted early if an earlier message is needed later. The two directions are not ordered among each other:
where operations of a process group run in order (NCCL), each direction between two ranks needs one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
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
    if not 0 <= transfer.target < plan.stages or _is_alone(plan):
        return None
    return transfer


def _is_alone(plan: Schedule) -> bool:
    """Whether one rank has all stages, each on the same ranks as the next one, so that nothing is sent."""
    return plan.ranks == 1 and not plan.places


def needed_by(plan: Schedule, action: Action) -> Transfer | None:
    """What must have come from another rank before `action` starts."""
    sources = {"F": ("activation", action.stage - 1), "B": ("gradient", action.stage + 1)}
    what, stage = sources.get("B" if action.part == "I" else action.part, ("", -1))
    if not 0 <= stage < plan.stages or _is_alone(plan):
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
                channels[rank, plan.ranks_of(transfer.target)[0]].append(transfer)
    return tuple(_steps(plan, rank, _in_order(plan, rank, channels), ahead) for rank in range(plan.ranks))


def _steps(plan: Schedule, rank: int, due: Callable[[Transfer], list[Transfer]], ahead: int) -> tuple[Step, ...]:
    actions = plan.actions[rank]
    wanted = [needed_by(plan, action) for action in actions]
    steps: list[Step] = []
    for i, action in enumerate(actions):
        for transfer in wanted[0 if i == 0 else i + ahead : i + ahead + 1]:
            steps += [Receive(one) for one in (due(transfer) if transfer is not None else ())]
        incoming, sent = wanted[i], sent_by(plan, action)
        steps += [Wait(incoming)] if incoming is not None else []
        steps.append(action)
        steps += [Send(sent)] if sent is not None else []
    return tuple(steps)


def _in_order(
    plan: Schedule, rank: int, channels: Mapping[tuple[int, int], list[Transfer]]
) -> Callable[[Transfer], list[Transfer]]:
    """What a rank has to post where it wants a transfer: all that its sender sends before, and that itself. Where
    stages share ranks, all is wanted in the order in which it is sent.
    """
    if plan.places:
        return lambda transfer: [transfer]
    where = {t: i for (_, to), sent in channels.items() if to == rank for i, t in enumerate(sent)}
    posted: dict[int, int] = defaultdict(int)  # source rank -> receives posted so far

    def due(transfer: Transfer) -> list[Transfer]:
        source = plan.ranks_of(transfer.stage)[0]
        first, posted[source] = posted[source], max(posted[source], where[transfer] + 1)
        return channels[source, rank][first : posted[source]]

    return due


__all__ = ["Receive", "Send", "Step", "Transfer", "Wait", "needed_by", "sent_by", "with_transfers"]
