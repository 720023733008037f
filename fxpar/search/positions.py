"""Positions: where a strategy may have rules. The modules of a layer, those outside of layers, and runs of layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from fxpar.cost.calls import NOMINAL_TOKENS, node_costs
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import ATTENTION
from fxpar.search.kinds import Layers, numbered
from fxpar.search.price import Candidate


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
        seconds[place] += float(cost.seconds.at(NOMINAL_TOKENS)) * times(place, layers, in_program)
    for info, _ in program.params():
        place = position_of(info.fqn.rpartition(".")[0], layers)
        elements[place] += info.meta.numel({}) * times(place, layers, in_program)
        if len(info.meta.shape) > 1:
            matrices.add(place)
    shares = [{place: one / sum(found.values()) for place, one in found.items()} for found in (seconds, elements)]
    return [place for place in seconds if place in matrices and max(s.get(place, 0.0) for s in shares) >= least]


def globs_of_attention(flat: Candidate, layers: Layers) -> set[str]:
    """Globs of the positions that have an attention of documents. `flat` has no stages."""
    nodes = (node for part in flat.programs[-1].parts.values() for node in part.graph.nodes)
    return {position_of(fqn_of(node), layers) for node in nodes if node.target in ATTENTION}


def position_of(fqn: str, layers: Layers) -> str:
    """The glob of the position that a module is in: the module of a layer, or itself."""
    inside = fqn.removeprefix(f"{layers.name}.")
    if inside == fqn:
        return fqn
    _, _, within = inside.partition(".")
    return _glob(within.partition(".")[0], layers)


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


def with_run(less: Strategy, more: Strategy, layers: Layers, count: int) -> Strategy:
    """The first `count` layers of each stage recompute as `more` does, the others as `less`. What most of them do is
    that of the strategy, the others have a rule.
    """
    each = layers.count // less.stages
    most = 2 * count > each
    begin, end = (count, each) if most else (0, count)
    numbers = [each * stage + i for stage in range(less.stages) for i in range(begin, end)]
    remat = (less if most else more).remat or Remat("none")
    rule = ModuleRule(layers.module(numbered(numbers), ""), remat=remat)
    return replace(more if most else less, rules=(rule,))
