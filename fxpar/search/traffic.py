"""What a set of strategies sends in a mean mini-batch, over which links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from fxpar.batching import BatchPlan, GroupPlan, RunTime
from fxpar.batching.borders import Borders, by_strategy
from fxpar.cost.link_bytes import LinkBytes
from fxpar.search.price import Lowered, Priced
from fxpar.search.reductions import SetReductions
from fxpar.search.switching import SetSwitches


@dataclass(frozen=True, eq=False)
class SetTraffic:
    """Of the strategies `chosen`, one for each group, in the planned `batches`, which run strategies in these `orders`:
    bytes that all ranks send, counted when asked for.
    """

    chosen: Sequence[Lowered]
    batches: Sequence[Sequence[int]]
    plans: Sequence[BatchPlan]
    switching: SetSwitches
    gradients: SetReductions
    orders: Sequence[tuple[str, ...]]

    @cached_property
    def groups(self) -> tuple[LinkBytes, ...]:
        """By group: collectives and messages between stages of its micro-batches."""
        found = [LinkBytes()] * len(self.chosen)
        for batch, plan in zip(self.batches, self.plans, strict=True):
            for group in plan.groups:
                found[group.group] += self._sent(group, batch) * (1 / len(self.plans))
        return tuple(found)

    @cached_property
    def switches(self) -> LinkBytes:
        return self._mean(
            self.switching.sent(name, order[:number]) for order in self.orders for number, name in enumerate(order)
        )

    @cached_property
    def reductions(self) -> LinkBytes:
        """Gradients on their way home."""
        reduced = {one.name: one.reduced for one in self.chosen}
        return self._mean(reduced[name] for order in self.orders for name in self.gradients.leaving(order))

    @property
    def micro_batches(self) -> LinkBytes:
        """Of all groups."""
        return sum(self.groups, LinkBytes())

    def only(self, kept: Sequence[int]) -> SetTraffic:
        """Of these groups, in this order; no mini-batch has others."""
        number = {old: new for new, old in enumerate(kept)}
        plans = [
            replace(plan, groups=tuple(replace(one, group=number[one.group]) for one in plan.groups), merged=())
            for plan in self.plans
        ]
        return replace(self, chosen=[self.chosen[group] for group in kept], plans=plans)

    def to_json(self) -> dict[str, Any]:
        """Whole bytes."""
        return {
            "groups": [one.to_json() for one in self.groups],
            "micro_batches": self.micro_batches.to_json(),
            "switches": self.switches.to_json(),
            "reductions": self.reductions.to_json(),
        }

    def _sent(self, group: GroupPlan, batch: Sequence[int]) -> LinkBytes:
        """In lockstep replicas whose list has ended run idle, and take part in what is sent."""
        longest = max(map(len, group.replicas)) if group.lockstep else 0
        total = LinkBytes()
        for sent, replica in zip(self.chosen[group.group].sent, group.replicas, strict=True):
            for micro in replica:
                total += sent.over([batch[i] for i in micro.sequences])
            total += sent.over(()) * max(0, longest - len(replica))
        return total

    def _mean(self, parts: Iterator[LinkBytes]) -> LinkBytes:
        return sum(parts, LinkBytes()) * (1 / len(self.plans))


def lowered(chosen: Sequence[tuple[int, Priced]]) -> list[Lowered]:
    """Strategies of a set that settles: none of them is a guess."""
    return [cast(Lowered, one) for _, one in chosen]


def orders_of(
    borders: Borders, switching: SetSwitches, names: Sequence[str], plans: Sequence[BatchPlan]
) -> list[tuple[str, ...]]:
    """The strategies of each mini-batch as an engine runs them; `names` are those of the groups."""
    found = []
    for plan in plans:
        runs = [RunTime(group.predicted_s, group.slots) for group in plan.groups]
        together = by_strategy([names[group.group] for group in plan.groups], runs)
        found.append(borders.fastest(switching.order(list(together)), together))
    return found


__all__ = ["SetTraffic", "lowered", "orders_of"]
