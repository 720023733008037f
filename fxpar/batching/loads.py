"""`Load`: sequences that run together in one group, with their micro-batches and times in ticks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fxpar.batching.balance import Share, share_out, shared_makespan
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
    def members(self) -> list[Member]:
        """What it was made of, dearest first."""
        return [(item.index, item.tokens) for item in self.items]

    @cached_property
    def bound(self) -> int:
        """A time that no plan of these sequences undercuts."""
        return shared_lower_bound(self.items, self.rule)

    @cached_property
    def shares(self) -> list[Share]:
        """The micro-batches of each replica."""
        return share_out(self.items, self.rule)

    @cached_property
    def time(self) -> int:
        """What they take."""
        return shared_makespan(self.shares, self.rule)

    @property
    def micro_batches(self) -> int:
        """Of the replica that has most."""
        return max(map(len, self.shares))
