"""`fxpar dump`: the graph of a model at one stage, as text, JSON or DOT, or as a graph file."""

from __future__ import annotations

import time
from typing import Any

from fxpar.cli.commands import DumpRequest
from fxpar.cli.console import show_notes, stderr_console, stdout_console, working
from fxpar.cli.graph_dot import graph_dot
from fxpar.cli.graph_json import graph_document, schedule_document
from fxpar.cli.rank_view import RankView, as_rank
from fxpar.cli.request import check_graph_output, check_output, collected_warnings, to_json, write_output
from fxpar.cli.source import (
    check_one_team,
    check_stage,
    from_cache,
    on_cluster,
    placed_words,
    read_for_store,
    read_graph,
    read_origin,
    read_rows,
    storage_dtype,
    strategies_of,
)
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.cost.figures import StepTime, step_time
from fxpar.errors import (
    DumpOptionError,
    NoModuleError,
    NoScheduleError,
    StageNeedsStrategyError,
    nearest,
)
from fxpar.graph_files import SavedGraph, kind_of, save_graph
from fxpar.ir.columns import folded
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph, run_sizes
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.pass_names import SHARING
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph
from fxpar.ir.printer import AnyGraph, format_graph, matches, parts, without_folders
from fxpar.ir.sent import sent
from fxpar.ir.strategy import Strategy
from fxpar.schedule import Timeline, chart


def run_dump(request: DumpRequest) -> None:
    """Do it. Raises FxparError."""
    begun = time.process_time()
    if request.after == SHARING:
        from fxpar.cli.storage import dump_storage

        dump_storage(request)
        return
    strategies = strategies_of(request.source, request.strategy_texts)
    _check_words(request)
    (check_graph_output if request.form == "graph" else check_output)(request.target)
    strategy = strategies[0] if strategies else None
    notes: list[str] = []
    with working() as status, collected_warnings(notes):
        status.update(f"reading {request.source.model}")
        if request.level == "annotated" or request.after:
            check_one_team("this dump", strategies)
        if request.form == "graph":
            text, said = _saved(request, strategy)
        elif request.form == "text":
            asked = {**_asked(request), **({} if strategy is None else placed_words(request.source, strategy))}
            text, said = from_cache(
                request.source, asked, lambda: _written(request, strategy, begun), *strategies, answer=True
            )
        else:
            text, said = _written(request, strategy, begun)
    show_notes(without_folders(note) for note in notes if note not in said)  # those are in the dump
    if request.form == "graph":
        stderr_console().print(text, markup=False)
        return
    write_output(request.target, _folded(text) if request.form == "text" and request.target == "-" else text)


def _asked(request: DumpRequest) -> dict[str, object]:
    """What decides the text of a dump, beside the model and the strategy."""
    names = ("stage", "after", "fqn", "rank", "schedule", "micro_batches", "fold", "brief", "tflops")
    cluster = None if request.cluster is None else ClusterSpec.from_file(request.cluster)
    of_graph = {"precision": request.source.precision, "storage": request.source.storage}
    return {"kind": "dump", **of_graph, **{name: getattr(request, name) for name in names}, **on_cluster(cluster)}


def _saved(request: DumpRequest, strategy: Strategy | None) -> tuple[str, list[str]]:
    """Save the graph; what was done, and the notes in it."""
    graph = _graph(request, strategy)
    _check_stage(request, graph)
    whole = request.after is None or strategy is None or strategy.pipeline_size == 1  # batches are those of all stages
    save_graph(request.target, graph, read_origin(request.source, graph) if whole else None)
    return f"wrote the {kind_of(graph)} graph of {graph.name} to {request.target}", _notes(graph)


def _notes(graph: SavedGraph) -> list[str]:
    """Those that the dump of a graph has."""
    return [] if isinstance(graph, LogicalGraph) else list(graph.notes)


def _written(request: DumpRequest, strategy: Strategy | None, begun: float) -> tuple[str, list[str]]:
    """What goes into the file, or to stdout, and the notes in it."""
    read = _graph(request, strategy)
    _check_stage(request, read)
    graph: AnyGraph = read
    if isinstance(graph, TeamsGraph) and (request.form == "dot" or request.rank is not None or request.schedule):
        check_one_team("this dump", [graph.strategy])
    view = None
    if request.rank is not None:
        graph, view = as_rank(_program(graph), request.rank)
        if view.stages and request.pipeline_stage not in (None, *view.stages):
            runs = ", ".join(map(str, view.stages))
            raise DumpOptionError(
                f"--rank {request.rank}", f"is of stage {runs}", "Leave out --stage, or name that one"
            )
    return _text(request, graph, view, begun), _notes(read)


def _folded(text: str) -> str:
    """Lines no longer than a terminal is wide; as they are where there is none."""
    console = stdout_console()
    if not console.is_terminal:
        return text
    lines = []
    for line in text.splitlines():
        pad = " " * (len(line) - len(line.lstrip()))
        lines += [line] if len(line) <= console.width else folded(line.lstrip(), console.width, pad, f"{pad}    ")
    return "\n".join([*lines, ""])


def _graph(request: DumpRequest, strategy: Strategy | None) -> SavedGraph:
    if request.schedule and strategy is not None and not request.source.is_file:
        return read_for_store(request.source, strategy)  # what a run has, as in `fxpar viz`
    if request.after is None:
        return read_graph(request.source, request.level, strategy)
    if strategy is None:
        raise StageNeedsStrategyError(request.after)
    from fxpar.cli.after_pass import graph_after

    stage = request.pipeline_stage
    if stage is not None:
        check_stage(strategy, stage)
    return graph_after(read_rows(request.source), strategy, request.after, stage or 0, storage_dtype(request.source))


def _text(request: DumpRequest, graph: AnyGraph, view: RankView | None, begun: float) -> str:
    """The graph in the form that was asked for."""
    if request.fqn is not None:
        _check_glob(graph, request.fqn)
    timeline = planned(request, graph) if request.schedule and isinstance(graph, PipelineGraph) else None
    stage = request.pipeline_stage
    if request.form == "dot":
        return graph_dot(graph, stage=stage, fqn=request.fqn)
    if request.form == "json":
        if timeline is not None and isinstance(graph, PipelineGraph):
            document: dict[str, Any] = schedule_document(graph, timeline)
        else:
            document = graph_document(graph, request.level or _level(graph), stage, request.fqn)
        document |= {"as_rank": view.to_json()} if view else {}
        document |= {"time": found[0].to_json()} if (found := predicted_time(request, graph)) else {}
        document.setdefault("timings", {})["total_cpu_s"] = time.process_time() - begun
        return to_json(document)
    if timeline is not None and isinstance(graph, PipelineGraph):
        return schedule_text(request, graph, timeline)
    timed = predicted_time(request, graph)
    head = (f"time of a rank, predicted for {timed[1]}:", f"  {timed[0].line()}") if timed else ()
    shown = _stages(stage, view)
    text = format_graph(graph, fold=request.fold, nodes=not request.brief, stage=shown, fqn=request.fqn, head=head)
    return "\n".join([*view.lines(), "", text]) if view else text


def predicted_time(request: DumpRequest, graph: AnyGraph) -> tuple[StepTime, str] | None:
    """What a lowered graph takes on the cluster of the request, and its devices in words; None without token ids.

    Raises ClusterError.
    """
    if not isinstance(graph, Program) or not sent(graph).tokens:
        return None
    cluster, words = devices_of(request, graph.strategy.world)
    return step_time(graph, cluster, run_sizes(graph)), words


def devices_of(request: DumpRequest, world: int) -> tuple[ClusterSpec, str]:
    """The cluster that times are predicted for, by default usual GPUs, eight to a node; and its devices in words."""
    given = usual_cluster(world) if request.cluster is None else ClusterSpec.from_file(request.cluster)
    cluster = given.sustaining(request.tflops)
    known = request.tflops is not None or (request.cluster is not None and given.device is not None)
    return cluster, f"{'devices' if known else 'usual GPUs'} ({cluster.sustained})"


def _stages(stage: int | None, view: RankView | None) -> int | None:
    """The stage to print: the one that was asked for, or the only one of the rank."""
    return view.stages[0] if stage is None and view and len(view.stages) == 1 else stage


def _level(graph: AnyGraph) -> str:
    if isinstance(graph, Program):
        return "exec"
    return "logical" if isinstance(graph, LogicalGraph) else "annotated"


def planned(request: DumpRequest, graph: PipelineGraph) -> Timeline:
    """The schedule run on paper, by default with the micro-batches of `fxpar memory`; parts of stages and messages take
    what `fxpar viz` predicts of them. Raises MicroBatchCountError, ClusterError.
    """
    from fxpar.cost.polynomial import sequences_of
    from fxpar.memory import schedule_of, steady_micro_batches
    from fxpar.viz.inside import Inside

    cluster, _ = devices_of(request, graph.strategy.world)
    cluster.require(graph.strategy.world)
    plan = schedule_of(graph, request.micro_batches or steady_micro_batches(graph.strategy))
    return Inside(graph, cluster).timeline(plan, sequences_of(graph, run_sizes(graph)).lengths)


def schedule_text(request: DumpRequest, graph: PipelineGraph, timeline: Timeline) -> str:
    """The chart under a line that says what its times are for."""
    _, devices = devices_of(request, graph.strategy.world)
    return f"{graph.name} under {graph.strategy}; predicted for {devices}\n{chart(timeline)}\n"


def _check_words(request: DumpRequest) -> None:
    """Options that do not go together. Raises DumpOptionError."""
    if request.form == "graph" and request.target == "-":
        raise DumpOptionError("--format graph", "writes a file", "Add -o FILE.fxpar")
    if request.form == "graph" and (request.rank is not None or request.fqn is not None or request.schedule):
        raise DumpOptionError("-o FILE.fxpar", "saves the whole graph", "Leave out --rank, --fqn and --schedule")
    if request.form == "graph" and request.pipeline_stage is not None and request.after is None:
        raise DumpOptionError("-o FILE.fxpar", "saves all stages of a pipeline", "Leave out --stage N")
    if request.schedule and (request.form == "dot" or request.fqn is not None):
        raise DumpOptionError("--schedule", "prints no nodes", "Leave out --format dot and --fqn")


def _check_stage(request: DumpRequest, graph: AnyGraph) -> None:
    """Raises StageIndexError, NoScheduleError."""
    if isinstance(graph, LogicalGraph) or request.after is not None:
        if request.schedule:
            raise NoScheduleError("no strategy")
        return
    strategy: Strategy = graph.strategy
    if request.schedule and strategy.pipeline_size == 1:
        raise NoScheduleError(str(strategy))
    if request.pipeline_stage is not None:
        check_stage(strategy, request.pipeline_stage)


def _program(graph: AnyGraph) -> Program:
    if not isinstance(graph, Program):
        raise DumpOptionError("--rank", "is for a lowered graph", "Name a --strategy, without --stage and --after")
    return graph


def _check_glob(graph: AnyGraph, glob: str) -> None:
    """Raises NoModuleError for a glob that no module and no parameter matches."""
    shown = graph.stages if isinstance(graph, PipelineGraph) else (graph,)
    names = {fqn_of(n) for each in shown for part in parts(each) for n in part.graph.nodes}
    names |= {info.fqn for info in graph.inputs if info.kind == "param"}
    if not any(matches(name, glob) for name in names):
        prefixes = {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}
        raise NoModuleError(glob, nearest(glob, prefixes - {""}))
