"""`Load`: sequences that run together in one group, with their micro-batches and times in ticks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fxpar.batching.balance import Share, makespan, share_out
from fxpar.batching.bounds import shared_lower_bound
from fxpar.batching.groups import LengthGroup
from fxpar.batching.packing import PackingRule, SequenceItem, longest_first, ticks
from fxpar.cost.group_cost import GroupCost

Member = tuple[int, int]  # a sequence: its index in the mini-batch, its tokens


def rule_of(group: LengthGroup, cost: GroupCost, packed: bool) -> PackingRule:
    """How a group runs. Where each sequence runs alone there are no bins to pack."""
    bins = group.strategy.bins if packed else 1
    return PackingRule(
        group.replicas * bins,
        group.token_budget // bins,
        ticks(cost.fixed_s),
        lockstep=group.lockstep,
        packed=packed,
        stages=cost.stages,
        virtual=cost.virtual,
        shared_by=cost.shared_by,
        zero_bubble=cost.schedule == "zb_h1",
        bins=bins,
    )


@dataclass(frozen=True)
class Load:
    """`items`, dearest first, on the replicas of a group. What takes time to find is found when it is asked for."""

    items: tuple[SequenceItem, ...]
    rule: PackingRule

    @classmethod
    def of(cls, members: Iterable[Member], rule: PackingRule, cost: GroupCost) -> Load:
        """These sequences in a group that runs so. What shares a bin is the work of some ranks of a replica alone."""
        found = list(members)
        by_length = {length: rule.bins * ticks(cost.sequence_s(length)) for length in {n for _, n in found}}
        return cls(tuple(longest_first(SequenceItem(i, length, by_length[length]) for i, length in found)), rule)

    @property
    def teams(self) -> tuple[Load, ...]:
        """One per team of strategies side by side: here all ranks are one."""
        return (self,)

    @property
    def members(self) -> list[Member]:
        """What it was made of, dearest first."""
        return [(item.index, item.tokens) for item in self.items]

    @cached_property
    def bound(self) -> int:
        """A time that no plan of these sequences undercuts."""
        return shared_lower_bound(self.items, self.rule) if self.items else 0

    @cached_property
    def shares(self) -> list[Share]:
        """The micro-batches of each replica."""
        return share_out(self.items, self.rule) if self.items else [[] for _ in range(self.rule.replicas)]

    @cached_property
    def slowest(self) -> int:
        """What the slowest replica takes if no two ranks share a core."""
        return makespan(self.shares, self.rule)

    @cached_property
    def work(self) -> int:
        """What all replicas take together."""
        return sum(one.cost + self.rule.fixed for share in self.shares for one in share)

    @property
    def time(self) -> int:
        """What they take, where ranks that wait leave their core to others: all of the work is done by all cores, and
        no replica is faster than alone on them.
        """
        return self.rule.shared(self.slowest, self.work)

    @property
    def micro_batches(self) -> int:
        """Of the replica that has most."""
        return max(map(len, self.shares))
