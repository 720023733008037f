"""`plan_batch`: which group runs which sequences, and in which micro-batches of which replica."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from fxpar.batching.groups import LengthGroup
from fxpar.batching.loads import Load, Member, rule_of
from fxpar.batching.packing import TICKS_PER_S, Bin, PackingRule, ticks
from fxpar.batching.plan import BatchPlan, GroupPlan, MicroBatch
from fxpar.batching.riding import AnyLoad, Choice, with_riders
from fxpar.batching.teams import TeamRule, TeamsLoad, team_rules
from fxpar.cost.group_cost import Cost, TeamsCost
from fxpar.errors import (
    EmptyMiniBatchError,
    GroupCostsError,
    LengthMultipleError,
    SequenceError,
    SequenceTooLongError,
)

EXHAUSTIVE = 6  # groups: 63 choices of those that run
Running = tuple[int, ...]  # indices of the groups that run, ascending


class RunTime(NamedTuple):
    """What a group takes: seconds, and the micro-batches of a replica that they are for."""

    seconds: float
    micro_batches: int


KnownLoads = dict[tuple[tuple[Member, ...], PackingRule | tuple[TeamRule, ...], Cost], AnyLoad]
BorderSeconds = Callable[[Running, tuple[RunTime, ...]], float]


def plan_batch(
    lengths: Sequence[int],
    groups: Sequence[LengthGroup],
    costs: Sequence[Cost],
    border_s: BorderSeconds,
    *,
    packed: bool = True,
    merge: bool = True,
    ride: bool = True,
    known: KnownLoads | None = None,
    least_border_s: BorderSeconds | None = None,
) -> BatchPlan:
    """Plan a mini-batch of sequences with these `lengths` in tokens.

    `groups` are sorted by limit, `costs[g]` predicts group g. `border_s(groups, runs)` gives the seconds that switches
    and reductions add to a mini-batch that runs these groups (indices, ascending) for so long each; what runs longer,
    or in fewer micro-batches, may hide more of them, but no mini-batch may become shorter by running longer. Each
    sequence goes to the first group whose limit holds it. With `merge`, a group moves as a whole to the next larger one
    that runs if the predicted time of everything is then less: all choices of running groups are compared up to six
    groups, beyond that by local search. With `merge` and `ride`, single sequences then move to larger groups that run,
    where that makes the mini-batch faster still (`fxpar.batching.riding`). Without `packed`, each sequence is a
    micro-batch of its own. Groups whose cost has several pipeline stages get as many micro-batches as take least time,
    bubble included; all others as few as hold the sequences.

    Every sequence is in exactly one micro-batch. Ranks that pass equal arguments get equal plans.

    `known` keeps what was worked out for calls to come: sets of groups share many. `least_border_s`, if it is quicker
    to work out, gives what `border_s` does at least: a choice of groups that takes too long with that is not asked for.

    Groups with a `multiple` are not merged, as not every sequence could follow; single ones may ride.

    Raises EmptyMiniBatchError, SequenceError (a length below 1), SequenceTooLongError, LengthMultipleError,
    GroupCostsError.
    """
    if len(costs) != len(groups):
        raise GroupCostsError(len(groups), len(costs))
    members, known = by_group(lengths, groups), {} if known is None else known
    planner = _Planner(groups, costs, border_s, packed, members, known, least_border_s or border_s)
    running = tuple(g for g, members in enumerate(planner.members) if members)
    if merge and all(group.multiple == 1 for group in groups):
        running = planner.search(running)
    choice = planner.choice(running)
    if merge and ride:
        choice = with_riders(choice, planner.takes, planner.make, planner.price)
    return planner.plan(choice)


def least_batch_s(
    lengths: Sequence[int],
    groups: Sequence[LengthGroup],
    costs: Sequence[Cost],
    border_s: BorderSeconds,
    *,
    packed: bool = True,
    known: KnownLoads | None = None,
) -> float:
    """Seconds that no plan of `plan_batch` without rides undercuts, if `border_s` gives what borders add at least;
    0 for more groups than it tries all choices of. No micro-batch is made up. Arguments and errors are its own.
    """
    if len(groups) > EXHAUSTIVE:
        return 0.0
    members, known = by_group(lengths, groups), {} if known is None else known
    return _Planner(groups, costs, border_s, packed, members, known, border_s).least / TICKS_PER_S


def by_group(lengths: Sequence[int], groups: Sequence[LengthGroup]) -> list[list[Member]]:
    """(index, length) of the sequences of each group.

    Raises EmptyMiniBatchError, SequenceError, SequenceTooLongError, LengthMultipleError.
    """
    if not len(lengths):
        raise EmptyMiniBatchError
    members: list[list[Member]] = [[] for _ in groups]
    for index, value in enumerate(lengths):
        length = operator.index(value)
        if length < 1:
            raise SequenceError(index, f"has {length} tokens; it needs at least one")
        group = next((g for g, found in enumerate(groups) if found.takes(length)), None)
        if group is None and length <= groups[-1].limit:
            raise LengthMultipleError(index, length, [(g.limit, str(g.strategy), g.multiple) for g in groups])
        if group is None:
            raise SequenceTooLongError(index, length, groups[-1].limit, str(groups[-1].strategy))
        members[group].append((index, length))
    return members


@dataclass
class _Planner:
    """Plans by the range of groups that run together; each is worked out once, and only if it may be the best."""

    groups: Sequence[LengthGroup]
    costs: Sequence[Cost]
    border_s: BorderSeconds
    packed: bool
    members: list[list[Member]]  # by the first group that takes them
    known: KnownLoads
    least_border_s: BorderSeconds
    _loads: dict[tuple[int, int], AnyLoad] = field(default_factory=dict)

    def plan(self, choice: Choice) -> BatchPlan:
        """The plan in which groups run these sequences."""
        choice = {group: choice[group] for group in sorted(choice)}
        time, runs = self.price(choice), sum(load.time for load in choice.values())
        went = {index: group for group, load in choice.items() for index, _ in load.members}
        merged, rides = [], []
        for group, members in enumerate(self.members):
            into = Counter(went[index] for index, _ in members)
            if len(into) == 1 and group not in into:
                limit = self.groups[group].limit  # another formation for the same lengths is a choice, not a merge
                merged += [(group, other) for other in into if self.groups[other].limit > limit]
            else:
                rides += [(group, other, into[other]) for other in sorted(into) if other != group]
        plans = tuple(self._group_plan(group, load) for group, load in choice.items())
        return BatchPlan(plans, tuple(merged), (time - runs) / TICKS_PER_S, time / TICKS_PER_S, tuple(rides))

    def search(self, start: Running) -> Running:
        """The best choice of running groups."""
        if len(self.groups) <= EXHAUSTIVE:
            return self._cheapest(start, self._subsets())
        best = start
        while True:
            found = self._cheapest(best, self._neighbours(best))
            if found == best:
                return best
            best = found

    @property
    def least(self) -> int:
        """Ticks that no choice of running groups undercuts."""
        return min(self._bound(running) for running in self._subsets() if self._is_sound(running))

    def _cheapest(self, best: Running, others: Iterable[Running]) -> Running:
        """`best`, or one of the others that takes less time; those that cannot are not worked out."""
        price: tuple[int, int, Running] | None = None
        for bound, running in sorted((self._bound(one), one) for one in {best, *filter(self._is_sound, others)}):
            if price is not None and bound > price[0]:
                break
            if price is None or self._least(running) <= price[0]:
                found = self._price(running)
                price = found if price is None else min(price, found)
        return best if price is None else price[2]

    def _subsets(self) -> Iterator[Running]:
        count = len(self.groups)
        return (tuple(g for g in range(count) if mask >> g & 1) for mask in range(1, 1 << count))

    def _neighbours(self, running: Running) -> Iterator[Running]:
        """One group fewer, one more, or another one in its place."""
        others = [g for g in range(len(self.groups)) if g not in running]
        for g in running:
            yield tuple(x for x in running if x != g)
            for other in others:
                yield tuple(sorted({*running, other} - {g}))
        for other in others:
            yield tuple(sorted({*running, other}))

    def _is_sound(self, running: Running) -> bool:
        """Every sequence has a group, and every group a sequence."""
        longest = max(g for g, members in enumerate(self.members) if members)
        return (
            bool(running)
            and running[-1] >= longest
            and all(any(self.members[first : into + 1]) for first, into in _ranges(running))
        )

    def _price(self, running: Running) -> tuple[int, int, Running]:
        """What the search minimises: time in ticks, then the number of groups that are merged."""
        moved = sum(bool(members) for g, members in enumerate(self.members) if g not in running)
        return self.price(self.choice(running)), moved, running

    def _bound(self, running: Running) -> int:
        """Ticks that `running` cannot undercut, whatever its micro-batches."""
        bounds = [(load.bound, 1) for load in self.choice(running).values()]
        return self._with_borders(running, bounds, self.least_border_s)

    def _least(self, running: Running) -> int:
        """Ticks that `running` cannot undercut, with its micro-batches: it takes just that where borders do."""
        return self._with_borders(running, self._runs(self.choice(running)), self.least_border_s)

    def choice(self, running: Running) -> Choice:
        """Each sequence in the first of these groups that takes its like."""
        return {into: self._load(first, into) for first, into in _ranges(running)}

    def price(self, choice: Choice) -> int:
        """Ticks of a mini-batch."""
        return self._with_borders(tuple(sorted(choice)), self._runs(choice), self.border_s)

    def _runs(self, choice: Choice) -> list[tuple[int, int]]:
        """Ticks and micro-batches of each group, ascending."""
        return [(choice[g].time, choice[g].micro_batches) for g in sorted(choice)]

    def _with_borders(self, running: Running, runs: Sequence[tuple[int, int]], border_s: BorderSeconds) -> int:
        """Of runs in ticks, with their micro-batches."""
        between_s = border_s(running, tuple(RunTime(time / TICKS_PER_S, count) for time, count in runs))
        return sum(time for time, _ in runs) + ticks(between_s)

    def takes(self, group: int, length: int) -> bool:
        return self.groups[group].takes(length)

    def make(self, group: int, members: Sequence[Member]) -> AnyLoad:
        spec, cost, found = self.groups[group], self.costs[group], tuple(members)
        if isinstance(cost, TeamsCost):
            rules = team_rules(spec, cost, self.packed)
            if (found, rules, cost) not in self.known:
                self.known[found, rules, cost] = TeamsLoad.of(members, rules)
            return self.known[found, rules, cost]
        rule = rule_of(spec, cost, self.packed)
        if (found, rule, cost) not in self.known:
            self.known[found, rule, cost] = Load.of(members, rule, cost)
        return self.known[found, rule, cost]

    def _load(self, first: int, into: int) -> AnyLoad:
        """The sequences of the groups `first` to `into`, as group `into` sees them."""
        if (first, into) not in self._loads:
            members = [member for g in range(first, into + 1) for member in self.members[g]]
            self._loads[first, into] = self.make(into, members)
        return self._loads[first, into]

    def _group_plan(self, number: int, load: AnyLoad) -> GroupPlan:
        replicas = tuple(
            tuple(map(_micro_batch, zip_longest(*team.shares[first : first + team.rule.bins])))
            for team in load.teams
            for first in range(0, len(team.shares), team.rule.bins)
        )
        group, timed = self.groups[number], (load.time / TICKS_PER_S, load.bound / TICKS_PER_S)
        return GroupPlan(number, replicas, *timed, group.lockstep, str(group.strategy), group.limit)


def _micro_batch(bins: Sequence[Bin | None]) -> MicroBatch:
    """Of the bins that run at the same time; the last ones of a replica may be empty."""
    items = [one.items if one else () for one in bins]
    counts = tuple(map(len, items)) if len(bins) > 1 else ()
    indices = tuple(item.index for some in items for item in some)
    return MicroBatch(indices, sum(one.tokens for one in bins if one), counts)


def _ranges(running: Running) -> Iterator[tuple[int, int]]:
    """(first, into) for each running group: the groups from `first` to `into` run in `into`."""
    first = 0
    for into in running:
        yield first, into
        first = into + 1
