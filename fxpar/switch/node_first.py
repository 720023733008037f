"""Reductions in two exchanges: terms are added inside each node first, and one sum per node crosses the network.

Rank l of a node collects what the ranks number l of all nodes hold of the target (for a target cut over all ranks: one
chunk per node). So the second exchange goes between ranks of the same number only, and all of them send alike. A term
that several nodes have stays, if it can, on the node of the slice's target; a node without terms sends nothing.
(Two-level reduction, as in hierarchical all-reduce of Horovod and NCCL's trees; here for any placement.)

The nodes that have terms collect them. In a round, tensors of different nodes (stages of a pipeline) go together, so
that all links are busy at once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import SwitchPlanError
from fxpar.ir.dist_config import AxisShard, DistConfig, chunk
from fxpar.ir.mesh import Mesh
from fxpar.schedule.mini_batch import STAGING_BYTES, bucket_bytes
from fxpar.switch.boxes import refine
from fxpar.switch.layout import ParamLayout, PlacedParam
from fxpar.switch.reduction import (
    Alike,
    AnyReductionPlan,
    Matched,
    ReductionByTurns,
    ReductionPlan,
    matched,
    plan_reduction,
    reduction_of,
    tensor_class,
)
from fxpar.switch.terms import EVERYWHERE, NOWHERE, GradientPlacement, Placements, TermClass, terms_held


@dataclass(frozen=True, eq=False)
class Round:
    """Some tensors: their gradients into the sums of each node, and those into the target."""

    inside: ReductionPlan
    between: ReductionPlan

    @property
    def sums(self) -> ParamLayout:
        return self.inside.target


@dataclass(frozen=True, eq=False)
class NodeFirstPlan:
    """Rounds that are carried out one after the other, so that the sums of one need memory at a time."""

    rounds: tuple[Round, ...]

    @property
    def exchanges(self) -> tuple[ReductionPlan, ...]:
        """All exchanges in their order."""
        return tuple(plan for one in self.rounds for plan in (one.inside, one.between))

    @property
    def intra_node_bytes(self) -> int:
        return sum(plan.intra_node_bytes for plan in self.exchanges)

    @property
    def inter_node_bytes(self) -> int:
        return sum(plan.inter_node_bytes for plan in self.exchanges)

    @property
    def predicted_s(self) -> float:
        """Seconds on the cluster of the plan."""
        return sum(plan.predicted_s for plan in self.exchanges)

    @property
    def sums_bytes(self) -> int:
        """Bytes that a rank needs for the sums of a round."""
        return max(one.sums.max_bytes() for one in self.rounds)

    def verify(self) -> None:
        """Raise SwitchPlanError unless each element gets each term exactly once: on one node, whose sum goes on."""
        for one in self.rounds:
            one.inside.verify()
            one.between.verify()
            for terms, sums in zip(one.inside.terms, one.between.terms, strict=True):
                _verify_nodes(one.inside, terms, sums)


def cheapest_reduction(
    sources: Placements,
    target: ParamLayout,
    cluster: ClusterSpec,
    name: str = "gradients",
    sums_bytes: int = STAGING_BYTES,
    planner: str = "auto",
) -> AnyReductionPlan | NodeFirstPlan:
    """The faster of the direct reduction and the one through the nodes, by predicted time; the first if equal.

    With planner "turns", or so many transfers that the direct one is by turns, it is taken as it is.

    `sums_bytes` bounds the memory of a round per rank (one tensor may need more), and so does the size of a bucket.
    Raises what `plan_reduction` raises.
    """
    direct = plan_reduction(sources, target, cluster, name, planner)
    if isinstance(direct, ReductionByTurns) or not direct.inter_node_bytes:
        return direct
    through = plan_node_first(sources, target, cluster, name, sums_bytes)
    return direct if through is None or direct.predicted_s <= through.predicted_s else through


@dataclass(frozen=True)
class ReductionCost:
    """What a reduction takes and sends, without its plan."""

    predicted_s: float
    intra_node_bytes: int
    inter_node_bytes: int

    @classmethod
    def of(cls, *plans: AnyReductionPlan) -> ReductionCost:
        """Of plans that are carried out one after the other."""
        return cls(
            sum(plan.predicted_s for plan in plans),
            sum(plan.intra_node_bytes for plan in plans),
            sum(plan.inter_node_bytes for plan in plans),
        )


def cheapest_cost(
    sources: Mapping[str, tuple[GradientPlacement, ...]],
    target: ParamLayout,
    cluster: ClusterSpec,
    sums_bytes: int = STAGING_BYTES,
) -> ReductionCost:
    """That of `cheapest_reduction`, for who wants no plan: rounds in which tensors lie alike, as in layers that repeat,
    are planned once. Raises what `plan_reduction` raises.
    """
    direct = ReductionCost.of(plan := plan_reduction(sources, target, cluster))
    if isinstance(plan, ReductionByTurns) or not plan.inter_node_bytes:
        return direct
    through = node_first_cost(sources, target, cluster, sums_bytes)
    return direct if through is None or direct.predicted_s <= through.predicted_s else through


def node_first_cost(
    sources: Mapping[str, tuple[GradientPlacement, ...]],
    target: ParamLayout,
    cluster: ClusterSpec,
    sums_bytes: int = STAGING_BYTES,
) -> ReductionCost | None:
    """That of `plan_node_first`, or None."""
    sums = node_sums(target, cluster, sources)
    if sums is None:
        return None
    shares = _shares(sums, cluster, sums_bytes)
    placed = (tuple((sources[f], sums.params[f], target.params[f]) for f in fqns) for fqns in shares)
    rounds = [_round_cost(one, target.world, cluster) for one in placed]
    return ReductionCost(
        sum(one.predicted_s for one in rounds),
        sum(one.intra_node_bytes for one in rounds),
        sum(one.inter_node_bytes for one in rounds),
    )


@functools.lru_cache(maxsize=1024)
def _round_cost(
    placed: tuple[tuple[tuple[GradientPlacement, ...], PlacedParam, PlacedParam], ...], world: int, cluster: ClusterSpec
) -> ReductionCost:
    """Of a round of tensors, each with its gradients, its sum and its target."""
    numbered = {str(number): one for number, one in enumerate(placed)}
    sums = ParamLayout("node sums", world, {name: one for name, (_, one, _) in numbered.items()})
    target = ParamLayout("target", world, {name: one for name, (_, _, one) in numbered.items()})
    gradients = matched({name: one for name, (one, _, _) in numbered.items()}, target, cluster, "gradients")
    made = _round(gradients, sums, target, cluster)
    return ReductionCost.of(made.inside, made.between)


def plan_node_first(
    sources: Placements,
    target: ParamLayout,
    cluster: ClusterSpec,
    name: str = "gradients",
    sums_bytes: int = STAGING_BYTES,
) -> NodeFirstPlan | None:
    """The reduction through the nodes; None if the ranks are no whole nodes, or the target is no plain cut over them.

    Raises what `plan_reduction` raises.
    """
    sums = node_sums(target, cluster, sources)
    if sums is None:
        return None
    rounds = []
    for fqns in _shares(sums, cluster, sums_bytes):
        gradients = matched({f: sources[f] for f in fqns if f in sources}, _part(target, fqns), cluster, name)
        rounds.append(_round(gradients, _part(sums, fqns), _part(target, fqns), cluster))
    matched(sources, target, cluster, name)  # a gradient without target is in no round
    return NodeFirstPlan(tuple(rounds))


def node_sums(target: ParamLayout, cluster: ClusterSpec, sources: Placements | None = None) -> ParamLayout | None:
    """What each rank collects: axis `device` cuts a tensor inside each node, and every node has the whole; with
    `sources`, every node from the first to the last that has terms of it.

    None unless the ranks fill at least two nodes, and each tensor is cut on one dim over all ranks, or not cut.
    """
    devices = cluster.devices_per_node
    nodes, rest = divmod(target.world, devices)
    if rest or nodes < 2 or devices < 2:
        return None
    everywhere = Mesh((("node", nodes), ("device", devices)))
    params: dict[str, PlacedParam] = {}
    for fqn, param in target.params.items():
        dist = param.copies[0]
        if len(param.copies) > 1 or dist.mesh.ranks != everywhere.ranks or len(dist.mesh.axes) > 1:
            return None
        mesh = everywhere if sources is None or fqn not in sources else _mesh_of_terms(sources[fqn], devices)
        dims = tuple(
            (_cut(size, nodes, devices),) if cut else () for cut, size in zip(dist.dims, param.shape, strict=True)
        )
        params[fqn] = replace(param, copies=(DistConfig(mesh, dims, dtype=dist.dtype),))
    return ParamLayout("node sums", target.world, params)


def _mesh_of_terms(given: GradientPlacement | Sequence[GradientPlacement], devices: int) -> Mesh:
    placed = (given,) if isinstance(given, GradientPlacement) else given
    first = min(one.dist.mesh.offset for one in placed) // devices
    last = max(one.dist.mesh.last for one in placed) // devices
    return Mesh((("node", last - first + 1), ("device", devices)), first * devices)


def room_for_sums(target: ParamLayout, cluster: ClusterSpec, sums_bytes: int) -> int:
    """Bytes that a rank needs at most for the sums of a round if gradients go through the nodes; 0 if they cannot."""
    sums = node_sums(target, cluster)
    if sums is None:
        return 0
    each = [_part(sums, [fqn]).max_bytes() for fqn in sums.params]
    return min(sum(each), max([bucket_bytes(sums.max_bytes(), sums_bytes), *each]))


def _cut(size: int, nodes: int, devices: int) -> AxisShard:
    """One chunk for each node, where the dim divides; else one chunk (right as well, but ranks do not send alike)."""
    sections = (1,) * nodes
    return AxisShard("device", sections if chunk(size, devices, sections) is not None else ())


def _shares(sums: ParamLayout, cluster: ClusterSpec, sums_bytes: int) -> Iterator[list[str]]:
    """As many tensors at a time as each node has room for, a bucket of at most `sums_bytes`, at least one: those of a
    node in their order, and those of different nodes in turns.
    """
    room = bucket_bytes(sums.max_bytes(), sums_bytes)
    by_nodes: dict[range, list[str]] = {}
    for fqn, param in sums.params.items():
        by_nodes.setdefault(_nodes(param, cluster), []).append(fqn)
    places = [((at + 0.5) / len(fqns), nodes, fqn) for nodes, fqns in by_nodes.items() for at, fqn in enumerate(fqns)]
    share: list[str] = []
    used: Counter[int] = Counter()
    for _, nodes, fqn in sorted(places, key=lambda one: one[0]):
        nbytes = _part(sums, [fqn]).max_bytes()
        if share and max(used[node] for node in nodes) + nbytes > room:
            yield share
            share, used = [], Counter()
        share.append(fqn)
        used.update(dict.fromkeys(nodes, nbytes))
    if share:
        yield share


def _nodes(sums: PlacedParam, cluster: ClusterSpec) -> range:
    mesh = sums.copies[0].mesh
    return range(mesh.offset // cluster.devices_per_node, mesh.last // cluster.devices_per_node + 1)


def _part(layout: ParamLayout, fqns: list[str]) -> ParamLayout:
    return replace(layout, params={fqn: layout.params[fqn] for fqn in fqns})


def _round(gradients: Matched, sums: ParamLayout, target: ParamLayout, cluster: ClusterSpec) -> Round:
    names = tuple(gradients.layout.params)
    pairs = [
        _term_classes(one, sums.params[names[one.members[0]]], gradients.world, cluster) for one in gradients.alike
    ]
    inside = reduction_of(gradients.layout, sums, cluster, tuple(inside for inside, _ in pairs))
    between = reduction_of(sums, target, cluster, tuple(between for _, between in pairs))
    return Round(inside, between)


def _term_classes(alike: Alike, sums: PlacedParam, world: int, cluster: ClusterSpec) -> tuple[TermClass, TermClass]:
    """The terms of the gradients, and the nodes' sums as terms; both on one grid."""
    plain = tuple(replace(one.dist, partial=()) for one in alike.before)
    grid = refine(sums.shape, (*plain, *sums.copies, *alike.after))
    held, term_of, count = terms_held(alike.before, grid, world)
    collected, needed = grid.holders(sums.copies, world), grid.holders(alike.after, world)
    node_of = np.arange(world) // cluster.devices_per_node
    to = _nodes_of_terms(held.table, term_of, count, needed.table, cluster.devices_per_node)
    inside = TermClass(tensor_class(alike, grid, held, collected), term_of, count, to, node_of)
    nodes = world // cluster.devices_per_node
    summed = np.stack([(to == node).any(1) for node in range(nodes)], 1)  # [slices, nodes]
    itemsize = sums.dtype.itemsize
    cls = tensor_class(alike, grid, collected, needed)
    cls = replace(cls, itemsize=itemsize, nbytes=grid.numel * itemsize)
    between = TermClass(cls, node_of, nodes, np.where(summed, EVERYWHERE, NOWHERE), node_of)
    return inside, between


def _nodes_of_terms(held: np.ndarray, term_of: np.ndarray, count: int, needed: np.ndarray, devices: int) -> np.ndarray:
    """[slices, terms]: the node that adds a term: the target's own if it has the term, else the next one that does."""
    nodes = held.shape[1] // devices
    home = _by_node(needed, devices).argmax(1)
    turned = (home[:, None] + np.arange(nodes)) % nodes  # [slices, nodes], from the target's own on
    to = np.empty((len(held), count), np.int64)
    for term in range(count):
        there = _by_node(held & (term_of == term), devices)
        first = np.take_along_axis(there, turned, 1).argmax(1)
        to[:, term] = np.take_along_axis(turned, first[:, None], 1)[:, 0]
    return to


def _by_node(table: np.ndarray, devices: int) -> np.ndarray:
    """[slices, nodes]: whether any rank of the node is marked in `table` [slices, ranks]."""
    return np.asarray(table.reshape(len(table), -1, devices).any(2))


def _verify_nodes(plan: ReductionPlan, terms: TermClass, sums: TermClass) -> None:
    """Each term goes to a node that has it, and exactly the nodes with terms send a sum on."""
    assert terms.to is not None
    assert sums.to is not None
    devices, first = plan.problem.cluster.devices_per_node, int(terms.cls.members[0])

    def fail(bad: np.ndarray, node: int, why: str) -> None:
        piece = int(bad.argmax())
        raise SwitchPlanError(plan.problem.tensors[first], plan.problem.box_text(first, piece), node * devices, why)

    for term in range(terms.count):
        there = _by_node(terms.cls.held & (terms.term_of == term), devices)
        bad = ~np.take_along_axis(there, terms.to[:, term, None], 1)[:, 0]
        if bad.any():
            fail(bad, int(terms.to[bad.argmax(), term]), f"is to add term {term}, which no rank of its node holds")
    for node in range(sums.count):
        bad = (sums.to[:, node] == EVERYWHERE) != (terms.to == node).any(1)
        if bad.any():
            fail(bad, node, "sends on a sum without terms, or keeps one with")
