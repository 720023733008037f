"""A strategy for each layer: the best plan with one for all, and the best of all plans.

Nothing here knows a model or a cluster. A cost model says which spaces there are: in each the micro-batches and the
stages are given, and each layer takes one of the space's strategies, the ends of the model (embedding and head) one of
theirs. The search is exact. A stage's plans are a Pareto front of (memory, seconds without gradient sync, seconds that
the sync adds, layout behind the last layer), built layer by layer; layers are alike, so a plan is how many there are of
each strategy, and orders of the same layers are one point. What cannot beat the best known plan is dropped early, by a
bound in which a layer may be a mixture of strategies: then the best ones lie on a convex hull.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fxpar.errors import NothingFitsError
from fxpar.search.fronts import Floats, Front, Hull, Ints, Limits, stage_front

_MOST_POINTS = 20_000  # of a front, and of stages put together: what is beyond is dropped, and the lower bound tells
_ROWS = 200_000  # plans that are priced at once
_HALVINGS = 50
_STEPS = 9  # of a stage's time, between which what its sync may take is looked up
_CLOSER_THAN = (1.0003, 1.003, 1.03, np.inf)  # times the bound of a space: goals, one after the other
_MB = 2**20


@dataclass(frozen=True)
class Space:
    """What is chosen from under given micro-batches and stages: n strategies of a layer, m of the ends, P stages.

    Seconds are of one micro-batch. `exposed_s` is what its gradient sync adds. Memory is in whole MB (2^20 bytes).
    """

    micro_batches: int
    layers: tuple[int, ...]  # [P], per stage
    strategies: tuple[str, ...]  # [n]
    layer_s: Floats  # [n]
    exposed_s: Floats  # [n]
    layer_mb: Ints  # [P, n]
    ends: tuple[str, ...]  # [m]
    ends_s: Floats  # [m, P]
    ends_mb: Ints  # [m, P], with all that a stage holds beside its layers
    alike: tuple[tuple[int, int], ...]  # a layer's strategy and the ends' that is the same
    layouts: Ints  # [n], how a layer leaves its results: an index into border_s
    border_s: Floats  # [layouts, layouts], seconds of going over from one to the other inside of a stage


class LayeredCost(Protocol):
    """A cost model. `reserved_mb` is what is set aside of a device's memory.

    A step takes `step_s` seconds, given per stage [..., P] the seconds of its layers, what their sync adds, and those
    of the ends. `floor_s` is at most that, and does not fall when one of the first two grows. Where it equals `step_s`
    the search is exact, and elsewhere the lower bound is honest. `hidden_s`: what sync may add to a stage without being
    felt in any step, where the layers take `layers_s` at least.
    """

    def spaces(self, micro_batches: int | None) -> Sequence[Space]: ...
    def reserved_mb(self, memory_mb: int) -> int: ...
    def step_s(self, micro_batches: int, layers_s: Floats, exposed_s: Floats, ends_s: Floats) -> Floats: ...
    def floor_s(self, micro_batches: int, layers_s: Floats, exposed_s: Floats, ends_s: Floats) -> Floats: ...
    def hidden_s(self, layers_s: Floats, ends_s: Floats) -> Floats: ...


@dataclass(frozen=True)
class LayeredPlan:
    """The plan that was found. No plan of the spaces takes less than `lower_bound_s`."""

    predicted_s: float
    lower_bound_s: float
    memory_bytes: tuple[int, ...]  # per stage, with what is set aside
    strategies: tuple[str, ...]  # per layer
    ends: str  # of embedding and head
    division: tuple[int, ...]  # layers per stage
    micro_batches: int
    evaluated: int  # plans and beginnings of plans that were priced
    pruned: int  # those of them that were dropped, and strategies of the ends that were not looked into

    @property
    def gap(self) -> float:
        """How much faster another plan may be at most, as a share of `predicted_s`."""
        return 1.0 - self.lower_bound_s / self.predicted_s


def search(
    cost: LayeredCost, memory_bytes: int, uniform: bool = False, micro_batches: int | None = None
) -> LayeredPlan:
    """The fastest plan within `memory_bytes` per device. Raises NothingFitsError, and what `cost` raises.

    `uniform`: one strategy for all layers and the ends. `micro_batches`: of a step; by default the best number.
    """
    spaces = cost.spaces(micro_batches)
    reserved_mb = cost.reserved_mb(memory_bytes // _MB)
    found = _Search(cost, memory_bytes // _MB - reserved_mb)
    found.try_uniform(spaces)
    if not uniform:
        found.try_mixed(spaces)
    if found.best is None:
        raise _nothing_fits(cost, spaces, uniform, memory_bytes)
    return found.best.plan(found, reserved_mb)


@dataclass(frozen=True)
class _Choice:
    """A whole plan of a space: the strategy of the ends, and per stage those of its layers."""

    space: Space
    end: int
    stages: tuple[tuple[int, ...], ...]

    def mb(self) -> Ints:
        """[P]"""
        space = self.space
        layers = [space.layer_mb[i][list(stage)].sum() for i, stage in enumerate(self.stages)]
        return np.array(layers) + space.ends_mb[self.end]

    def sums(self) -> tuple[Floats, Floats]:
        """Seconds of the layers of each stage, and what their sync adds."""
        space = self.space
        borders = [space.border_s[space.layouts[list(s[:-1])], space.layouts[list(s[1:])]].sum() for s in self.stages]
        layers = [space.layer_s[list(stage)].sum() for stage in self.stages]
        return np.array(layers) + borders, np.array([space.exposed_s[list(stage)].sum() for stage in self.stages])

    def tidy(self) -> _Choice:
        """Layers in an order of their own where it is free: alike ones together, then those that take least memory."""
        stages, layouts = [], self.space.layouts.tolist()
        for mb, stage in zip(self.space.layer_mb.tolist(), self.stages, strict=True):
            runs = [list(run) for _, run in itertools.groupby(stage, layouts.__getitem__)]
            runs = runs if self.space.border_s.any() else [list(stage)]
            stages.append(tuple(one for run in runs for one in sorted(run, key=lambda i: (layouts[i], mb[i], i))))
        return replace(self, stages=tuple(stages))

    def plan(self, found: _Search, reserved_mb: int) -> LayeredPlan:
        tidy, space = self.tidy(), self.space
        return LayeredPlan(
            predicted_s=found.best_s,
            lower_bound_s=min(found.best_s, found.floor_s),
            memory_bytes=tuple(int(mb + reserved_mb) * _MB for mb in tidy.mb()),
            strategies=tuple(space.strategies[one] for stage in tidy.stages for one in stage),
            ends=space.ends[self.end],
            division=space.layers,
            micro_batches=space.micro_batches,
            evaluated=found.evaluated,
            pruned=found.pruned,
        )


class _Relaxed:
    """Bounds of a space, for each strategy of the ends [m]: layers may be mixtures, and need no border."""

    def __init__(self, cost: LayeredCost, space: Space, usable_mb: int) -> None:
        self.space = space
        self.room_mb = usable_mb - space.ends_mb  # [m, P]
        layers = np.array(space.layers)
        self.hulls = [(Hull.of(mb, space.layer_s), Hull.of(mb, space.exposed_s)) for mb in space.layer_mb]
        per_layer = (self.room_mb / layers).T
        self.layers_s = layers * np.array([h.least(mb) for (h, _), mb in zip(self.hulls, per_layer, strict=True)]).T
        self.exposed_s = layers * np.array([h.least(mb) for (_, h), mb in zip(self.hulls, per_layer, strict=True)]).T
        self.floor_s = np.full(len(space.ends), np.inf)
        fits = np.isfinite(self.layers_s).all(1)
        self.floor_s[fits] = cost.floor_s(
            space.micro_batches, self.layers_s[fits], self.exposed_s[fits], space.ends_s[fits]
        )

    def rounded(self, end: int, hull: int) -> _Choice:
        """Whole layers beside the mixture that is best for the time (0) or for what sync adds (1), within memory."""
        stages = []
        for i, count in enumerate(self.space.layers):
            found = self.hulls[i][hull]
            room = self.room_mb[end, i] / count
            at = max(0, int(np.searchsorted(found.mb, room, side="right")) - 1)
            small = int(found.corners[at])
            if at + 1 == len(found.mb):
                stages.append((small,) * count)
                continue
            more = int((room - found.mb[at]) * count / (found.mb[at + 1] - found.mb[at]))
            stages.append((small,) * (count - more) + (int(found.corners[at + 1]),) * more)
        return _Choice(self.space, end, tuple(stages))


class _Search:
    """The best plan so far, and how much was looked at. No plan that was dropped takes less than `floor_s`."""

    def __init__(self, cost: LayeredCost, usable_mb: int) -> None:
        self.cost, self.usable_mb = cost, usable_mb
        self.best: _Choice | None = None
        self.best_s = self.floor_s = np.inf
        self.evaluated = self.pruned = 0

    def try_uniform(self, spaces: Iterable[Space]) -> None:
        """All plans with one strategy."""
        for space in spaces:
            for strategy, end in space.alike:
                self._try(_Choice(space, end, tuple((strategy,) * count for count in space.layers)))

    def try_mixed(self, spaces: Iterable[Space]) -> None:
        """All plans. Those first that may be best; a good one early saves looking at the others."""
        relaxed = sorted(
            (_Relaxed(self.cost, one, self.usable_mb) for one in spaces), key=lambda one: one.floor_s.min()
        )
        for one in relaxed:
            for end in np.argsort(one.floor_s, kind="stable"):
                if one.floor_s[end] < self.best_s:
                    for hull in (0, 1):
                        self._try(one.rounded(int(end), hull))
        for one in relaxed:
            self._look_into(one)

    def _try(self, choice: _Choice) -> None:
        self.evaluated += 1
        if (choice.mb() > self.usable_mb).any():
            self.pruned += 1
            return
        space = choice.space
        seconds = float(self.cost.step_s(space.micro_batches, *choice.sums(), space.ends_s[choice.end]))
        if seconds < self.best_s:
            self.best, self.best_s = choice, seconds

    def _look_into(self, one: _Relaxed) -> None:
        """All plans of a space that may be better than the best so far: first those close to its bound, as the closer
        they must be the fewer there are.
        """
        self.pruned += int((one.floor_s >= self.best_s).sum())
        for closer_than in _CLOSER_THAN:
            goal_s = min(self.best_s, float(one.floor_s.min()) * closer_than)
            left_s = self._reach(one, goal_s)
            if self.best_s <= goal_s:
                self.floor_s = min(self.floor_s, left_s)
                return

    def _reach(self, one: _Relaxed, goal_s: float) -> float:
        """All plans of a space that take less than `goal_s`. Gives a bound of those that were left out (infinity)."""
        space, left_s = one.space, np.inf
        ends = np.flatnonzero(one.floor_s < goal_s)
        if not len(ends):
            return left_s
        fronts = []
        hidden_s = self.cost.hidden_s(one.layers_s[ends], space.ends_s[ends]).min(0)
        for stage, count in enumerate(space.layers):
            limits = self._limits(one, ends, stage, goal_s)
            mb = space.layer_mb[stage]
            choices = mb, space.layer_s, space.exposed_s, space.layouts, space.border_s
            front = stage_front(count, *choices, limits, hidden_s[stage], _MOST_POINTS)
            self.evaluated += front.priced
            self.pruned += front.priced - len(front.mb)
            if not front.whole:
                left_s = float(one.floor_s[ends].min())
            fronts.append(front)
        for end in ends[np.argsort(one.floor_s[ends], kind="stable")]:
            left_s = min(left_s, self._combine(one, int(end), fronts, goal_s))
        return left_s

    def _limits(self, one: _Relaxed, ends: Ints, stage: int, goal_s: float) -> Limits:
        """The most that `stage` may take in a plan that reaches the goal; the other stages are at their bounds."""
        least_s = one.layers_s[ends, stage]
        layers_s = self._most(one, ends, stage, goal_s, 0, least_s)
        steps = np.linspace(least_s, np.where(np.isfinite(layers_s), layers_s, least_s), _STEPS)
        exposed_s = np.array([self._most(one, ends, stage, goal_s, 1, step) for step in steps])
        sum_s = np.where(np.isfinite(layers_s), (steps[1:] + exposed_s[:-1]).max(0), np.inf)
        return Limits(one.room_mb[ends, stage].astype(np.float64), layers_s, exposed_s[0], sum_s)

    def _most(self, one: _Relaxed, ends: Ints, stage: int, goal_s: float, kind: int, layers_s: Floats) -> Floats:
        """The most that the stage's layers (kind 0), or their sync beside layers of `layers_s` (1), may take [ends]."""
        if not np.isfinite(goal_s):
            return np.full(len(ends), np.inf)
        arguments = one.layers_s[ends], one.exposed_s[ends], one.space.ends_s[ends]
        arguments[0][:, stage] = layers_s
        low, high = arguments[kind][:, stage].copy(), np.full(len(ends), 2 * goal_s)
        for halving in range(_HALVINGS):
            middle = high if halving == 0 else (low + high) / 2
            arguments[kind][:, stage] = middle
            better = self.cost.floor_s(one.space.micro_batches, *arguments) < goal_s
            low, high = np.where(better, middle, low), np.where(better, high, middle)
        return np.where(low == high, np.inf, high)

    def _combine(self, one: _Relaxed, end: int, fronts: Sequence[Front], goal_s: float) -> float:
        """Plans of all stages from those of each, one stage after the other, the rest at its bound. As `_reach`."""
        left_s, points = np.inf, np.zeros((1, 0), np.int64)
        for stage, front in enumerate(fronts):
            fits = np.flatnonzero(front.mb <= one.room_mb[end, stage])
            size = max(1, _ROWS // max(1, len(fits)))
            kept, floors = [np.zeros((0, stage + 1), np.int64)], [np.zeros(0)]
            for begin in range(0, len(points), size):
                some = points[begin : begin + size]
                new = np.concatenate([np.repeat(some, len(fits), 0), np.tile(fits, len(some))[:, None]], 1)
                floor_s = self._price(one, end, fronts, new)
                better = floor_s < min(goal_s, self.best_s)
                kept.append(new[better])
                floors.append(floor_s[better])
            points, floor_s = np.concatenate(kept), np.concatenate(floors)
            order = np.argsort(floor_s, kind="stable")
            if len(order) > _MOST_POINTS or stage == len(fronts) - 1:
                # a whole plan whose bound is below its time: it may stand for one that it dominates
                left_s = min(left_s, floor_s.min(initial=np.inf))
            points = points[order[:_MOST_POINTS]]
        return float(left_s)

    def _price(self, one: _Relaxed, end: int, fronts: Sequence[Front], points: Ints) -> Floats:
        """Bounds of `points` [q, stages so far]. Whole ones are compared with the best plan."""
        space, stages = one.space, points.shape[1]
        layers_s = np.repeat(one.layers_s[end][None], len(points), 0)
        exposed_s = np.repeat(one.exposed_s[end][None], len(points), 0)
        for stage in range(stages):
            layers_s[:, stage] = fronts[stage].layers_s[points[:, stage]]
            exposed_s[:, stage] = fronts[stage].exposed_s[points[:, stage]]
        arguments = space.micro_batches, layers_s, exposed_s, space.ends_s[end]
        self.evaluated += len(points)
        if stages == len(fronts) and len(points):
            seconds = self.cost.step_s(*arguments)
            at = int(seconds.argmin())
            if seconds[at] < self.best_s:
                chosen = tuple(front.chosen(int(point)) for front, point in zip(fronts, points[at], strict=True))
                self.best, self.best_s = _Choice(space, end, chosen), float(seconds[at])
        return self.cost.floor_s(*arguments)


def _nothing_fits(cost: LayeredCost, spaces: Iterable[Space], uniform: bool, memory_bytes: int) -> NothingFitsError:
    """The plan that needs least, and what it needs."""
    needs: list[tuple[int, str]] = []
    for space in spaces:
        smallest = space.layer_mb.argmin(1)  # [P]
        mixed = [(smallest, end) for end in range(len(space.ends))]
        for chosen, end in [(np.full_like(smallest, i), j) for i, j in space.alike] if uniform else mixed:
            mb = space.layer_mb[range(len(chosen)), chosen] * space.layers + space.ends_mb[end]
            text = " > ".join(dict.fromkeys(space.strategies[one] for one in chosen))
            needs.append((int(mb.max()), f"{text} in {space.micro_batches} micro-batches"))
    least = min(needs)
    memory_mb = least[0]
    while memory_mb - cost.reserved_mb(memory_mb) < least[0]:
        memory_mb += least[0] - memory_mb + cost.reserved_mb(memory_mb)
    return NothingFitsError(_gib(memory_bytes / _MB), _gib(memory_mb), least[1])


def _gib(mb: float) -> str:
    return f"{mb / 1024:.2f} GB"
