"""`lower_pipeline`: a logical graph cut into stages, each lowered for its own ranks."""

from __future__ import annotations

import fnmatch
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from fxpar.annotate.module_rules import check_rules
from fxpar.annotate.policy import resolve_overrides
from fxpar.errors import NotYetError, RematGlobError
from fxpar.flow import padding_hazard
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import DOCUMENTS, POSITIONS, AnnotatedGraph, LogicalGraph
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.ir.strategy import Strategy
from fxpar.lowering.ladder import OnPass, common_fields, run_passes
from fxpar.stages import StagedGraph, StageGraph, cut_stages, split_parts


def lower_pipeline(
    logical: LogicalGraph,
    strategy: Strategy,
    ladder: list[GraphPass],
    on_pass: OnPass | None = None,
    verified: bool = True,
) -> PipelineGraph:
    """Cut `logical` as the strategy says and run the passes on every stage, without the pp axis.

    A value that goes from one stage to the next has its tokens cut on each as that one's strategy cuts them: over cp,
    and over tp under sequence parallelism, else it is whole. `on_pass` is called for each stage in turn.

    Raises the errors of `cut_stages`, NotYetError, OverrideError, RuleGlobError, RuleConflictError, RematGlobError and
    RematBudgetError.
    """
    staged = cut(logical, strategy)
    started = time.process_time()
    stages = tuple(_lower_stage(stage, strategy, ladder, on_pass, verified) for stage in staged.stages)
    program = of_stages(logical, strategy, staged, stages)
    program.timings["lower_cpu_s"] = time.process_time() - started - program.timings.get("annotate_cpu_s", 0.0)
    return program


def of_stages(
    logical: LogicalGraph, strategy: Strategy, staged: StagedGraph, stages: tuple[StageProgram, ...]
) -> PipelineGraph:
    """The pipeline of stages that were lowered."""
    whole = fields_of_blocks(logical, strategy, stages)
    timings = {**staged.timings, **_sums(stages), "lower_cpu_s": 0.0}
    return PipelineGraph(
        **whole, stages=stages, timings=timings, cuts=staged.cuts, flops=staged.flops, terms=_terms(staged)
    )


def fields_of_blocks(logical: LogicalGraph, strategy: Strategy, blocks: Sequence[Program]) -> dict[str, Any]:
    """The fields of a program of stages or teams. Each of these says how its own inputs and outputs lie."""
    return {
        "strategy": strategy,
        "inputs": logical.inputs,
        "outputs": logical.outputs,
        "stored_inputs": (),
        "stored_outputs": (),
        "dims": logical.dims,
        "divisors": {name: math.lcm(*(b.divisors.get(name, 1) for b in blocks)) for b in blocks for name in b.divisors},
        "name": logical.name,
        "constants": logical.constants,
        "padding_hazard": padding_hazard(logical),
        "notes": tuple(dict.fromkeys(note for block in blocks for note in block.notes)),
    }


def cut(logical: LogicalGraph, strategy: Strategy) -> StagedGraph:
    """The stages of `logical` under the strategy. Raises as `lower_pipeline` does, but RematBudgetError."""
    resolve_overrides(logical, strategy)  # a glob may match on one stage only, but must match somewhere
    _check_remat(logical, strategy)
    staged = cut_stages(logical, strategy.stages, cuts=strategy.pipeline.cuts or None)
    _check_apart(staged, strategy)
    if strategy.ring > 1 and logical.packing is not None:
        staged.stages = tuple(map(_told_positions, staged.stages))
    for stage, own in zip(staged.stages, strategy.by_stage, strict=False):  # what is said of a stage, holds on it
        check_rules(stage, own, f"stage {stage.index}")
        _check_remat(stage, own)
    return staged


def _check_apart(staged: StagedGraph, strategy: Strategy) -> None:
    """A rank has one layout of each parameter. Raises NotYetError."""
    if not strategy.places:
        return
    read = [{info.fqn for info in stage.params()} for stage in staged.stages]
    for one, other in combinations(range(len(read)), 2):
        both = sorted(read[one] & read[other])
        if both and set(strategy.places[one]) & set(strategy.places[other]):
            what = f"{both[0]!r} on stages {one} and {other} of '{strategy}', which share ranks,"
            raise NotYetError(what, "Cut so that one of them reads it, or give them ranks of their own.")


def _told_positions(stage: StageGraph) -> StageGraph:
    """A stage that reads the documents of a packed row is given the positions too: a ring needs both."""
    given = {info.fqn: i for i, info in enumerate(stage.inputs) if info.kind == "batch"}
    if DOCUMENTS not in given or POSITIONS in given:
        return stage
    at = given[DOCUMENTS]
    documents, info = stage.placeholders[at], stage.inputs[at]
    with stage.gm.graph.inserting_after(documents):
        positions = stage.gm.graph.placeholder(POSITIONS)
    positions.meta.update(documents.meta)
    return replace(stage, inputs=(*stage.inputs[: at + 1], replace(info, fqn=POSITIONS), *stage.inputs[at + 1 :]))


def _lower_stage(
    stage: StageGraph, strategy: Strategy, ladder: list[GraphPass], on_pass: OnPass | None, verified: bool
) -> StageProgram:
    graph, report = run_passes(stage, strategy_of_stage(stage, strategy), ladder, on_pass, verified=verified)
    return stage_program(graph, stage.index, report)


def stage_program(graph: AnnotatedGraph, index: int, report: tuple[dict[str, Any], ...] = ()) -> StageProgram:
    """What the ranks of a stage run, from its graph behind all passes."""
    return StageProgram(**common_fields(graph), passes=report, index=index, **vars(split_parts(graph)))


def strategy_of_stage(stage: StageGraph, strategy: Strategy) -> Strategy:
    """What a stage runs under; of globs only those that match something of it."""
    mine = strategy.of_stage(stage.index)
    names = [name for info in stage.params() for name in (info.fqn, *info.aliases)]
    overrides = tuple((glob, where) for glob, where in mine.overrides if fnmatch.filter(names, glob))
    remat = mine.remat
    if remat is not None and remat.mode == "modules":
        globs = tuple(glob for glob in remat.globs if fnmatch.filter(_modules(stage), glob))
        remat = replace(remat, globs=globs) if globs else None
    return replace(mine, overrides=overrides, remat=remat)


def _check_remat(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raises RematGlobError."""
    if strategy.remat is not None and strategy.remat.mode == "modules":
        known = _modules(logical)
        for glob in strategy.remat.globs:
            if not fnmatch.filter(known, glob):
                raise RematGlobError(glob, known)


def _modules(logical: LogicalGraph) -> list[str]:
    """FQNs of all modules whose forward computes something."""
    found = set()
    for node in logical.gm.graph.nodes:
        parts = fqn_of(node).split(".")
        if node.op == "call_function" and not is_backward(node):
            found |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return sorted(found - {""})


def _sums(stages: tuple[StageProgram, ...]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for stage in stages:
        total.update({name: value for name, value in stage.timings.items() if name.startswith("annotate")})
    return dict(total)


def _terms(staged: StagedGraph) -> dict[str, tuple[int, ...]]:
    return {shared.fqn: shared.terms for shared in staged.shared}


__all__ = ["cut", "fields_of_blocks", "lower_pipeline", "of_stages", "stage_program", "strategy_of_stage"]
