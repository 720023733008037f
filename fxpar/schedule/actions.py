"""`Action` and `Schedule`: what each pipeline rank runs, in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fxpar.errors import ScheduleInvalidError

Part = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One part of one micro-batch on one stage.

    `part`: F the forward, B the whole backward, or in two halves I (gradient of what the stage received) and W
    (gradients of its parameters).
    """

    part: Part
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.part}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]` are what pipeline rank `rank` runs, in order.

    There are `ranks * virtual` stages; stage s is on rank `s % ranks`. Where stages share ranks, `places` are the ranks
    of each, all of which run it at the same time. A rank here is a place in the pipeline, in a run one rank or several.
    """

    kind: str
    ranks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    virtual: int = 1
    places: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        return len(self.places) or self.ranks * self.virtual

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that run a stage."""
        return self.places[stage] if self.places else (stage % self.ranks,)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must have ended before this one starts; where halves replace B, its I."""
        stage, batch = action.stage, action.micro_batch
        if action.part == "F":
            return (Action("F", stage - 1, batch),) if stage else ()
        if action.part == "W":
            return (Action("I", stage, batch),)
        forward = Action("F", stage, batch)
        return (forward, self.backward_of(stage + 1, batch)) if stage + 1 < self.stages else (forward,)

    def backward_of(self, stage: int, micro_batch: int) -> Action:
        """What makes the gradient that `stage` sends: its B or its I."""
        whole = Action("B", stage, micro_batch)
        return whole if whole in self._members else Action("I", stage, micro_batch)

    @cached_property
    def _members(self) -> frozenset[Action]:
        return frozenset(action for actions in self.actions for action in actions)

    def check(self) -> None:
        """Every micro-batch runs exactly once per stage, forward and backward, on the rank of the stage.

        Raises ScheduleInvalidError. Order is what `simulate` checks.
        """
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if not (0 <= action.stage < self.stages and 0 <= action.micro_batch < self.micro_batches):
                    raise ScheduleInvalidError(str(self), f"{action} is of no stage or micro-batch that there is")
                if rank not in (where := self.ranks_of(action.stage)):
                    on = ", ".join(map(str, where))
                    raise ScheduleInvalidError(str(self), f"{action} is on rank {rank}, its stage on {on}")
        counts = [Counter(actions) for actions in self.actions]
        for stage in range(self.stages):
            for rank in self.ranks_of(stage):
                self._check_stage(stage, counts[rank])

    def _check_stage(self, stage: int, counts: Counter[Action]) -> None:
        for batch in range(self.micro_batches):
            forward, whole, first, second = (counts[Action(p, stage, batch)] for p in ("F", "B", "I", "W"))
            if forward != 1:
                raise ScheduleInvalidError(str(self), f"{Action('F', stage, batch)} runs {forward} times")
            if (whole, first, second) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleInvalidError(
                    str(self),
                    f"the backward of micro-batch {batch} on stage {stage} runs {whole} times whole, {first} times "
                    f"its input part, {second} times its weight part; it is either once whole or once each half",
                )

    def __str__(self) -> str:
        chunks = f" x {self.virtual} chunks" if self.virtual > 1 else ""
        return f"{self.kind} ({self.ranks} ranks{chunks}, {self.micro_batches} micro-batches)"


__all__ = ["Action", "Part", "Schedule"]
