"""Positions: where a strategy may have rules. The modules of a layer, those outside of layers, runs of layers."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxpar.chunks import loss_span
from fxpar.cost.calls import NOMINAL_TOKENS, node_costs
from fxpar.cost.ops import local_metas
from fxpar.ir.axes import STAGES
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import Pipeline
from fxpar.ops.traits import ATTENTION, EXPERT_PRODUCTS
from fxpar.search.layer_list import Layers, numbered
from fxpar.search.price import Candidate
from fxpar.search.space import with_stages


def globs_of_weight(flat: Candidate, layers: Layers, least: float) -> list[str]:
    """Globs of the positions that take at least such a share of all seconds, or of all elements of parameters, where
    there is a matrix: norms and sums do the same under all roles. `flat` has no stages.
    """
    program = flat.programs[-1]
    assert not isinstance(program, PipelineGraph)
    in_program = flat.samples[-1]
    seconds, elements, matrices = defaultdict[str, float](float), defaultdict[str, float](float), set[str]()
    for cost in node_costs(program, flat.cluster):
        place = position_of(cost.fqn, layers)
        seconds[place] += float(cost.exposed.at(NOMINAL_TOKENS)) * times(place, layers, in_program)
    for info, _ in program.params():
        place = position_of(info.fqn.rpartition(".")[0], layers)
        elements[place] += info.meta.numel({}) * times(place, layers, in_program)
        if len(info.meta.shape) > 1:
            matrices.add(place)
    shares = [{place: one / sum(found.values()) for place, one in found.items()} for found in (seconds, elements)]
    return [place for place in seconds if place in matrices and max(s.get(place, 0.0) for s in shares) >= least]


def globs_of_attention(flat: Candidate, layers: Layers) -> set[str]:
    """Globs of the positions that have an attention of documents. `flat` has no stages."""
    return {position_of(fqn_of(node), layers) for node in _nodes(flat) if node.target in ATTENTION}


def experts_by_glob(flat: Candidate, layers: Layers) -> dict[str, int]:
    """Of the positions that have experts the number of these, or the largest that divides those of all of its layers.
    `flat` has no stages, and experts apart nowhere.
    """
    found: dict[str, int] = {}
    for node in _nodes(flat):
        if node.target in EXPERT_PRODUCTS:
            glob, (weight, *_) = position_of(fqn_of(node), layers), local_metas(node.args[1])
            found[glob] = math.gcd(found.get(glob, 0), int(weight.shape[0]))
    return found


def _nodes(flat: Candidate) -> Iterator[fx.Node]:
    return (node for part in flat.programs[-1].parts.values() for node in part.graph.nodes)


def glob_of_head(flat: Candidate, layers: Layers) -> str | None:
    """Glob of the position that makes the logits; None without a loss over classes. `flat` has no stages."""
    program = flat.programs[-1]
    calls = [node for node in program.parts["body"].graph.nodes if node.op == "call_function"]
    span = loss_span(calls, program.dims)
    return None if span is None else position_of(fqn_of(calls[span[0]]), layers)


def position_of(fqn: str, layers: Layers) -> str:
    """The glob of the position that a module is in: the module of a layer, or itself."""
    inside = fqn.removeprefix(f"{layers.name}.")
    if inside == fqn:
        return fqn
    _, _, within = inside.partition(".")
    return _glob(within.partition(".")[0], layers)


def modules_in(program: TrainGraph) -> list[str]:
    """FQNs of all modules of a program that is not cut into stages, in the order in which they run; what only has
    parameters comes last.
    """
    assert not isinstance(program, PipelineGraph)
    body = program.parts["body"].graph.nodes
    nodes = [*body, *(node for part in program.parts.values() for node in part.graph.nodes)]
    places = dict.fromkeys(fqn_of(node) for node in nodes if node.op == "call_function")
    places |= dict.fromkeys(info.fqn.rpartition(".")[0] for info, _ in program.params())
    found = (".".join(place.split(".")[:end]) for place in places if place for end in range(1, place.count(".") + 2))
    return list(dict.fromkeys(found))


def times(place: str, layers: Layers, in_program: int) -> float:
    """How often a model has what a small model has once."""
    return 1.0 if place in layers.outside else layers.count / in_program


def _glob(child: str, layers: Layers) -> str:
    """Of a module of all layers ("" for the layers): as short as it is unambiguous."""
    if not child:
        return layers.module(numbered(range(layers.count)), "")
    rule = ModuleRule(f"*.{child}")
    inside = {m for m in layers.inside if rule.matches(layers.module(0, m))}
    short = inside == {child} and not any(map(rule.matches, layers.outside))
    return rule.glob if short else layers.module("*", child)


@dataclass(frozen=True)
class PlannedStage:
    """A stage to be: what it may run under, strategies without stages that differ in what saves memory and in rules for
    positions alone, and how many of its layers are under each, in this order.
    """

    strategies: tuple[Strategy, ...]
    counts: tuple[int, ...]

    @property
    def most(self) -> Strategy:
        """What most of its layers are under."""
        return self.strategies[self.counts.index(max(self.counts))]


def of_planned(stages: Sequence[PlannedStage], schedule: str, layers: Layers) -> Strategy:
    """The strategy that runs these stages: with a pp axis where they are placed alike but for rules, else stage by
    stage. What most layers do is that of the strategy, the others have rules.
    """
    ends = list(itertools.accumulate(sum(stage.counts) for stage in stages))
    numbers: list[dict[Strategy, list[int]]] = []
    for stage, end in zip(stages, ends, strict=True):
        edges = itertools.accumulate(stage.counts, initial=end - sum(stage.counts))
        runs = zip(stage.strategies, itertools.pairwise(edges), strict=True)
        numbers.append({one: list(range(a, b)) for one, (a, b) in runs if b > a})
    pipeline = Pipeline(schedule, 1, tuple(layers.module(end, "") for end in ends[:-1]))
    if len({(stage.strategies[0].axes, stage.strategies[0].chunks) for stage in stages}) > 1:
        parts = [_ruled(stage.most, mine, layers) for stage, mine in zip(stages, numbers, strict=True)]
        parts = [*(replace(part, chunks=1) for part in parts[:-1]), parts[-1]]
        return Strategy(((STAGES, len(parts)),), pipeline=pipeline, by_stage=tuple(parts))
    merged: dict[Strategy, list[int]] = defaultdict(list)
    for mine in numbers:
        for one, some in mine.items():
            merged[one] += some
    most = max(merged, key=lambda one: len(merged[one]))
    alike = _ruled(most, merged, layers)
    return alike if len(stages) == 1 else replace(with_stages(alike, len(stages)), pipeline=pipeline)


def _ruled(most: Strategy, numbers: Mapping[Strategy, Sequence[int]], layers: Layers) -> Strategy:
    """`most`, and rules for the layers that are under another strategy. Of two rules for one module neither would win,
    so those of modules in a layer name just the layers that have them.
    """
    rules: dict[ModuleRule, list[int]] = defaultdict(list)
    savings: dict[tuple[int | None, Remat | None, float | None], list[int]] = defaultdict(list)
    for one, mine in numbers.items():
        for rule in one.rules:
            rules[rule] += mine
        remat = None if one.remat == most.remat else one.remat or Remat("none")
        zero = None if one.zero == most.zero else one.zero
        offload = None if one.offload == most.offload else one.offload
        savings[zero, remat, offload] += mine
    savings.pop((None, None, None), None)
    every = sum(map(len, numbers.values()))
    named = [_of_layers(rule, mine, layers) if len(mine) < every else rule for rule, mine in rules.items()]
    for (zero, remat, offload), mine in savings.items():
        glob = layers.module(numbered(sorted(mine)), "")
        named.append(ModuleRule(glob, zero=zero, remat=remat, offload=offload))
    return replace(most, rules=tuple(named))


def _of_layers(rule: ModuleRule, numbers: Sequence[int], layers: Layers) -> ModuleRule:
    """The rule of a position in these layers alone; one for modules outside of layers as it is."""
    child = child_of(rule, layers)
    return rule if child is None else replace(rule, glob=layers.module(numbered(sorted(numbers)), child))


def child_of(rule: ModuleRule, layers: Layers) -> str | None:
    """The module of each layer that the rule of a position is for ("" the layer); None outside of layers."""
    return next((m for m in layers.inside if rule.matches(layers.module(0, m))), None)
