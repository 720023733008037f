"""Sequences that ride in a longer group than their own, where the mini-batch is predicted to be faster so.

A group of few long sequences has holes: rows that are not full, replicas that wait. Short sequences fill them for
little, and the group that they leave ends earlier. Tried are the longest or the shortest sequences of one group in
another one: as many as a guess in closed form says, what groups take if sequences can be shared out evenly, but no less
than now where some come, and no more than now where some leave. The best guesses are worked out, and what is really
faster is kept.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fxpar.batching.bounds import least_overhead
from fxpar.batching.loads import Load, Member
from fxpar.batching.packing import PackingRule, SequenceItem
from fxpar.batching.teams import TeamsLoad

WORTH = 500  # gains below 1/WORTH of a mini-batch are not looked for
TRIES = 3  # moves that are worked out in a round
ROUNDS = 4
PACKED_ANEW = 2  # of the sequences of a mini-batch, in all rounds together: bounds the time
FEW = 128  # sequences that are packed anew in any case
STEP = 4  # numbers of riders grow by 1/STEP

AnyLoad = Load | TeamsLoad
Choice = Mapping[int, AnyLoad]  # by group, ascending
Takes = Callable[[int, int], bool]  # whether a group may run a sequence of this length
Make = Callable[[int, Sequence[Member]], AnyLoad]  # of a group and its sequences
Price = Callable[[Choice], int]  # ticks of a mini-batch, borders included


def with_riders(choice: Choice, takes: Takes, make: Make, price: Price) -> Choice:
    """`choice`, or one with riders that is predicted to be faster."""
    best, left = price(choice), PACKED_ANEW * max(FEW, sum(len(load.items) for load in choice.values()))
    for _ in range(ROUNDS):
        faster = None
        for move in heapq.nsmallest(TRIES, _moves(choice, takes, make)):
            changed = _moved(choice, move, make)
            left -= sum(len(load.items) for group, load in changed.items() if load is not choice.get(group))
            if move.adds > -(best // WORTH) or left < 0:
                return choice
            time = price(changed)
            if time < best:
                best, faster = time, changed
                break
        if faster is None:
            return choice
        choice = faster
    return choice


class _Move(NamedTuple):
    """`riders` go from one group to another; `adds` is by how many ticks that is guessed to change the mini-batch."""

    adds: int
    source: int
    target: int
    riders: tuple[Member, ...]


def _moved(choice: Choice, move: _Move, make: Make) -> Choice:
    gone = {index for index, _ in move.riders}
    stay = [member for member in choice[move.source].members if member[0] not in gone]
    come = [*choice[move.target].members, *move.riders]
    changed = {**choice, move.target: make(move.target, come)}
    if stay:
        return {**changed, move.source: make(move.source, stay)}
    return {group: load for group, load in changed.items() if group != move.source}


def _moves(choice: Choice, takes: Takes, make: Make) -> Iterator[_Move]:
    """The best guess for each pair of groups and each end of the lengths."""
    for source, target in itertools.combinations(choice, 2):
        here, there = choice[source], choice[target]
        able = [item for item in here.items if takes(target, item.tokens)]
        if not able:
            continue
        as_there = {item.index: item for item in make(target, [(item.index, item.tokens) for item in able]).items}
        pairs = [(item, as_there[item.index]) for item in able]
        for ordered in (pairs, pairs[::-1]):
            adds, count = min(_guesses(here, there, ordered))
            yield _Move(adds, source, target, tuple((item.index, item.tokens) for item, _ in ordered[:count]))


def _guesses(
    here: AnyLoad, there: AnyLoad, pairs: Sequence[tuple[SequenceItem, SequenceItem]]
) -> Iterator[tuple[int, int]]:
    """(ticks that are added to the mini-batch, riders) if the first of `pairs`, an item as it is here and as it is
    there, leave: one, two, and more and more of them.
    """
    stay, come, before = _Sum.of(here), _Sum.of(there), here.time + there.time
    bound_to_stay = max((item.cost for item in here.items), default=0) if len(pairs) < len(here.items) else 0
    following = 1
    for count, (own, other) in enumerate(pairs, 1):
        stay, come = stay.plus(own, here.rule, -1), come.plus(other, there.rule, 1)
        if count in (following, len(pairs)):
            following += 1 + count // STEP
            rest = pairs[count:]
            dearest = max(bound_to_stay, rest[0][0].cost, rest[-1][0].cost) if rest else bound_to_stay
            after = min(here.time, stay.least(dearest, here.rule)) + max(there.time, come.least(0, there.rule))
            yield after - before, count


class _Sum(NamedTuple):
    """Of sequences: their ticks and tokens, how many of them share no row with their like, how many there are."""

    cost: int
    tokens: int
    large: int
    count: int

    @classmethod
    def of(cls, load: AnyLoad) -> _Sum:
        large = sum(2 * item.tokens > load.rule.budget for item in load.items)
        costs, tokens = (sum(item[field] for item in load.items) for field in (2, 1))
        return cls(costs, tokens, large, len(load.items))

    def plus(self, item: SequenceItem, rule: PackingRule, times: int) -> _Sum:
        """With one more of them, or (-1) one less."""
        large = self.large + times * (2 * item.tokens > rule.budget)
        return _Sum(self.cost + times * item.cost, self.tokens + times * item.tokens, large, self.count + times)

    def least(self, dearest: int, rule: PackingRule) -> int:
        """Ticks that they take if they can be shared out evenly; the dearest of them costs so much, or more."""
        if not self.count:
            return 0
        runs = max(self.large, -(-self.tokens // rule.budget)) if rule.packed else self.count
        mean, most = max(-(-self.cost // rule.replicas), dearest), -(-self.count // rule.replicas)
        slowest = mean + least_overhead(mean, dearest, -(-runs // rule.replicas), most, rule)
        return rule.shared(slowest, self.cost + rule.fixed * runs)
