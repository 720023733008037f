"""The fastest pipeline whose stages may differ: how each stage runs, on how many ranks, and where it begins.

Nothing here knows a model. An option says what a stage takes that runs so, beside its layers and for each layer of each
kind (those of a kind recompute alike, or have the same ZeRO level). The objective is a schedule of one forward and one
backward in turn, simulated, with each rank's own gradient sync behind its last backward. The search is a branch and
bound over places: a stage of n layers is one of its fastest mixtures of kinds that memory holds, and a beginning of a
pipeline is dropped if it takes too long even where the ranks left share the layers left without rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.schedule import Costs, Schedule, schedule, simulate
from fxpar.schedule.mini_batch import FORWARD
from fxpar.search.fronts import undominated

MOST_BEGUN = 2_000  # beginnings that are kept at a place, those that promise most
FIRST = 32  # of them in the first round, which finds a plan to compare with
MOST_SIMULATED = 200  # whole pipelines
_SAME = 1 - 1e-12  # by such a share a bound must be shorter to be of interest


@dataclass(frozen=True)
class StageOption:
    """A way to run a stage on `ranks` ranks, by its place in the pipeline: seconds of a micro-batch and bytes beside
    its layers, and for a layer of each kind; seconds that gradient sync takes beside layers, and for one of each kind.
    Layers of a kind follow each other, kinds in their order, and going over from one to another takes `border_s`.
    """

    ranks: int
    ends_s: tuple[float, ...]  # [P]
    layer_s: tuple[tuple[float, ...], ...]  # [P][kinds]
    ends_bytes: tuple[int, ...]
    layer_bytes: tuple[tuple[int, ...], ...]
    sync_s: tuple[float, ...] = ()  # [P], () for none
    layer_sync_s: tuple[float, ...] = ()  # [kinds]
    border_s: tuple[tuple[float, ...], ...] = ()  # [kinds][kinds], () for none

    @property
    def kinds(self) -> int:
        return len(self.layer_s[0])

    def seconds(self, place: int, counts: Sequence[int]) -> float:
        layers = sum(n * one for n, one in zip(counts, self.layer_s[place], strict=True))
        borders = sum(self.border_s[a][b] for a, b in borders_of(counts)) if self.border_s else 0.0
        return self.ends_s[place] + layers + borders

    def sync(self, place: int, counts: Sequence[int]) -> float:
        layers = sum(n * one for n, one in zip(counts, self.layer_sync_s, strict=True)) if self.layer_sync_s else 0.0
        return layers + (self.sync_s[place] if self.sync_s else 0.0)


def borders_of(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The kinds that follow each other, of so many layers of each."""
    return itertools.pairwise(kind for kind, count in enumerate(counts) if count)


@dataclass(frozen=True)
class StagesProblem:
    """`layers` in `stages` on `ranks`, each rank with `room_bytes`; micro-batches of a step."""

    stages: int
    layers: int
    ranks: int
    micro_batches: int
    room_bytes: int
    options: tuple[StageOption, ...]


@dataclass(frozen=True)
class ChosenStage:
    """An option by its number, and how many layers of each of its kinds."""

    option: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ChosenStages:
    """A pipeline, and what a step takes."""

    seconds: float
    stages: tuple[ChosenStage, ...]


@dataclass(frozen=True)
class CutFound:
    """The best pipelines, best first; none that was not found is faster than `lower_bound_s`."""

    best: tuple[ChosenStages, ...]
    lower_bound_s: float
    simulated: int


@dataclass(frozen=True)
class _Point:
    stage: ChosenStage
    ranks: int
    layers: int
    seconds: float
    sync_s: float


@dataclass(frozen=True)
class _Begun:
    """The first stages; `seconds` that no pipeline with them undercuts."""

    points: tuple[_Point, ...]
    layers: int
    ranks: int
    seconds: float


def step_s(plan: Schedule, seconds: Sequence[float], sync_s: Sequence[float]) -> float:
    """Of a schedule whose stages take so long for a micro-batch, each with its sync behind its last action."""
    costs = Costs(
        forward_ms=lambda action: FORWARD * seconds[action.stage],
        backward_ms=lambda action: (1 - FORWARD) * seconds[action.stage],
    )
    ends = (spans[-1].end_ms for spans in simulate(plan, costs).spans)
    return max(end + sync for end, sync in zip(ends, sync_s, strict=True))


def best_stages(
    problem: StagesProblem, below_s: float = float("inf"), keep: int = 1, most: int = MOST_BEGUN
) -> CutFound:
    """The `keep` best pipelines that take less than `below_s`, none if there is none; of those that begin like one of
    the `most` that promise most.
    """
    search = _Search(problem, below_s, keep)
    for kept in dict.fromkeys((min(FIRST, most), most)):
        search.floor_s = float("inf")  # what the first round dropped is looked at in the second
        search.run(kept)
    best = tuple(sorted(search.found.values(), key=lambda one: one.seconds)[:keep])
    return CutFound(best, min(search.floor_s, search.limit_s), search.simulated)


class _Search:
    def __init__(self, problem: StagesProblem, below_s: float, keep: int) -> None:
        self.problem, self.below_s, self.keep = problem, below_s, keep
        self.plan = schedule("1f1b", problem.stages, problem.micro_batches)
        self.found: dict[tuple[ChosenStage, ...], ChosenStages] = {}
        self.known: dict[tuple[int, int, int], list[_Point]] = {}
        self.mixtures: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
        self.floor_s = float("inf")  # of what was dropped although it might have been better
        self.simulated = 0
        room, places = problem.room_bytes, range(problem.stages)
        every = [(option, place) for option in problem.options for place in places if option.ends_bytes[place] <= room]
        # Rank-seconds: of a layer, and of what each place has beside layers; none takes less.
        self.layer_work = min((o.ranks * min(o.layer_s[p]) for o, p in every), default=0.0)
        self.ends_work = [min((o.ranks * o.ends_s[p] for o, at in every if at == p), default=0.0) for p in places]

    @property
    def limit_s(self) -> float:
        """What a pipeline must undercut to be among the best."""
        if len(self.found) < self.keep:
            return self.below_s
        return min(self.below_s, sorted(one.seconds for one in self.found.values())[self.keep - 1])

    def run(self, most: int) -> None:
        begun = [_Begun((), 0, 0, self._least(()))]
        for place in range(self.problem.stages):
            longer = sorted(self._longer(begun, place), key=lambda one: one.seconds)
            begun = longer[:most]
            if len(longer) > most:
                self.floor_s = min(self.floor_s, longer[most].seconds)
        for number, one in enumerate(begun):
            if one.seconds >= self.limit_s * _SAME:
                break
            if number == MOST_SIMULATED:
                self.floor_s = min(self.floor_s, one.seconds)
                break
            self._simulate(one)

    def _simulate(self, one: _Begun) -> None:
        stages = tuple(point.stage for point in one.points)
        if stages not in self.found:
            self.simulated += 1
            seconds = step_s(self.plan, [p.seconds for p in one.points], [p.sync_s for p in one.points])
            if seconds < self.limit_s:
                self.found[stages] = ChosenStages(seconds, stages)

    def _longer(self, begun: Sequence[_Begun], place: int) -> Iterator[_Begun]:
        """With a stage more, where these may still be among the best."""
        problem, last = self.problem, place == self.problem.stages - 1
        limit_s, widths = self.limit_s, sorted({option.ranks for option in problem.options})
        later = problem.stages - place - 1
        for one in begun:
            layers, ranks = problem.layers - one.layers, problem.ranks - one.ranks
            for width in widths:
                if width != ranks if last else width > ranks - later * widths[0]:
                    continue
                for count in [layers] if last else range(1, layers - later + 1):
                    for point in self._points(place, width, count):
                        points = (*one.points, point)
                        seconds = self._least(points)
                        if seconds < limit_s * _SAME:
                            yield _Begun(points, one.layers + count, one.ranks + width, seconds)

    def _least(self, points: tuple[_Point, ...]) -> float:
        """What a pipeline that begins so takes at least: a stage is busy with all micro-batches, behind one pass of the
        stages before it and, on the way back, beside them.
        """
        before, least = 0.0, 0.0
        micro_batches = self.problem.micro_batches
        for point in points:
            least = max(least, micro_batches * point.seconds + before, micro_batches * point.seconds + point.sync_s)
            before += point.seconds
        ranks = self.problem.ranks - sum(point.ranks for point in points)
        if ranks <= 0:
            return least
        layers = self.problem.layers - sum(point.layers for point in points)
        work = layers * self.layer_work + sum(self.ends_work[len(points) :])
        return max(least, before + micro_batches * work / ranks)

    def _points(self, place: int, ranks: int, layers: int) -> list[_Point]:
        """Stages of so many ranks and layers that memory holds; none is slower in its run and its sync than another."""
        key = place, ranks, layers
        if key not in self.known:
            self.known[key] = self._undominated(*key)
        return self.known[key]

    def _undominated(self, place: int, ranks: int, layers: int) -> list[_Point]:
        found = []
        for number, option in enumerate(self.problem.options):
            if option.ranks == ranks:
                for counts in self._mixtures(number, place)[layers - 1]:
                    taken = option.seconds(place, counts), option.sync(place, counts)
                    found.append(_Point(ChosenStage(number, counts), ranks, layers, *taken))
        found.sort(key=lambda one: (one.seconds, one.sync_s))
        kept: list[_Point] = []
        for one in found:
            if not kept or one.sync_s < kept[-1].sync_s:
                kept.append(one)
        return kept

    def _mixtures(self, number: int, place: int) -> list[list[tuple[int, ...]]]:
        """For each number of layers from 1 on: those that memory holds, and none of which another one beats. A layer
        is put behind those that are there, so where borders cost, what the last one is belongs to what is compared.
        """
        if (number, place) not in self.mixtures:
            option = self.problem.options[number]
            units = [tuple(int(i == k) for i in range(option.kinds)) for k in range(option.kinds)]
            found, front = [], [(0,) * option.kinds]
            for _ in range(self.problem.layers - self.problem.stages + 1):
                longer = [tuple(map(sum, zip(one, u, strict=True))) for one in front for u in units[_last(one) :]]
                front = self._front(option, place, longer)
                found.append(front)
            self.mixtures[number, place] = found
        return self.mixtures[number, place]

    def _front(self, option: StageOption, place: int, every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those that memory holds, and none of which another one beats."""
        counts = np.array(every, np.int64).reshape(-1, option.kinds)
        nbytes = option.ends_bytes[place] + counts @ np.array(option.layer_bytes[place], np.int64)
        fits = np.flatnonzero(nbytes <= self.problem.room_bytes)
        none = (0.0,) * option.kinds
        seconds, sync = (
            (counts * np.array(each, np.float64)).sum(axis=1)
            for each in (option.layer_s[place], option.layer_sync_s or none)
        )
        last = np.zeros(len(every), np.int64)
        if option.border_s:
            seconds += [sum(option.border_s[a][b] for a, b in borders_of(one)) for one in every]
            last = np.array([_last(one) for one in every], np.int64)
        return [every[at] for at in fits[undominated(nbytes[fits], seconds[fits], sync[fits], last[fits])]]


def _last(counts: Sequence[int]) -> int:
    """The last kind that there is a layer of; the first one without any."""
    return max((kind for kind, count in enumerate(counts) if count), default=0)
