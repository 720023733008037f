"""`plan_batch`: groups by length, merges those that are not worth a switch, balances and packs each of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpar.batching.balance import Share, share_out, shared_makespan
from fxpar.batching.bounds import shared_lower_bound
from fxpar.batching.groups import LengthGroup
from fxpar.batching.packing import TICKS_PER_S, PackingRule, SequenceItem, longest_first, ticks
from fxpar.batching.plan import BatchPlan, GroupPlan, MicroBatch
from fxpar.cost.group_cost import GroupCost
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


BorderSeconds = Callable[[Running, tuple[RunTime, ...]], float]


def plan_batch(
    lengths: Sequence[int],
    groups: Sequence[LengthGroup],
    costs: Sequence[GroupCost],
    border_s: BorderSeconds,
    *,
    packed: bool = True,
    merge: bool = True,
) -> BatchPlan:
    """Plan a mini-batch of sequences with these `lengths` in tokens.

    `groups` are sorted by limit, `costs[g]` predicts group g. `border_s(groups, runs)` gives the seconds that switches
    and reductions add to a mini-batch that runs these groups (indices, ascending) for so long each; what runs longer,
    or in fewer micro-batches, may hide more of them, but no mini-batch may become shorter by running longer. Each
    sequence goes to the first group whose limit holds it. With `merge`, a group moves as a whole to the next larger one
    that runs if the predicted time of everything is then less: all choices of running groups are compared up to six
    groups, beyond that by local search. Without `packed`, each sequence is a micro-batch of its own. Groups whose cost
    has several pipeline stages get as many micro-batches as take least time, bubble included; all others as few as hold
    the sequences.

    Every sequence is in exactly one micro-batch. Ranks that pass equal arguments get equal plans.

    Groups with a `multiple` are not merged: not every sequence could follow.

    Raises EmptyMiniBatchError, SequenceError (a length below 1), SequenceTooLongError, LengthMultipleError,
    GroupCostsError.
    """
    if len(costs) != len(groups):
        raise GroupCostsError(len(groups), len(costs))
    planner = _Planner(groups, costs, border_s, packed, _by_group(lengths, groups))
    start = tuple(g for g, members in enumerate(planner.members) if members)
    merge = merge and all(group.multiple == 1 for group in groups)
    return planner.plan(planner.search(start) if merge else start)


def _by_group(lengths: Sequence[int], groups: Sequence[LengthGroup]) -> list[list[tuple[int, int]]]:
    """(index, length) of the sequences of each group."""
    if not len(lengths):
        raise EmptyMiniBatchError
    members: list[list[tuple[int, int]]] = [[] for _ in groups]
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


@dataclass(frozen=True)
class _Load:
    """Sequences that run together in one group; times in ticks."""

    items: tuple[SequenceItem, ...]
    rule: PackingRule
    bound: int


@dataclass
class _Planner:
    """Plans by the range of groups that run together; each is worked out once, and only if it may be the best."""

    groups: Sequence[LengthGroup]
    costs: Sequence[GroupCost]
    border_s: BorderSeconds
    packed: bool
    members: list[list[tuple[int, int]]]
    _loads: dict[tuple[int, int], _Load] = field(default_factory=dict)
    _shares: dict[tuple[int, int], tuple[list[Share], int]] = field(default_factory=dict)

    def plan(self, running: Running) -> BatchPlan:
        """The plan in which the groups `running` take all sequences."""
        plans = tuple(self._group_plan(first, into) for first, into in _ranges(running))
        merged = tuple((g, into) for first, into in _ranges(running) for g in range(first, into) if self.members[g])
        time, runs = self._price(running)[0], sum(self._worked_out(*range_)[1] for range_ in _ranges(running))
        return BatchPlan(plans, merged, (time - runs) / TICKS_PER_S, time / TICKS_PER_S)

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

    def _cheapest(self, best: Running, others: Iterable[Running]) -> Running:
        """`best`, or one of the others that takes less time; those that cannot are not worked out."""
        price = self._price(best)
        for bound, running in sorted((self._bound(other), other) for other in others if self._is_sound(other)):
            if bound > price[0]:
                break
            price = min(price, self._price(running))
        return price[2]

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
        worked_out = [self._worked_out(first, into) for first, into in _ranges(running)]
        time = self._with_borders(running, [(time, max(map(len, shares))) for shares, time in worked_out])
        moved = sum(bool(members) for g, members in enumerate(self.members) if g not in running)
        return time, moved, running

    def _bound(self, running: Running) -> int:
        """Ticks that `running` cannot undercut."""
        return self._with_borders(running, [(self._load(first, into).bound, 1) for first, into in _ranges(running)])

    def _with_borders(self, running: Running, runs: Sequence[tuple[int, int]]) -> int:
        """Of runs in ticks, with their micro-batches."""
        border_s = self.border_s(running, tuple(RunTime(time / TICKS_PER_S, count) for time, count in runs))
        return sum(time for time, _ in runs) + ticks(border_s)

    def _load(self, first: int, into: int) -> _Load:
        """The sequences of the groups `first` to `into`, as group `into` sees them."""
        if (first, into) not in self._loads:
            members = [member for g in range(first, into + 1) for member in self.members[g]]
            group, cost = self.groups[into], self.costs[into]
            by_length = {n: ticks(cost.sequence_s(n)) for n in {n for _, n in members}}
            items = tuple(longest_first(SequenceItem(index, length, by_length[length]) for index, length in members))
            rule = PackingRule(
                group.replicas,
                group.token_budget,
                ticks(cost.fixed_s),
                lockstep=group.lockstep,
                packed=self.packed,
                stages=cost.stages,
                virtual=cost.virtual,
                shared_by=cost.shared_by,
            )
            self._loads[first, into] = _Load(items, rule, shared_lower_bound(items, rule))
        return self._loads[first, into]

    def _worked_out(self, first: int, into: int) -> tuple[list[Share], int]:
        """The micro-batches of each replica, and their time."""
        if (first, into) not in self._shares:
            load = self._load(first, into)
            shares = share_out(load.items, load.rule)
            self._shares[first, into] = shares, shared_makespan(shares, load.rule)
        return self._shares[first, into]

    def _group_plan(self, first: int, into: int) -> GroupPlan:
        shares, time = self._worked_out(first, into)
        replicas = tuple(
            tuple(MicroBatch(tuple(item.index for item in one.items), one.tokens) for one in share) for share in shares
        )
        least = self._load(first, into).bound
        group, timed = self.groups[into], (time / TICKS_PER_S, least / TICKS_PER_S)
        return GroupPlan(into, replicas, *timed, group.lockstep, str(group.strategy), group.limit)


def _ranges(running: Running) -> Iterator[tuple[int, int]]:
    """(first, into) for each running group: the groups from `first` to `into` run in `into`."""
    first = 0
    for into in running:
        yield first, into
        first = into + 1
