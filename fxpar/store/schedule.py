"""Which switches a mini-batch takes, in which order its graphs run, and what that costs. No process group is needed.

Weights do not change within a mini-batch, so a switch may take a slice from the home layout and from every *resident*
layout that an earlier switch has filled. A layout in the arena is overwritten by the next one there and is no source.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch import AnySwitchPlan, ParamLayout, plan_large_switch
from fxpar.switch.order import EXHAUSTIVE


@dataclass
class SwitchSchedule:
    """Plans between the home layout and the compute `layouts`, each made once, when first needed.

    All layouts have the dtypes that travel: those of the graphs.
    """

    layouts: Mapping[str, ParamLayout]
    home: ParamLayout
    resident: Collection[str]
    cluster: ClusterSpec
    planner: str = "auto"
    _plans: dict[tuple[str, frozenset[str]], AnySwitchPlan] = field(default_factory=dict)
    _orders: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict)

    def plan(self, target: str, visited: Iterable[str]) -> AnySwitchPlan:
        """The verified plan that fills the layout of `target` when the graphs `visited` have run before."""
        key = (target, self.sources(visited))
        if key not in self._plans:
            holders = [self.layouts[name] for name in self.layouts if name in key[1]]
            plan = plan_large_switch(self.home, self.layouts[target], self.cluster, self.planner, holders)
            plan.verify()
            self._plans[key] = plan
        return self._plans[key]

    def sources(self, visited: Iterable[str]) -> frozenset[str]:
        """Those of the visited layouts that still hold their weights."""
        return frozenset(name for name in visited if name in self.resident)

    def hops(self, order: Sequence[str]) -> list[AnySwitchPlan]:
        """The plans of a mini-batch that runs `order`."""
        return [self.plan(target, order[:i]) for i, target in enumerate(order)]

    def cost(self, order: Sequence[str]) -> tuple[float, int]:
        """Predicted seconds of all switches, and the bytes that they move, which break ties."""
        hops = self.hops(order)
        total = sum(hop.intra_node_bytes + hop.inter_node_bytes for hop in hops)
        return round(sum(hop.predicted_s for hop in hops), 9), total

    def order(self, names: Collection[str]) -> tuple[str, ...]:
        """The cheapest order of these graphs: all are tried up to 6, above that the cheapest next one is taken."""
        key = frozenset(names)
        if key not in self._orders:
            known = [name for name in self.layouts if name in key]
            if len(known) <= EXHAUSTIVE:
                self._orders[key] = min(itertools.permutations(known), key=self.cost)
            else:
                self._orders[key] = self._greedy(known)
        return self._orders[key]

    def _greedy(self, names: list[str]) -> tuple[str, ...]:
        done: list[str] = []
        left = list(names)
        while left:
            done.append(min(left, key=lambda name: self.plan(name, done).predicted_s))
            left.remove(done[-1])
        return tuple(done)
