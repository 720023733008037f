"""One step (a mini-batch and its optimizer step) as spans on lanes, predicted or measured; and the prediction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any, Literal

from fxpar.ir.exec_graph import Program
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, position_of
from fxpar.ir.teams import in_step
from fxpar.runtime.micro import replica_of
from fxpar.runtime.pipeline import plan_pipeline
from fxpar.runtime.spans import RunSpan
from fxpar.schedule import Action, Costs, Span, Transfer, simulate
from fxpar.schedule.mini_batch import Flow, GroupAction, MiniBatchSchedule, Pace, in_waves, simulate_mini_batch
from fxpar.viz.inside import ACTION_PARTS, Inside

MOST_RANKS = 32  # that a picture has lanes for
Lengths = tuple[int, ...]  # of the sequences of a micro-batch


@dataclass(frozen=True)
class StepGroup:
    """A length group of a step: `micro_batches[replica]` are the lengths of the sequences of each micro-batch, each of
    which stands for `rows` sequences (`fxpar.cost.polynomial.Sequences`).
    """

    label: str
    strategy: str
    micro_batches: tuple[tuple[Lengths, ...], ...]
    switch_bytes: int = 0
    reduce_bytes: int = 0
    rows: int = 1

    @property
    def slots(self) -> int:
        """Micro-batches of the longest list."""
        return max(map(len, self.micro_batches))

    @property
    def tokens(self) -> int:
        return self.rows * sum(sum(lengths) for replica in self.micro_batches for lengths in replica)


@dataclass(frozen=True)
class Planned:
    """A group and what its prediction needs."""

    group: StepGroup
    inside: Inside
    switch_ms: float = 0.0
    reduce_ms: float = 0.0


@dataclass(frozen=True)
class StepSpan:
    """`kind` as in `fxpar.runtime.spans`; -1 where there is no group, micro-batch or stage."""

    lane: int
    kind: str
    group: int
    start_ms: float
    end_ms: float
    micro_batch: int = -1
    stage: int = -1


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same at the same time; `replicas[g]` is their data-parallel replica in group g, -1 where that
    runs on other ranks.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]

    def __str__(self) -> str:
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        parts, begin = [], self.ranks[0]
        for here, after in zip(self.ranks, (*self.ranks[1:], None), strict=True):
            if after != here + 1:
                parts.append(str(begin) if begin == here else f"{begin}-{here}")
                begin = after
        text = ",".join(map(str, parts))
        return f"ranks {text}" if len(text) < 20 else f"ranks {self.ranks[0]}.. ({len(self.ranks)})"


@dataclass(frozen=True)
class StepTimeline:
    """Spans of one lane never overlap; times from the begin of the step."""

    source: Literal["predicted", "measured"]
    groups: tuple[StepGroup, ...]
    lanes: tuple[Lane, ...]
    spans: tuple[StepSpan, ...]
    hidden_lanes: int = 0

    @cached_property
    def end_ms(self) -> float:
        return max((span.end_ms for span in self.spans), default=0.0)

    def group_window(self, group: int) -> tuple[float, float]:
        """When the first lane begins a group and the last one ends it; what waits of it behind the begin of the next
        group (its gradients, where borders run beside groups) is left out.
        """
        following = min((s.start_ms for s in self.spans if s.group > group), default=math.inf)
        mine = [span for span in self.spans if span.group == group and span.start_ms < following]
        return min((s.start_ms for s in mine), default=0.0), max((s.end_ms for s in mine), default=0.0)

    def group_ms(self, group: int) -> dict[str, float]:
        """Means over ranks: "switch" and "reduce" of all, and of those that run it "run", from the first of the other
        spans to the last.
        """
        found = {"switch": 0.0, "run": 0.0, "reduce": 0.0}
        share = [len(lane.ranks) / sum(len(lane.ranks) for lane in self.lanes) for lane in self.lanes]
        runs: dict[int, tuple[float, float]] = {}
        for span in self.spans:
            if span.group == group and span.kind in ("switch", "reduce"):
                found[span.kind] += (span.end_ms - span.start_ms) * share[span.lane]
            elif span.group == group:
                start, end = runs.get(span.lane, (span.start_ms, span.end_ms))
                runs[span.lane] = min(start, span.start_ms), max(end, span.end_ms)
        took = sum((end - start) * len(self.lanes[lane].ranks) for lane, (start, end) in runs.items())
        found["run"] = took / self._ranks_of(group) if runs else 0.0
        return found

    def bubble(self, group: int) -> float | None:
        """The share of a pipeline's time, from its first action to its last, in which ranks have none; None of a group
        without pipeline stages.
        """
        mine = [span for span in self.spans if span.group == group and span.kind in ACTION_PARTS]
        if not mine:
            return None
        ranks = [len(lane.ranks) for lane in self.lanes]
        whole = max(span.end_ms for span in mine) - min(span.start_ms for span in mine)
        busy = sum((span.end_ms - span.start_ms) * ranks[span.lane] for span in mine)
        return 1 - busy / (whole * self._ranks_of(group)) if whole > 0 else 0.0

    def _ranks_of(self, group: int) -> int:
        """How many ranks run it, those without a micro-batch among them."""
        return sum(len(lane.ranks) for lane in self.lanes if lane.replicas[group] >= 0)

    def tokens_per_s(self, group: int) -> float:
        """Of all replicas, from the begin of a group to its end, switch and reduction included; 0.0 for no time."""
        begin, end = self.group_window(group)
        return 1e3 * self.groups[group].tokens / (end - begin) if end > begin else 0.0

    def to_json(self) -> dict[str, Any]:
        """Spans as rows [lane, kind, group, start, ms, micro-batch, stage]."""
        return {
            "source": self.source,
            "end_ms": _rounded(self.end_ms),
            "hidden_lanes": self.hidden_lanes,
            "lanes": [{"name": str(lane), "replicas": list(lane.replicas)} for lane in self.lanes],
            "spans": [
                [s.lane, s.kind, s.group, _rounded(s.start_ms), _rounded(s.end_ms - s.start_ms), s.micro_batch, s.stage]
                for s in self.spans
            ],
            "groups": [
                {
                    "window": [*map(_rounded, self.group_window(i))],
                    **_rounded_all({**self.group_ms(i), "tokens_per_s": self.tokens_per_s(i)}),
                    "bubble": self.bubble(i),
                }
                for i in range(len(self.groups))
            ],
            "optimizer": _rounded(max((s.end_ms - s.start_ms for s in self.spans if s.kind == "optimizer"), default=0)),
        }


def predict_step(
    planned: Sequence[Planned],
    world: int,
    optimizer_ms: float = 0.0,
    order: MiniBatchSchedule | None = None,
    flowing: Mapping[str, Pace] | None = None,
    waves: Sequence[int] = (),
) -> StepTimeline:
    """Each group: switch, prologue, micro-batches, epilogue, reduction; after them the optimizer.

    All ranks begin a switch and a reduction together. Micro-batches take what `group_cost` says of them; under pipeline
    stages they run by the schedule: each part of a stage takes its share of that, a message its bytes over the link.
    `order` says what may run beside what, by default nothing: the spans of a switch and a reduction are then what the
    ranks wait for it. To groups of `flowing` strategies weights come, and their gradients leave, one by one.
    Of `waves`, if there are any, so many groups each wait for nobody but their own ranks.
    """
    lanes, places = _lanes(planned, world)
    runs = [_group_spans(one, number, [where[number] for where in places]) for number, one in enumerate(planned)]
    waves = waves or [1] * len(planned)
    begun, order = _begun(planned, [end for _, end in runs], waves), order or in_waves(waves)
    took = {GroupAction("run", number): 0.0 for number in range(len(runs))}
    for (first, late), (_, end) in zip(begun, runs, strict=True):  # the first of a wave stands for all of it
        took[GroupAction("run", first)] = max(took[GroupAction("run", first)], late + end)
    for number, one in enumerate(planned):
        took |= {GroupAction("switch", number): one.switch_ms, GroupAction("reduce", number): one.reduce_ms}
    flows = {
        run: Flow.of_run(took[run], one.group.slots, flowing[one.group.strategy])
        for run, one in zip(sorted(run for run in took if run.kind == "run"), planned, strict=True)
        if flowing and one.group.strategy in flowing
    }
    simulated = simulate_mini_batch(order, took, flows)
    end_ms = simulated.makespan_s  # all times here are in ms
    spans: list[StepSpan] = []
    now = 0.0
    for (found, _), (first, late) in zip([*runs, ([], 0.0)], [*begun, (len(runs), 0.0)], strict=True):
        begin, end = simulated.spans.get(GroupAction("run", first), (end_ms, end_ms))
        for action, (start, stop) in sorted(simulated.spans.items(), key=lambda item: item[1]):
            if action.kind != "run":  # the ranks wait for what moves while nothing runs
                _everyone(spans, range(len(lanes)), action.kind, action.group, max(start, now), min(stop, begin))
        at = begin + late
        spans += [replace(span, start_ms=span.start_ms + at, end_ms=span.end_ms + at) for span in found]
        now = end
    _everyone(spans, range(len(lanes)), "optimizer", -1, end_ms, end_ms + optimizer_ms)
    return StepTimeline("predicted", tuple(one.group for one in planned), lanes, tuple(spans))


def _begun(planned: Sequence[Planned], took: Sequence[float], waves: Sequence[int]) -> list[tuple[int, float]]:
    """Of each group the first one of its wave, and when it begins behind that: once its ranks have done others."""
    found: list[tuple[int, float]] = []
    for size in waves:
        first, free = len(found), defaultdict[int, float](float)  # by rank
        for one, ms in zip(planned[first : first + size], took[first : first + size], strict=True):
            ranks = one.inside.program.mesh.ranks
            found.append((first, max(free[rank] for rank in ranks)))
            free.update(dict.fromkeys(ranks, found[-1][1] + ms))
    return found


def _group_spans(one: Planned, number: int, places: Sequence[_Place]) -> tuple[list[StepSpan], float]:
    """What each lane does between the switch and the reduction of a group, from 0, and when the last one is done."""
    lanes, now = [lane for lane, place in enumerate(places) if place != _NOWHERE], one.inside.once_ms("prologue")
    spans: list[StepSpan] = []
    _everyone(spans, lanes, "prologue", number, 0.0, now)
    found = {place: _run(one, *place) for place in set(places) - {_NOWHERE}}
    for lane in lanes:
        for kind, start, end, micro, stage in found[places[lane]]:
            spans.append(StepSpan(lane, kind, number, now + start, now + end, micro, stage))
    now += max((end for run in found.values() for _, _, end, _, _ in run), default=0.0)
    end = now + one.inside.once_ms("epilogue")
    _everyone(spans, lanes, "epilogue", number, now, end)
    return spans, end


def _everyone(
    spans: list[StepSpan], lanes: Iterable[int], kind: str, group: int, start_ms: float, end_ms: float
) -> None:
    if end_ms > start_ms:
        spans += [StepSpan(lane, kind, group, start_ms, end_ms) for lane in lanes]


_Place = tuple[int, int]  # replica, position in the pipeline
_NOWHERE: _Place = (-1, -1)  # of a rank that does not run the group
_Run = list[tuple[str, float, float, int, int]]  # kind, start, end, micro-batch, stage


def _lanes(planned: Sequence[Planned], world: int) -> tuple[tuple[Lane, ...], list[tuple[_Place, ...]]]:
    """Ranks that hold equal micro-batches at the same position of the pipeline in every group share a lane."""
    alike: dict[Any, list[int]] = defaultdict(list)
    places: dict[int, tuple[_Place, ...]] = {}
    for rank in range(world):
        where = tuple(_place(one, rank) for one in planned)
        places[rank] = where
        held = tuple(
            one.group.micro_batches[replica] if replica >= 0 else None
            for one, (replica, _) in zip(planned, where, strict=True)
        )
        alike[held, tuple(position for _, position in where)].append(rank)
    lanes = tuple(Lane(tuple(r), tuple(replica for replica, _ in places[r[0]])) for r in alike.values())
    return lanes, [places[lane.ranks[0]] for lane in lanes]


def _stage(span: RunSpan, programs: Sequence[Program], rank: int) -> int:
    """The stage of a measured span as `Inside` counts them."""
    program = programs[span.group] if span.group >= 0 and span.micro_batch >= 0 else None
    if not isinstance(program, TeamsGraph):
        return span.stage
    return program.places_of(program.team_of(rank)).start + max(span.stage, 0)


def _place(one: Planned, rank: int) -> _Place:
    return _place_in(one.inside.program, rank)


def _place_in(program: Program, rank: int) -> _Place:
    if rank not in program.mesh:
        return _NOWHERE
    return replica_of(program, rank), position_of(program, rank)


def _run(one: Planned, replica: int, position: int) -> _Run:
    """What a rank does between the switch and the reduction of a group, from 0. `replica` and `position` count as in
    `_place`; stages are those of `Inside`.
    """
    whole = one.inside.program
    if isinstance(whole, TeamsGraph):
        if in_step(whole.strategy):
            return _run_in_step(one, whole, replica)
        number = next(n for n in range(len(whole.teams)) if replica in whole.replicas_of(n))
        replicas, first = whole.replicas_of(number), whole.places_of(number).start
        group = replace(one.group, micro_batches=one.group.micro_batches[replicas.start : replicas.stop])
        team = Planned(group, one.inside.teams[number])
        return [(*span[:4], first + max(span[4], 0)) for span in _run(team, replica - replicas.start, position)]
    program, replicas = whole, one.group.micro_batches
    lockstep = program.strategy.most_zero >= 2
    if isinstance(program, PipelineGraph):
        slots = max(map(len, replicas)) if lockstep else len(replicas[replica])
        return _actions(one, program, replica, slots, lockstep)[position] if slots else []
    found: _Run = []
    now = 0.0
    for number, lengths in enumerate(replicas[replica]):
        mine = one.inside.ms(0, "body", lengths)
        found.append(("micro_batch", now, now + mine, number, -1))
        now += _slot_ms(one, number, lambda at: one.inside.ms(0, "body", at)) if lockstep else mine
    return found


def _run_in_step(one: Planned, whole: TeamsGraph, replica: int) -> _Run:
    """At each position all teams wait for the slowest replica."""
    of = [number for number in range(len(whole.teams)) for _ in whole.replicas_of(number)]
    times = [
        [one.inside.teams[number].ms(0, "body", lengths) for lengths in mine]
        for number, mine in zip(of, one.group.micro_batches, strict=True)
    ]
    begins = accumulate((max(found) for found in zip_longest(*times, fillvalue=0.0)), initial=0.0)
    stage, mine = whole.places_of(of[replica]).start, times[replica]
    return [
        ("micro_batch", begin, begin + ms, number, stage)
        for number, (ms, begin) in enumerate(zip(mine, begins, strict=False))
    ]


def _slot_ms(one: Planned, number: int, ms: Callable[[Lengths], float]) -> float:
    """In lock step all replicas wait for the slowest one."""
    return max(ms(replica[number]) for replica in one.group.micro_batches if number < len(replica))


def _actions(one: Planned, program: PipelineGraph, replica: int, slots: int, lockstep: bool) -> list[_Run]:
    plan = plan_pipeline(program, slots)
    mine = one.group.micro_batches[replica]

    def at(action: Action, of: Callable[[Lengths], float]) -> float:
        number = min(action.micro_batch, slots - 1)  # a round is filled up with copies of the last one
        return _slot_ms(one, number, of) if lockstep else of(mine[number])

    def ms(action: Action) -> float:
        return at(action, lambda lengths: one.inside.ms(action.stage, ACTION_PARTS[action.part], lengths))

    def early_ms(action: Action) -> float:
        return at(action, lambda lengths: one.inside.early_ms(action.stage, lengths))

    def transfer_ms(transfer: Transfer) -> float:
        lengths = mine[min(transfer.micro_batch, len(mine) - 1)] if mine else ()
        return one.inside.send_ms(transfer.stage, transfer.what, lengths)

    return [
        [_action(span) for span in done] for done in simulate(plan, Costs(ms, ms, ms, ms, transfer_ms, early_ms)).spans
    ]


def _action(span: Span) -> tuple[str, float, float, int, int]:
    return span.action.part, span.start_ms, span.end_ms, span.action.micro_batch, span.action.stage


def _rounded(ms: float) -> float:
    return float(f"{ms:.9g}")


def _rounded_all(times: dict[str, float]) -> dict[str, float]:
    return {name: _rounded(ms) for name, ms in times.items()}


def measured_step(
    groups: Sequence[StepGroup], ranks: Sequence[Sequence[RunSpan]], programs: Sequence[Program]
) -> StepTimeline:
    """One lane per rank, of the first 32. `ranks[r]` are the spans of rank r from the begin of its step, `programs[g]`
    is what runs group g.

    Ranks begin a step together up to the small all-reduce before it, so their clocks are not compared.
    """
    shown = range(min(len(ranks), MOST_RANKS))
    lanes = tuple(Lane((rank,), tuple(_place_in(program, rank)[0] for program in programs)) for rank in shown)
    spans = [
        StepSpan(
            lane, span.kind, span.group, span.start_ms, span.end_ms, span.micro_batch, _stage(span, programs, lane)
        )
        for lane in range(len(lanes))
        for span in sorted(ranks[lane], key=lambda span: span.start_ms)
    ]
    return StepTimeline("measured", tuple(groups), lanes, tuple(spans))
