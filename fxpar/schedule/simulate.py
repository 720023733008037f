"""`simulate(schedule, costs)`: run a schedule on paper. What it accepts does not deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpar.errors import ScheduleMemoryError
from fxpar.schedule.actions import Action, Schedule
from fxpar.schedule.lanes import run_lanes
from fxpar.schedule.transfers import Transfer, needed_by

Cost = float | Callable[[Action], float]


@dataclass(frozen=True)
class Costs:
    """ms of the parts, each one number or a function of the action (so that stages and micro-batches may differ).

    `input_ms` and `weight_ms` are the halves of the backward; by default half of `backward_ms` each. `transfer_ms` is
    from the end of the sender's action until the receiver has the value; it keeps no rank busy. So much of a forward as
    `early_ms` needs nothing of the stage before, and runs in front of the wait for it.
    """

    forward_ms: Cost = 1.0
    backward_ms: Cost = 2.0
    input_ms: Cost | None = None
    weight_ms: Cost | None = None
    transfer_ms: float | Callable[[Transfer], float] = 0.0
    early_ms: Cost = 0.0

    def of(self, action: Action) -> float:
        """ms of one action."""
        half = {"I": self.input_ms, "W": self.weight_ms}.get(action.part)
        if action.part in ("I", "W") and half is None:
            return _value(self.backward_ms, action) / 2
        return _value({"F": self.forward_ms, "B": self.backward_ms}.get(action.part, half), action)

    def of_transfer(self, transfer: Transfer) -> float:
        """ms of one transfer between ranks."""
        return self.transfer_ms(transfer) if callable(self.transfer_ms) else self.transfer_ms

    def before_it_waits(self, action: Action) -> float:
        """ms of an action that run before what another stage sends has to be there."""
        return _value(self.early_ms, action) if action.part == "F" else 0.0


def _value(cost: Cost | None, action: Action) -> float:
    assert cost is not None
    return cost(action) if callable(cost) else cost


@dataclass(frozen=True)
class Span:
    """When an action runs."""

    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run. A saved micro-batch is one whose forward has run on a stage and whose backward (both halves of
    it) has not ended; `peak_saved` is the most per stage, `peak_saved_on_rank` over all stages of a rank.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by rank
    makespan_ms: float
    peak_saved: tuple[int, ...]
    peak_saved_on_rank: tuple[int, ...]
    busy_ms: tuple[float, ...] = field(default=())

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        whole = self.makespan_ms * len(self.spans)
        return (whole - sum(self.busy_ms)) / whole if whole else 0.0


def simulate(plan: Schedule, costs: Costs | None = None, *, limit: int | Sequence[int] | None = None) -> Timeline:
    """Run every rank's actions in order, each as soon as what it needs is there.

    `limit` is the most saved micro-batches on a rank (one number, or one per rank).

    Raises ScheduleInvalidError unless each micro-batch runs once per stage, ScheduleDeadlockError if ranks wait for
    each other, ScheduleMemoryError if the limit is passed.
    """
    costs = costs or Costs()
    plan.check()
    lanes = {f"rank {rank}": [_Run(rank, one) for one in actions] for rank, actions in enumerate(plan.actions)}
    before = {run: mine[at - 1] for mine in lanes.values() for at, run in enumerate(mine) if at}
    found = run_lanes(str(plan), lanes, lambda run: costs.of(run.action), lambda run: _needs(plan, run, before, costs))
    spans = [[Span(run.action, *found[run]) for run in mine] for mine in lanes.values()]
    return _timeline(plan, spans, limit)


class _Run(NamedTuple):
    """An action on one of the ranks that run it."""

    rank: int
    action: Action

    def __str__(self) -> str:
        return str(self.action)


def _needs(plan: Schedule, run: _Run, before: Mapping[_Run, _Run], costs: Costs) -> Iterator[tuple[_Run, float]]:
    """What must have ended before an action, and how long before: what comes from another rank travels. An action that
    does something before it waits may begin by as much earlier. Ranks of one stage begin at the same time, as it may
    have collectives: each waits for what the others do before.
    """
    rank, action = run
    incoming = needed_by(plan, action)
    for need in plan.needs(action):
        for source in plan.ranks_of(need.stage) if need.stage != action.stage else (rank,):
            travels = incoming is not None and need.stage != action.stage and source != rank
            lag = costs.of_transfer(incoming) if travels and incoming is not None else 0.0
            early = costs.before_it_waits(action) if incoming is not None and need.stage != action.stage else 0.0
            yield _Run(source, need), lag - early
    for other in plan.ranks_of(action.stage):
        if other != rank and (there := _Run(other, action)) in before:
            yield before[there], 0.0


def _timeline(plan: Schedule, spans: list[list[Span]], limit: int | Sequence[int] | None) -> Timeline:
    peak_saved = [0] * plan.stages
    on_rank = []
    for rank, done in enumerate(spans):
        saved, most = [0] * plan.stages, 0
        for span in done:
            stage = span.action.stage
            saved[stage] += {"F": 1, "B": -1, "W": -1}.get(span.action.part, 0)
            peak_saved[stage] = max(peak_saved[stage], saved[stage])
            most = max(most, sum(saved))
        on_rank.append(most)
        allowed = limit if limit is None or isinstance(limit, int) else limit[rank]
        if allowed is not None and most > allowed:
            raise ScheduleMemoryError(str(plan), rank, most, allowed)
    return Timeline(
        plan,
        tuple(map(tuple, spans)),
        max((span.end_ms for done in spans for span in done), default=0.0),
        tuple(peak_saved),
        tuple(on_rank),
        tuple(sum(span.end_ms - span.start_ms for span in done) for done in spans),
    )
