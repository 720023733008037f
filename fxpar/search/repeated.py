"""Pipelines of many stages from one of three: what lies between the first and the last stage repeats.

A deep pipeline is not captured and lowered as deep as it is. One of three stages is, with as many layers in each, and
its middle stage stands for all between: they have its graphs, with names of their own, on other ranks. Times, memory
and layouts are those of the pipeline lowered whole (`tests/search/test_repeated.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxpar.errors import StageCountError
from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import Stored
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.ir.strategy import Strategy

FEW = 3  # stages that are lowered


def of_few_stages(strategy: Strategy, layers: str, each: int, stages: int = FEW) -> Strategy:
    """The same with so many stages, each with `each` layers of the list `layers` (`model.layers`)."""
    axes = tuple((name, stages if name == STAGES else degree) for name, degree in strategy.axes)
    cuts = tuple(f"{layers}.{each * stage}" for stage in range(1, stages))
    return replace(strategy, axes=axes, pipeline=replace(strategy.pipeline, cuts=cuts))


def repeated(program: PipelineGraph, strategy: Strategy, layers: str, each: int) -> PipelineGraph:
    """`program`, lowered for `of_few_stages(strategy, layers, each)`, with as many stages as `strategy` has.

    Raises StageCountError if a parameter lies on the middle stage that is in none of its layers.
    """
    number = re.compile(rf"(?<={re.escape(layers)}\.)\d+(?=\.|$)")
    more = strategy.stages - FEW

    def moved(fqn: str, stages: int) -> str:
        return number.sub(lambda found: str(int(found[0]) + stages * each), fqn)

    first, middle, last = program.stages
    shared = [info.fqn for info, _ in middle.params() if not number.search(info.fqn)]
    if shared:
        raise StageCountError(program.name, f"{strategy.stages} stages share {shared[0]}", "Use fewer stages for it")
    stages = [_placed(first, strategy, 0, {})]
    for index in range(1, strategy.stages - 1):
        names = {name: moved(name, index - 1) for name in _names(middle)}
        stages.append(_placed(middle, strategy, index, names))
    names = {name: moved(name, more) for name in _names(last)}
    stages.append(_placed(last, strategy, strategy.stages - 1, names))
    return replace(
        program,
        strategy=strategy,
        inputs=_whole(program.inputs, [stage.inputs for stage in stages]),
        outputs=_whole(program.outputs, [stage.outputs for stage in stages]),
        stages=tuple(stages),
        cuts=tuple(f"{layers}.{each * stage}" for stage in range(1, strategy.stages)),
        flops=(program.flops[0], *(program.flops[1],) * (more + 1), program.flops[2]),
        terms={fqn: tuple(one + more if one == FEW - 1 else one for one in on) for fqn, on in program.terms.items()},
    )


def _names(stage: StageProgram) -> set[str]:
    """Of parameters and buffers, which are inputs and outputs; what goes from stage to stage keeps its name."""
    kinds = ("param", "grad", "buffer")
    return {one.fqn for one in (*stage.inputs, *stage.outputs) if one.kind in kinds}


def _placed(stage: StageProgram, strategy: Strategy, index: int, names: Mapping[str, str]) -> StageProgram:
    mine = strategy.of_stage(index)
    meshes: dict[Mesh, Mesh] = {stage.mesh: mine.mesh}

    def there(stored: Stored) -> Stored:
        return replace(stored, dist=replace(stored.dist, mesh=meshes[stored.dist.mesh]))

    def named(one: Any) -> Any:
        known = one.kind in ("param", "grad", "buffer")
        return replace(one, fqn=names.get(one.fqn, one.fqn)) if known else one

    return replace(
        stage,
        strategy=mine,
        index=index,
        inputs=tuple(map(named, stage.inputs)),
        outputs=tuple(map(named, stage.outputs)),
        stored_inputs=tuple(map(there, stage.stored_inputs)),
        stored_outputs=tuple(map(there, stage.stored_outputs)),
    )


def _whole(few: tuple[Any, ...], stages: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Inputs or outputs of the whole model: those of no stage alone as they are, parameters from stage to stage."""
    repeats = ("param", "grad", "buffer")
    others = [one for one in few if one.kind not in repeats]
    own = {(one.kind, one.fqn): one for stage in stages for one in stage if one.kind in repeats}
    return (*own.values(), *others)
