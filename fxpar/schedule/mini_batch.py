"""A mini-batch as actions of every rank on two streams: one computes, the other moves weights and gradients meanwhile.

    compute     |          run 0            |        run 1            |      run 2       |
    transfer    | switch 0 | switch 1 |  | reduce 0 | switch 2 |  | reduce 1 |  | reduce 2 |

A run begins with the switch that brings its weights, and waits for each of them where it first uses it. A reduction
begins while its run still makes gradients, and waits for each of them. All ranks have the same actions in the same
order, so a stream of one rank waits for the same stream of others, or for what is before it in the order of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal, NamedTuple

from fxpar.schedule.actions import Schedule
from fxpar.schedule.lanes import Interval, run_lanes
from fxpar.schedule.simulate import Costs, simulate

Kind = Literal["switch", "run", "reduce"]
BUCKETS = 8  # that weights come in, and gradients leave in
BUCKET_BYTES = 2 << 20  # that a bucket has at least
STAGING_BYTES = 64 << 20  # of messages on a rank at most, where nobody says otherwise
FORWARD = 1 / 3  # of a micro-batch
Passed = frozenset[int]  # groups whose gradients the next one adds to
NOTHING_PASSED: Passed = frozenset()


class GroupAction(NamedTuple):
    """What is done for one length group; `group` counts in the order of running."""

    kind: Kind
    group: int

    def __str__(self) -> str:
        return f"{self.kind} {self.group}"


@dataclass(frozen=True)
class MiniBatchSchedule:
    """Both streams, each in its order, and the transfers that a run `needs` to have ended before it begins. What an
    action is `fed_by` must have begun: a switch brings weights in the order in which its run uses them, a run makes
    gradients in the order in which its reduction sends them.
    """

    compute: tuple[GroupAction, ...]
    transfer: tuple[GroupAction, ...]
    needs: Mapping[GroupAction, tuple[GroupAction, ...]]
    fed_by: Mapping[GroupAction, GroupAction] = field(default_factory=dict)

    @property
    def actions(self) -> tuple[GroupAction, ...]:
        return (*self.compute, *self.transfer)

    @cached_property
    def waits(self) -> tuple[_Wait, ...]:
        """All actions, each behind those that it waits for. Raises ScheduleDeadlockError."""
        lanes = {"compute": self.compute, "transfer": self.transfer}

        def behind(action: GroupAction) -> tuple[GroupAction, ...]:
            feeding = self.fed_by.get(action)
            return self.needs.get(action, ()) if feeding is None else (*self.needs.get(action, ()), feeding)

        order = run_lanes("a mini-batch", lanes, lambda _: 0.0, lambda action: [(one, 0.0) for one in behind(action)])
        transfers = set(self.transfer)
        return tuple(
            _Wait(action, action in transfers, tuple(self.needs.get(action, ())), self.fed_by.get(action))
            for action in order
        )


class _Wait(NamedTuple):
    """An action, its stream, and what must have ended, or must have begun, before it."""

    action: GroupAction
    transfer: bool
    needs: tuple[GroupAction, ...]
    fed_by: GroupAction | None


@cache
def blocking(groups: int, passed_on: Passed = NOTHING_PASSED) -> MiniBatchSchedule:
    """One after the other: nothing runs beside anything else. Groups that have `passed_on` their gradients reduce none:
    the next run adds to them.
    """
    order = [GroupAction(kind, group) for group in range(groups) for kind in ("switch", "run", "reduce")]
    return MiniBatchSchedule(tuple(one for one in order if one.kind != "reduce" or one.group not in passed_on), (), {})


def in_waves(sizes: Sequence[int]) -> MiniBatchSchedule:
    """Every rank takes part in the transfers of all groups of a wave, and runs those that are its own, so groups
    on different ranks at the same time. The weights of a wave come before it, its gradients leave behind it.
    """
    order, first = [], 0
    for size in sizes:
        wave = range(first, first := first + size)
        order += [GroupAction(kind, group) for kind in ("switch", "run", "reduce") for group in wave]
    return MiniBatchSchedule(tuple(order), (), {})


def overlapped(overwrites: Sequence[bool], passed_on: Passed = NOTHING_PASSED) -> MiniBatchSchedule:
    """The next group's weights come while a group runs, and its gradients leave while the next one runs.

    `overwrites[i]`: the switch of group i writes where an earlier group of the mini-batch may still have weights, so it
    waits for the reduction before it (what leaves a graph may be a view of its weights). Gradients of at most two
    groups are alive at a time, where those that groups have `passed_on` to the next one are one. A run needs nothing
    that is behind its switch, so it never waits for what it feeds.
    """
    return _overlapped(tuple(overwrites), passed_on)


@cache
def _overlapped(overwrites: tuple[bool, ...], passed_on: Passed) -> MiniBatchSchedule:
    groups = range(len(overwrites))
    switch, run, reduce = ([GroupAction(kind, group) for group in groups] for kind in ("switch", "run", "reduce"))
    transfer, needs = switch[:1], {}
    for group in groups:
        # What is before its switch is the reduction of the group before the last one, or comes after that.
        before = transfer.index(switch[group])
        needs[run[group]] = tuple(transfer[max(before - 1, 0) : before])
        following = switch[group + 1 : group + 2]
        late = bool(following) and overwrites[group + 1]
        leaving = [] if group in passed_on else [reduce[group]]
        transfer += [*leaving, *following] if late else [*following, *leaving]
    fed_by = {**dict(zip(run, switch, strict=True)), **{reduce[g]: run[g] for g in groups if g not in passed_on}}
    return MiniBatchSchedule(tuple(run), tuple(transfer), needs, fed_by)


def bucket_bytes(whole: int, room: int) -> int:
    """Bytes of a bucket of `whole`, if no more than `room` may be under way at a time."""
    return min(room, max(whole // BUCKETS, BUCKET_BYTES))


def staged_bytes(weights: int, most: int) -> int:
    """Bytes that messages are packed into and received in, at most `most`, where layouts have up to `weights` bytes on
    a rank: two buckets of what such a layout sends and receives, one on the wire and one that is packed meanwhile.
    """
    both_ways = 2 * weights
    return min(most, both_ways, 2 * bucket_bytes(both_ways, most // 2))


@dataclass(frozen=True)
class Pace:
    """How a run goes, in micro-batches of a rank: the first part, in which it comes to use its weights; the last one,
    in which it makes its gradients; and how long ranks are `idle` in between.
    """

    uses: float = FORWARD
    makes: float = 1 - FORWARD
    idle: float = 0.0


def pace_of(plan: Schedule) -> Pace:
    """Of a pipeline: all of its ranks get weights, and hand gradients over, at the same time; the one that is the first
    to have used its weights, and the one that is the last to begin with its gradients, say when.
    """
    each = 1 / plan.virtual
    timeline = simulate(plan, Costs(forward_ms=FORWARD * each, backward_ms=(1 - FORWARD) * each))
    used, begun = [], []
    for spans in timeline.spans:
        first = {span.action.stage: span for span in reversed(spans) if span.action.part == "F"}
        last = {span.action.stage: span for span in spans if span.action.part in ("B", "W")}
        used.append(max(span.end_ms for span in first.values()))
        begun.append(min(span.start_ms for span in last.values()))
    whole = timeline.makespan_ms
    return Pace(min(used), whole - max(begun), whole - plan.micro_batches)


@dataclass(frozen=True)
class Flow:
    """Of a run's seconds, the first in which it comes to use its weights (the forward of its first micro-batch), and
    the last in which it makes its gradients (the backward of its last one). See `Pace` for runs of stages.
    """

    uses_s: float = 0.0
    makes_s: float = 0.0

    @classmethod
    def of_run(cls, seconds: float, micro_batches: int, pace: Pace | None = None) -> Flow:
        """Of a run that takes so long, with micro-batches that take equally long; by default without stages."""
        pace = pace or Pace()
        each = seconds / (micro_batches + pace.idle)
        return cls(each * pace.uses, each * pace.makes)


AT_ONCE = Flow()


@dataclass(frozen=True)
class SimulatedMiniBatch:
    """Start and end of each action in seconds; `exposed_s` is what the step takes beyond its runs."""

    spans: Mapping[GroupAction, Interval]
    makespan_s: float
    exposed_s: float


def simulate_mini_batch(
    plan: MiniBatchSchedule,
    seconds: Mapping[GroupAction, float],
    flows: Mapping[GroupAction, Flow] | None = None,
) -> SimulatedMiniBatch:
    """Each action begins as soon as its stream is free and what it needs has ended.

    `flows[run]` says when a run uses its weights and makes its gradients. They come in BUCKETS, evenly, and an action
    begins so late that it never waits for them. A run that is not listed needs all weights at once, and makes all
    gradients at its end.

    Raises ScheduleDeadlockError if the streams wait for each other.
    """
    flows = flows or {}
    spans: dict[GroupAction, Interval] = {}
    free = [0.0, 0.0]  # the stream that computes, and the one that moves
    for action, transfer, needs, feeding in plan.waits:  # a mini-batch is planned by hundreds of these
        begin = free[transfer]
        for need in needs:
            begin = max(begin, spans[need][1])
        if feeding is not None:
            flow = flows.get(action if action.kind == "run" else feeding, AT_ONCE)
            gives, takes = (seconds[feeding], flow.uses_s) if action.kind == "run" else (flow.makes_s, seconds[action])
            begin = max(begin, spans[feeding][1] + min(gives, takes) * (1 / BUCKETS - 1))
        end = free[transfer] = begin + seconds[action]
        spans[action] = begin, end
    makespan = max((end for _, end in spans.values()), default=0.0)
    runs = sum(seconds[action] for action in plan.actions if action.kind == "run")
    return SimulatedMiniBatch(spans, makespan, makespan - runs)
