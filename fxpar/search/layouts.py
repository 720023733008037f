"""Guesses at how the parameters of a deep model lie, from shallow ones that were lowered: nothing is placed for them.

A layer that repeats lies as the one that stands for it. Under a pipeline a parameter lies on the ranks of its stage as
it does on all ranks without stages: stages have equal numbers of layers, the first what comes before them, the last
the rest, and a tied weight lies on both. Sets that are settled are priced with their own layouts. Where layers are told
apart, each lies as the one of its kind and stage that was lowered, which is no guess.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.fqn import block_of
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.ir.strategy import Strategy
from fxpar.search.kinds import MixedCandidate
from fxpar.search.price import Candidate, Priced
from fxpar.search.staged import StagedGuess
from fxpar.switch.layout import ParamLayout, PlacedParam, layout_of


def guessed_layout(one: Priced, layers: int) -> ParamLayout | None:
    """Of a model with so many layers, under the strategy of `one`; None where it was not priced from shallow models,
    or they have as many layers.
    """
    if isinstance(one, MixedCandidate) and one.stands:
        return _told_apart(one)
    flat = one.flat or one if isinstance(one, Candidate | StagedGuess) else None
    flat = flat if isinstance(flat, Candidate) else None
    blocks = None if flat is None else list_of_layers(flat)
    if flat is None or blocks is None or layers < flat.samples[1]:
        return _of_equal_stages(one, layers) if isinstance(one, Candidate) else None
    deep = _deepened(layout_of(flat.programs[1]), blocks, flat.samples, layers)
    tied = {info.fqn for info in flat.programs[0].inputs if info.aliases}
    cut = deep if one is flat else _cut(deep, one.strategy, layers, tied)
    return ParamLayout(one.name, one.strategy.world, {fqn: param for fqn, (param, _) in cut.items()})


def list_of_layers(flat: Candidate) -> str | None:
    """The name of the list that all layers are in (`model.layers`); None if there is no such list, or if `flat` was not
    priced from two shallow models without stages.
    """
    return None if flat.strategy.pipeline_size > 1 else _grown_list(flat)


def _grown_list(one: Candidate) -> str | None:
    if len(one.programs) == 1:
        return None
    few, more = ({info.fqn for info, _ in program.params()} for program in one.programs)
    lists = {list_of(fqn) for fqn in more - few}
    return lists.pop() or None if len(lists) == 1 else None


def _told_apart(one: MixedCandidate) -> ParamLayout:
    shallow, blocks = layout_of(one.programs[0]), one.kinds.layers
    return ParamLayout(one.name, one.strategy.world, _standing_for(shallow, blocks, one.stands))


def _of_equal_stages(one: Candidate, layers: int) -> ParamLayout | None:
    """Of a pipeline that was lowered itself, from its shallow version: any layer of a stage lies as its first one."""
    blocks, few = _grown_list(one), one.programs[0]
    if blocks is None or not isinstance(few, PipelineGraph) or layers <= one.samples[-1] or one.strategy.by_stage:
        return None
    begins = [min(_numbers(stage, blocks), default=None) for stage in few.stages]
    stands = [begins[layer * len(begins) // layers] for layer in range(layers)]
    if None in stands:
        return None
    return ParamLayout(one.name, one.strategy.world, _standing_for(layout_of(few), blocks, stands))


def _numbers(stage: StageProgram, blocks: str) -> set[int]:
    """Of the layers that a stage has."""
    mine = {block_of(info.fqn) for info, _ in stage.params() if list_of(info.fqn) == blocks}
    return {int(block.rpartition(".")[2]) for block in mine}


def _standing_for(shallow: ParamLayout, blocks: str, stands: Sequence[int | None]) -> dict[str, PlacedParam]:
    """A layer of the deep model lies as that of the shallow one which stands for it."""
    inside: dict[int, list[str]] = {}
    found: dict[str, PlacedParam] = {}
    for fqn, param in shallow.params.items():
        if list_of(fqn) == blocks:
            inside.setdefault(int(block_of(fqn).rpartition(".")[2]), []).append(fqn)
        elif not inside:
            found[fqn] = param
    for layer, stand in enumerate(stands):
        for fqn in inside[stand or 0]:
            found[f"{blocks}.{layer}{fqn.removeprefix(f'{blocks}.{stand}')}"] = shallow.params[fqn]
    return found | {fqn: param for fqn, param in shallow.params.items() if list_of(fqn) != blocks and fqn not in found}


Deep = dict[str, tuple[PlacedParam, int]]  # by name: where it lies, its layer (-1: before all, `layers`: behind)


def list_of(fqn: str) -> str:
    """`model.layers` of `model.layers.3.mlp`."""
    return block_of(fqn).rpartition(".")[0]


def _deepened(more: ParamLayout, blocks: str, samples: tuple[int, ...], layers: int) -> Deep:
    few, step = samples[0], samples[1] - samples[0]
    kept: dict[int, list[str]] = {}
    found: Deep = {}
    for fqn, param in more.params.items():
        if list_of(fqn) == blocks:
            kept.setdefault(int(block_of(fqn).rpartition(".")[2]), []).append(fqn)
        else:
            found[fqn] = (param, layers if kept else -1)
    deep: Deep = {fqn: one for fqn, one in found.items() if one[1] < 0}
    for layer in range(layers):
        stands = layer if layer < few else few + (layer - few) % step
        for fqn in kept[stands]:
            name = f"{blocks}.{layer}{fqn.removeprefix(f'{blocks}.{stands}')}"
            deep[name] = (more.params[fqn], layer)
    return deep | found


def _cut(deep: Deep, strategy: Strategy, layers: int, tied: Collection[str]) -> Deep:
    last = strategy.stages - 1
    meshes = [strategy.of_stage(stage).mesh for stage in range(strategy.stages)]
    made: dict[tuple[int, tuple[int, ...]], PlacedParam] = {}  # many tensors share one description
    found: Deep = {}
    for fqn, (param, layer) in deep.items():
        stages = (0, last) if fqn in tied else (min(max(layer, 0) * strategy.stages // layers, last),)
        if (id(param), stages) not in made:
            copies = tuple(_on(meshes[stage], dist) for stage in stages for dist in param.copies)
            made[id(param), stages] = replace(param, copies=copies)
        found[fqn] = (made[id(param), stages], layer)
    return found


def _on(mesh: Mesh, dist: DistConfig) -> DistConfig:
    """The same cuts on the ranks of a stage; an axis that a stage does not have cuts nothing."""

    def there(cut: AxisShard) -> AxisShard | None:
        axes = [name for name in cut.axis.split(".") if name in mesh.names or mesh.part(name).axis in mesh.names]
        return replace(cut, axis=".".join(mesh.in_order(axes))) if axes else None

    dims = tuple(tuple(cut for one in dim if (cut := there(one)) is not None) for dim in dist.dims)
    return replace(dist, mesh=mesh, dims=dims)
