"""Whether a group's weights may come, and its gradients leave, one by one while it runs, and how it goes meanwhile."""

from __future__ import annotations

from collections import Counter

from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, TeamsGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.schedule import schedule
from fxpar.schedule.mini_batch import Pace, pace_of


def flowing_pace(program: TrainGraph) -> Pace | None:
    """How a group goes that begins before all of its weights are there, and all of whose gradients leave before it
    ends; None if one of them is only final behind the epilogue. For graphs that run eagerly: what is compiled whole
    cannot wait in the middle.
    """
    if isinstance(program, TeamsGraph):  # each goes at a pace of its own
        return None
    parts = (program,) if isinstance(program, ExecGraph) else program.stages
    grads = [[out.fqn for out in one.outputs if out.kind == "grad"] for one in parts]
    final = all(len(final_gradients(one)) == len(mine) for one, mine in zip(parts, grads, strict=True))
    if isinstance(program, PipelineGraph):
        # What two stages of a rank make is added up when the group ends.
        made = Counter((fqn, one.mesh) for one, mine in zip(program.stages, grads, strict=True) for fqn in mine)
        final = final and max(made.values(), default=0) <= 1
    return strategy_pace(program.strategy) if final else None


def strategy_pace(strategy: Strategy) -> Pace:
    """Of a group without stages, or with equal ones; about the same for any number of micro-batches."""
    ranks, pipeline = strategy.pipeline_size, strategy.pipeline
    if ranks == 1:
        return Pace()
    return pace_of(schedule(pipeline.schedule, ranks, ranks, virtual=pipeline.virtual, places=strategy.places))


def final_gradients(program: ExecGraph | StageProgram) -> dict[int, str]:
    """Gradients that the epilogue hands on as a micro-batch has made them: FQN by place among the results of the body
    (of a stage: of its backward), in the order in which it makes them.
    """
    made_by, part = ("body", program.body) if isinstance(program, ExecGraph) else ("backward", program.backward)
    sources = dict(zip(program.epilogue.graph.find_nodes(op="placeholder"), program.epilogue.sources, strict=True))
    outputs = [out for out in program.outputs if out.kind in ("loss", "grad", "buffer")]
    handed = [
        (sources[node][1], out.fqn)
        for out, node in zip(outputs, program.epilogue.results, strict=True)
        if out.kind == "grad" and node in sources and sources[node][0] == made_by
    ]
    order = {node: number for number, node in enumerate(part.graph.nodes)}
    return dict(sorted(handed, key=lambda one: order[part.results[one[0]]]))
