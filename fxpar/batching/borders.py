"""What switches and reductions add to a mini-batch, as predicted: the engine plans with it, and so does a search."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fxpar.batching.planner import RunTime
from fxpar.cost.cluster import ClusterSpec
from fxpar.schedule.mini_batch import (
    Flow,
    GroupAction,
    MiniBatchSchedule,
    Pace,
    blocking,
    overlapped,
    simulate_mini_batch,
)

EXHAUSTIVE = 4  # strategies; 24 orders, simulated in every mini-batch


class PredictsSwitches(Protocol):
    """Switches of a mini-batch; `resident` strategies stay in memory."""

    @property
    def resident(self) -> Collection[str]: ...

    def predicted_s(self, name: str, visited: Sequence[str]) -> float:
        """Seconds of the switch to `name` after those that have run."""
        ...


class PredictsReductions(Protocol):
    """Gradients on their way home."""

    def predicted_s(self, name: str) -> float:
        """Seconds after a group under `name`."""
        ...

    def pass_on(self, name: str, following: str) -> bool:
        """Whether a group under `following`, which comes next, adds to those of one under `name`: they leave once."""
        ...


def overlap_pays(strategies: int, cluster: ClusterSpec) -> bool:
    """Whether switches and reductions should run beside the groups of so many strategies. One strategy inside of one
    node: transfers take cores rather than links there, and many small ones more than few.
    """
    return strategies > 1 or cluster.nodes > 1


def schedule_of(
    names: Sequence[str], resident: Collection[str], overlap: bool, gradients: PredictsReductions
) -> MiniBatchSchedule:
    """The actions of groups that run under these strategies, in this order."""
    # Only what is resident stays where it is: a switch among such layouts writes nothing that one before it holds.
    stays = [name in resident for name in names]
    overwrites = [overlap and not all(stays[: number + 1]) for number in range(len(stays))]
    passed_on = frozenset(
        number
        for number, (name, following) in enumerate(itertools.pairwise(names))
        if not overwrites[number + 1] and gradients.pass_on(name, following)
    )
    return overlapped(overwrites, passed_on) if overlap else blocking(len(names), passed_on)


def side_by_side(order: tuple[str, ...], gradients: PredictsReductions) -> tuple[str, ...]:
    """Strategies that add to each other's gradients behind the first of them."""
    found: list[str] = []
    for name in order:
        before = [place for place, other in enumerate(found) if gradients.pass_on(other, name)]
        found.insert(before[-1] + 1 if before else len(found), name)
    return tuple(found)


@dataclass
class Borders:
    """What switches and reductions add to a mini-batch, as predicted; the same on all ranks. Under `flowing` strategies
    weights come, and gradients leave, one by one.
    """

    switching: PredictsSwitches
    gradients: PredictsReductions
    overlap: bool
    flowing: Mapping[str, Pace] = field(default_factory=dict)
    factor: float = 1.0  # on what switches and reductions are predicted to take
    _known: dict[tuple[str, ...], Mapping[GroupAction, float]] = field(default_factory=dict)

    def exposed_s(self, order: tuple[str, ...], runs: Mapping[str, RunTime]) -> float:
        """Seconds beyond the runs, if the strategies run in this `order`; `runs` are all groups of each."""
        named = [(GroupAction("run", number), name) for number, name in enumerate(order)]
        seconds = {**self._transfers(order), **{run: runs[name].seconds for run, name in named}}
        flows = {run: Flow.of_run(*runs[name], self.flowing[name]) for run, name in named if name in self.flowing}
        plan = schedule_of(order, self.switching.resident, self.overlap, self.gradients)
        return round(simulate_mini_batch(plan, seconds, flows).exposed_s, 9)

    def fastest(self, order: tuple[str, ...], runs: Mapping[str, RunTime], every: bool = False) -> tuple[str, ...]:
        """The order with the least exposed time; `order` if no other is better. All are tried up to 4 strategies that
        overlap, or that are to be tried in `every` one, else the one in which those that add to each other's gradients
        follow each other.
        """
        if (self.overlap or every) and len(order) <= EXHAUSTIVE:
            orders = itertools.permutations(order)  # the first is `order`
        else:
            orders = iter(dict.fromkeys([order, side_by_side(order, self.gradients)]))
        first = next(orders)
        others = list(orders)
        return min([first, *others], key=lambda one: self.exposed_s(one, runs)) if others else first

    def _transfers(self, order: tuple[str, ...]) -> Mapping[GroupAction, float]:
        if order not in self._known:
            took: dict[GroupAction, float] = {}
            for number, name in enumerate(order):
                took[GroupAction("switch", number)] = self.factor * self.switching.predicted_s(name, order[:number])
                took[GroupAction("reduce", number)] = self.factor * self.gradients.predicted_s(name)
            self._known[order] = took  # whole: the next mini-batch is planned in another thread
        return self._known[order]


def by_strategy(names: Sequence[str], runs: Sequence[RunTime]) -> dict[str, RunTime]:
    """The runs of all groups of each strategy together; `names[g]` is that of group g."""
    found: dict[str, RunTime] = {}
    for name, run in zip(names, runs, strict=True):
        before = found.get(name, RunTime(0.0, 0))
        found[name] = RunTime(before.seconds + run.seconds, before.micro_batches + run.micro_batches)
    return found
