"""From the graph of a model to the best sets of strategies, and from one of those to a `Plan`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpar.annotate import AnnotateOnce
from fxpar.annotate.experts import experts_of
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.exec_graph import Outline
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import DOCUMENTS, LogicalGraph
from fxpar.ir.node_meta import is_backward, tensor_of
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import LowerAlike, default_passes, outline
from fxpar.ops.traits import ATTENTION
from fxpar.search.driver import find_plan
from fxpar.search.known import Said
from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.search.price import Depth, Lower, extrapolated
from fxpar.search.pricing import PricedSet
from fxpar.search.problem import Found, Problem
from fxpar.search.shortened import LowerShort, layers_alike
from fxpar.search.space import placed_alike, shapes, with_rings
from fxpar.search.switching import Outlines

MAX_STRATEGIES = 3  # of a plan, unless it is said
Rows = Callable[[int], LogicalGraph]
"""The graph that is lowered, of rows as in training, of the model with so many layers; the same one if asked again."""


@dataclass(frozen=True)
class PlannedFor:
    """What a plan says beside its set of strategies; the fields are those of `Plan`."""

    model: str
    world: int
    tokens_per_step: int
    options: tuple[str, ...]
    parameters: int
    memory_bytes: int | None

    def plan(self, found: Found, one: PricedSet) -> Plan:
        """One of the sets that were found, with budgets as the engine takes them; rounds of teams as the one group that
        stands for their formations.
        """
        groups = tuple(PlanGroup(g.limit, g.strategy, g.token_budget, g.seconds) for g in one.groups)
        if found.rounds is not None and one is found.rounds.priced:
            seconds = sum(group.seconds for group in groups)
            groups = (PlanGroup(found.rounds.limit, found.rounds.text, found.rounds.token_budget, seconds),)
        return Plan(
            model=self.model,
            world=self.world,
            tokens_per_step=self.tokens_per_step,
            groups=groups,
            options=self.options,
            memory_budget_bytes=0 if self.memory_bytes is None else self.memory_bytes - one.optimizer_bytes,
            parameters=self.parameters,
            predicted_s=one.predicted_s,
            lower_bound_s=min(found.lower_bound_s, one.predicted_s),
        )


def of_ranks(cluster: ClusterSpec, world: int) -> ClusterSpec:
    """Of a cluster the nodes that `world` ranks fill, from the first on. Raises ClusterError if they are too few."""
    cluster.require(world)
    local = min(world, cluster.devices_per_node)
    local = local if world % local == 0 else math.gcd(world, local)
    return cluster.with_nodes(world // local, local)


def kv_heads(logical: LogicalGraph) -> int | None:
    """Key-value heads of the attention of a model, of several kinds what divides them all; None without attention."""
    nodes = (node for node in logical.gm.graph.nodes if node.target in ATTENTION and not is_backward(node))
    found = [int(tensor_of(node.args[1]).shape[1]) for node in nodes]
    return math.gcd(*found) if found else None


def whole_depth(logical: LogicalGraph) -> Depth:
    """Of a model that is lowered with all of its layers: the stages of a pipeline may be as many."""
    return Depth(len({block_of(info.fqn) for info in logical.params()} - {""}) or 1, whole=True)


def problem_of(
    rows: Rows,
    depth: Depth,
    cluster: ClusterSpec,
    batches: Sequence[Sequence[int]],
    longest: int,
    memory_bytes: int | None,
    rings: bool = False,
) -> Problem:
    """What to search for a model: every shape of strategy on the cluster, up to as many strategies as plans have by
    default; with `rings` also those with rings where key-value heads bound cp. `batches` are lengths by mini-batch,
    `longest` is what the last group takes.
    """
    logical = rows(depth.samples(1)[0])
    inputs = {info.fqn for info in logical.inputs}
    found = shapes(cluster.world, cluster.devices_per_node, depth.most_stages, experts_of(logical))
    heads = kv_heads(logical) if rings else None
    return Problem(
        shapes=tuple(found if heads is None else with_rings(found, heads)),
        cluster=cluster,
        batches=tuple(map(tuple, batches)),
        longest=longest,
        memory_bytes=memory_bytes,
        max_strategies=MAX_STRATEGIES,
        depth=depth,
        packed=DOCUMENTS in inputs,
    )


def planned_for(model: str, options: Sequence[str], tokens: int, problem: Problem, rows: Rows) -> PlannedFor:
    """The model's parameters are counted from the shallow ones that were looked at."""
    depth = problem.depth
    samples = depth.samples(1)
    counts = [sum(info.meta.numel({}) for info in rows(layers).params()) for layers in samples]
    parameters = round(extrapolated(counts, float(depth.beyond(samples))))
    world, memory = problem.cluster.world, problem.memory_bytes
    last = {one.partition("=")[0].strip(): one for one in options}  # of each option, as the model was made with
    return PlannedFor(model, world, tokens, tuple(last.values()), parameters, memory)


def lowering(rows: Rows, depth: Depth | None = None) -> tuple[Lower, Outlines]:
    """What lowers a model for a store, and what only places its parameters, each of these once. With `depth` its two
    small models are lowered together.
    """
    samples = () if depth is None else depth.samples(1)

    @functools.cache
    def placed(layers: int) -> GraphPass:
        """Placements of a model that is not cut into stages do not depend on what saves memory."""
        return AnnotateOnce()

    def passes(strategy: Strategy, layers: int) -> list[GraphPass]:
        first, *rest = default_passes(for_store=True)
        return [placed(layers) if strategy.pipeline_size == 1 else first, *rest]

    @functools.cache
    def outlined(strategy: Strategy, layers: int) -> Outline:
        return outline(rows(layers), strategy, passes=passes(strategy, layers), verified=False)

    @functools.cache
    def alike(layers: int, staged: bool) -> LowerAlike:
        first, *rest = default_passes(for_store=True)
        return LowerAlike(rows(layers), [first if staged else placed(layers), *rest])

    both = None
    if depth is not None and len(samples) == 2:
        few, more = (functools.partial(alike, layers, False) for layers in samples)
        both = LowerShort(few, more, depth.period)

    def lowered(strategy: Strategy, layers: int) -> TrainGraph:  # none of them runs
        if both is not None and layers in samples and layers_alike(strategy):
            return both(strategy, whole=layers == samples[1])
        return alike(layers, strategy.pipeline_size > 1)(strategy)

    return lowered, lambda strategy, layers: outlined(placed_alike(strategy), layers)


def searched(problem: Problem, rows: Rows, said: Said = lambda _: None) -> Found:
    """Search among the strategies of a model. Raises as `find_plan` does."""
    return find_plan(problem, *lowering(rows, problem.depth), said)
