"""A strategy with its ranks in another order, priced from what was lowered in the order that searches try.

Every group of ranks has as many ranks on as many nodes in both: a micro-batch takes the same, and nothing is lowered
again. Only what meets other layouts differs: where weights lie (switches), and where gradients leave (reductions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.cost.group_cost import GroupCost
from fxpar.cost.link_bytes import ByReplica, LinkBytes
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from fxpar.schedule.mini_batch import Pace
from fxpar.search.going_home import going_home, sent_home
from fxpar.search.price import Candidate, Memory, Priced, extrapolated
from fxpar.switch.layout import ParamLayout, PlacedParam


@dataclass
class Ordered(Priced):
    """`base` with its ranks in the order of `strategy`, which has the same axes."""

    base: Candidate

    @property
    def multiple(self) -> int:
        return self.base.multiple

    @property
    def cost(self) -> GroupCost:
        return self.base.cost

    @property
    def by_position(self) -> tuple[Polynomial, ...]:
        return tuple(self.base.by_position)

    @property
    def pace(self) -> Pace | None:
        return self.base.pace

    @property
    def sent(self) -> ByReplica:
        return self.base.sent

    def predicted(self, tokens: int) -> Memory:
        return self.base.at(tokens)

    @cached_property
    def meshes(self) -> Mapping[Mesh, Mesh]:
        """The ranks of each stage (of the whole without stages), and the same ranks in this order."""
        return meshes_between(self.base.strategy, self.strategy)

    @cached_property
    def reduce_s(self) -> float:
        found = [going_home(program, self.cluster, self.moved).predicted_s for program in self.base.programs]
        return max(extrapolated(found, float(self.base.steps)), 0.0)

    @property
    def reduced(self) -> LinkBytes:
        first, *others = [sent_home(program, self.cluster, self.moved) for program in self.base.programs]
        return first + (others[-1] + first * -1) * float(self.base.steps) if others else first

    def layout(self, before: ParamLayout) -> ParamLayout:
        """How parameters lie, from how they lie under `base`."""
        known: dict[int, PlacedParam] = {}  # many tensors share one description
        for param in before.params.values():
            if id(param) not in known:
                known[id(param)] = replace(param, copies=tuple(map(self.moved, param.copies)))
        return replace(before, name=self.name, params={fqn: known[id(one)] for fqn, one in before.params.items()})

    def moved(self, dist: DistConfig) -> DistConfig:
        """Where what lies so under `base` lies in this order."""
        return on_ranks(dist, self.meshes[dist.mesh])


def meshes_between(one: Strategy, other: Strategy) -> dict[Mesh, Mesh]:
    """The ranks of `one`, whole and by stage, to those of `other`, which has the same axes in another order."""
    found = {one.mesh: other.mesh}
    if one.pipeline_size > 1:
        found |= {one.of_stage(i).mesh: other.of_stage(i).mesh for i in range(one.pipeline_size)}
    return found


def on_ranks(dist: DistConfig, mesh: Mesh) -> DistConfig:
    """The same cuts over the same axes on the ranks of `mesh`; joint axes and sums are in the order of that."""

    def there(cut: AxisShard) -> AxisShard:
        joint = "." in cut.axis
        return replace(cut, axis=".".join(mesh.in_order(cut.axis.split(".")))) if joint else cut

    partial = sorted(dist.partial, key=lambda term: mesh.place(term[0].partition(".")[0]))
    return replace(dist, mesh=mesh, dims=tuple(tuple(map(there, dim)) for dim in dist.dims), partial=tuple(partial))


__all__ = ["Ordered", "meshes_between", "on_ranks"]
