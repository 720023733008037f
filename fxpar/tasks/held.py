"""What a run of tasks holds and moves: weights and gradients of a task under a strategy, and what lies at home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.axes import REPLICAS
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import TOKENS, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.memory import predict_memory, steady_micro_batches
from fxpar.memory.state import bytes_at_home
from fxpar.schedule.mini_batch import STAGING_BYTES, staged_bytes
from fxpar.store import home_layout, wire_layout
from fxpar.store.home import ParamSpec
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch.layout import PlacedParam
from fxpar.switch.node_first import cheapest_cost, room_for_sums
from fxpar.switch.order import SwitchSchedule
from fxpar.switch.terms import GradientPlacement, gradient_placements, without_partial

Placed = Mapping[str, PlacedParam]


@dataclass(frozen=True)
class Held:
    """Where the weights of a task lie under a strategy, how its gradients leave, and the bytes that its fullest rank
    has beside both while it runs.
    """

    weights: Placed
    gradients: Mapping[str, tuple[GradientPlacement, ...]]
    active_bytes: int

    @classmethod
    def of(cls, program: TrainGraph, tokens: int = 0) -> Held:
        """Of a program for a store, whose micro-batches have so many tokens (0: as many as the example)."""
        sizes = {dim.name: tokens for dim in program.dims if dim.name == TOKENS and tokens}
        found = predict_memory(program, sizes, micro_batches=steady_micro_batches(program.strategy))
        active = max(0, found.step_bytes - found.gradient_bytes)
        return cls(layout_of(program).params, gradient_placements(program), active)

    def placed(self, replicas: int = 1, first: int = 0) -> Held:
        """Of the strategy with so many replicas on the ranks from `first` on; this one has one, from rank 0 on."""

        def on(dist: DistConfig) -> DistConfig:
            mesh = dist.mesh
            if replicas > 1:
                mesh = Mesh(((REPLICAS, replicas), *(axis for axis in mesh.axes if axis[0] != REPLICAS)))
            return replace(dist, mesh=replace(mesh, offset=mesh.offset + first))

        sums = ((REPLICAS, "sum"),) if replicas > 1 else ()  # each replica has a term of a gradient
        weights = {fqn: replace(one, copies=tuple(map(on, one.copies))) for fqn, one in self.weights.items()}
        gradients = {
            fqn: tuple(replace(one, dist=replace(on(one.dist), partial=(*sums, *one.dist.partial))) for one in terms)
            for fqn, terms in self.gradients.items()
        }
        return Held(weights, gradients, self.active_bytes)

    @cached_property
    def sums(self) -> Placed:
        """What gradients add up in."""
        return {fqn: without_partial(terms) for fqn, terms in self.gradients.items()}

    @cached_property
    def by_param(self) -> dict[str, int]:
        """Bytes of the weights and gradients of each parameter, on a rank that has it."""
        sums = {fqn: _most(one) for fqn, one in self.sums.items()}
        return {fqn: _most(one) + sums.get(fqn, 0) for fqn, one in self.weights.items()}

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """One, or those of the stages: ranks of a mesh hold equally much."""
        return tuple(dict.fromkeys(dist.mesh for one in self.weights.values() for dist in one.copies))

    @property
    def held_bytes(self) -> int:
        """Of weights and gradients, on the fullest rank."""
        ranks = [mesh.offset for mesh in self.meshes]
        both = (self.weights, self.sums)
        return max((sum(sum(on_rank(one, rank).values()) for one in both) for rank in ranks), default=0)


def on_rank(placed: Placed, rank: int) -> dict[tuple[str, object], int]:
    """Bytes of what a rank holds, by parameter and slices of it."""
    return {
        (fqn, tuple(dist.boxes(rank, one.shape))): _bytes(one, dist)
        for fqn, one in placed.items()
        for dist in one.copies
        if rank in dist.mesh
    }


def _most(one: PlacedParam) -> int:
    return max(_bytes(one, dist) for dist in one.copies)


def _bytes(one: PlacedParam, dist: DistConfig) -> int:
    return TensorMeta(dist.local_shape(one.shape), one.dtype).numel({}) * one.dtype.itemsize


@dataclass(frozen=True)
class Home:
    """Masters and gradients of the parameters of all tasks, cut over all ranks of a run, and the dtypes in which
    weights leave it. `trained` parameters have gradients.
    """

    masters: ParamLayout
    wire: ParamLayout
    trained: frozenset[str]
    cluster: ClusterSpec

    @classmethod
    def of(cls, tasks: Iterable[Held], cluster: ClusterSpec, devices: int) -> Home:
        specs: dict[str, ParamSpec] = {}
        trained: set[str] = set()
        for task in tasks:
            trained |= task.gradients.keys()
            for fqn, one in task.weights.items():
                specs.setdefault(fqn, ParamSpec(fqn, one.shape, one.dtype))
        masters = home_layout(specs.values(), devices)
        return cls(masters, wire_layout(masters, specs.values()), frozenset(trained), cluster)

    @cached_property
    def optimizer_bytes(self) -> int:
        """Of AdamW, on the fullest rank."""
        return bytes_at_home(self.masters, self.trained)[1]

    @cached_property
    def nbytes(self) -> int:
        """Of masters, gradients and optimizer on the fullest rank, and of what travels."""
        if self.masters.world == 1:
            staging = 0
        else:
            weights = sum(_whole_bytes(one) for one in self.wire.params.values())
            staging = staged_bytes(weights, STAGING_BYTES) + room_for_sums(self.masters, self.cluster, STAGING_BYTES)
        return sum(bytes_at_home(self.masters, self.trained)) + staging

    def guessed_ms(self, nbytes: float) -> float:
        """Of moving so many bytes of weights and gradients of each rank, all but what is at home there."""
        ranks, cluster = self.masters.world, self.cluster
        per_s = float(cluster.bytes_per_s(between=ranks > cluster.devices_per_node))
        return 1e3 * (nbytes * (1 - 1 / ranks) / per_s + 2 * float(cluster.latency_s))

    def weights_ms(self, waves: Sequence[Sequence[Held]]) -> Callable[[tuple[int, ...]], float]:
        """Of an order of waves, by number, what the weights of all of their tasks take to come, where weights stay."""
        names = [[f"{wave}.{task}" for task in range(len(mine))] for wave, mine in enumerate(waves)]
        layouts = {
            name: ParamLayout(name, self.masters.world, one.weights)
            for wave, mine in zip(names, waves, strict=True)
            for name, one in zip(wave, mine, strict=True)
        }
        schedule = SwitchSchedule(layouts, self.wire, self.cluster, resident=tuple(layouts), priced_only=True)
        return lambda order: 1e3 * schedule.evaluate([name for wave in order for name in names[wave]]).predicted_s

    def moved_ms(self, tasks: Sequence[Held], stay: bool = True) -> list[float]:
        """Of each task, in the order of running, what its weights take to come and its gradients to leave. Weights of
        those before it help, if they `stay`.
        """
        layouts = {str(i): ParamLayout(str(i), self.masters.world, one.weights) for i, one in enumerate(tasks)}
        schedule = SwitchSchedule(
            layouts, self.wire, self.cluster, resident=tuple(layouts) if stay else (), priced_only=True
        )
        found: list[float] = []
        visited: list[str] = []
        for name, one in zip(layouts, tasks, strict=True):
            leaving = cheapest_cost(one.gradients, self.masters.only(one.gradients), self.cluster, STAGING_BYTES)
            found.append(1e3 * (schedule.plan(name, visited).predicted_s + leaving.predicted_s))
            visited.append(name)
        return found


def _whole_bytes(one: PlacedParam) -> int:
    return TensorMeta(one.shape, one.dtype).numel({}) * one.dtype.itemsize
