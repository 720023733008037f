"""`report.html` and `trace.json` of a run: what was measured, beside what was predicted.

The parts that need the engine are read off it before a comparison replaces it (`ReportParts.of`); the files are written
at the very end.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpar import __version__
from fxpar.batching.borders import schedule_of
from fxpar.errors import FxparError, OutputError
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph
from fxpar.memory.state import bytes_at_home
from fxpar.runtime.session import Session, SessionTask
from fxpar.runtime.spans import GroupRun
from fxpar.schedule.mini_batch import GroupAction
from fxpar.train.metrics import METRICS
from fxpar.train.session import TrainSession
from fxpar.train.traces import StepSpans, gathered
from fxpar.viz.chrome_trace import chrome_trace
from fxpar.viz.document import view_document
from fxpar.viz.inside import Inside
from fxpar.viz.page import page_html
from fxpar.viz.run import run_section
from fxpar.viz.step import Planned, StepGroup, measured_step, predict_step
from fxpar.viz.timeline import ShownStep, adam_ms, timeline_section
from fxpar.viz.viewed import Viewed

REPORT, TRACE = "report.html", "trace.json"
MOST_NODES = (
    20_000  # of all strategies together; larger graphs take longer than half a minute, and are left to `fxpar viz`
)
ABOUT = (
    "The head, and the graph, mesh and memory tabs, are predictions: a micro-batch is as large as the token budget of "
    "its strategy. What ran is in the run and timeline tabs."
)
OF_TASKS = (
    "Strategies stand behind the name of their task. The memory tab is that of a task alone, with the masters of its "
    "parameters cut over its ranks. There is no mesh tab, as tasks have parameters of their own."
)
Section = Callable[[Sequence[Viewed]], "dict[str, Any] | None"]


@dataclass(frozen=True)
class ReportParts:
    """What the report needs of a run beside its metrics; plain data."""

    views: tuple[Viewed, ...]
    insides: Mapping[str, Inside]
    steps: tuple[ShownStep, ...]
    environment: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    is_of_tasks: bool = False  # which have parameters of their own


def collect(session: TrainSession) -> ReportParts | None:
    """The parts on rank 0, None on the others; all ranks call it."""
    traces = session.training.traces
    steps = [] if traces is None else gathered(traces)
    if not steps:
        return None
    fxpar: Session = session.model.fxpar_session
    insides = {name: Inside(program, fxpar.engine.cluster) for name, program in fxpar.programs.items()}
    last = steps[0][0].groups
    shown = {
        name: (one, program)
        for one in fxpar.tasks.values()
        for name, program in one.compiled.programs.items()
        if not isinstance(program, TeamsGraph)
    }
    side_by_side = [name for name in fxpar.programs if name not in shown]
    notes = [f"{' and '.join(side_by_side)}: in the run and timeline tabs alone"] if side_by_side else []
    return ReportParts(
        views=tuple(_view(one, name, program, last) for name, (one, program) in shown.items()),
        notes=[*notes, *([OF_TASKS] if session.config.tasks else [])],
        insides=insides,
        steps=tuple(_shown(fxpar, insides, ranks, i) for i, ranks in enumerate(steps)),
        environment=_environment(session, fxpar),
        is_of_tasks=bool(session.config.tasks),
    )


def _view(task: SessionTask, name: str, program: TrainGraph, last: Sequence[GroupRun]) -> Viewed:
    """A strategy with micro-batches as large as its token budget, and as many as it ran last."""
    engine = task.engine
    budget = max(g.token_budget for g, other in zip(engine.groups, engine.names, strict=True) if other == name)
    runs = max((len(r) for g in last if g.strategy == name for r in g.micro_batches), default=None)
    sizes = {"T": budget} if any(dim.name == "T" for dim in program.dims) else {}
    return Viewed(name, program, task.compiled.logical, program, engine.cluster, sizes, runs)


def _shown(fxpar: Session, insides: Mapping[str, Inside], ranks: Sequence[StepSpans], position: int) -> ShownStep:
    """A step as it was predicted for the very micro-batches that ran, and as each rank recorded it."""
    engine, store, waves = fxpar.engine, fxpar.store, ranks[0].waves
    planned: list[Planned] = []
    visited: list[str] = []
    names, switching = [run.strategy for run in ranks[0].groups], engine.switching
    order = None if waves else schedule_of(names, switching.resident, engine.options.overlap, engine.gradients)
    for number, run in enumerate(ranks[0].groups):
        name, leaves = run.strategy, order is None or GroupAction("reduce", number) in order.actions
        filled = switching.is_filled(name, visited)
        switch, reduction = switching.schedule.plan(name, visited), engine.gradients.plan(name)
        group = StepGroup(
            f"≤ {run.limit:,}",
            name,
            run.micro_batches,
            0 if filled else switch.intra_node_bytes + switch.inter_node_bytes,
            reduction.intra_node_bytes + reduction.inter_node_bytes if leaves else 0,
        )
        switch_ms = 1e3 * switching.predicted_s(name, visited)
        planned.append(Planned(group, insides[name], switch_ms, 1e3 * reduction.predicted_s))
        visited.append(name)
    programs = [insides[one.group.strategy].program for one in planned]
    optimizer_ms = adam_ms(bytes_at_home(store.home, store.trained), engine.cluster)
    if waves:
        predicted = predict_step(planned, len(ranks), optimizer_ms, waves=waves)
    else:
        flowing = {name: pace for one in fxpar.tasks.values() for name, pace in one.engine.flowing().items()}
        predicted = predict_step(planned, len(ranks), optimizer_ms, order, flowing)
    measured = measured_step(predicted.groups, [one.spans for one in ranks], programs)
    return ShownStep(f"Step {ranks[0].step}, the {('last', 'slowest')[position]} one", predicted, measured)


def _environment(session: TrainSession, fxpar: Session) -> tuple[str, ...]:
    config, device = session.config, fxpar.engine.device
    threads = "1 thread" if config.run.threads == 1 else f"{config.run.threads} threads"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} each"
    return (
        f"{config.model.name}, {session.size()}",
        f"{config.world} ranks on {kind}",
        f"torch {torch.__version__}, Python {platform.python_version()}",
    )


def write_report(folder: Path, name: str, parts: ReportParts, comparison: Mapping[str, Any] | None = None) -> Path:
    """Write both files; gives the path of the page. Raises OutputError, VizDependencyError (without plotly)."""
    timelines = {
        f"{one.source}, {step.title.lower()}": one
        for step in parts.steps
        for one in (step.measured, step.predicted)
        if one is not None
    }
    _write(folder / TRACE, json.dumps(chrome_trace(timelines, parts.insides)))
    steps = read_metrics(folder)
    sections: dict[str, dict[str, Any] | None] = {
        "run": run_section(steps, comparison=comparison, environment=parts.environment),
        "timeline": timeline_section(parts.views, parts.steps, parts.insides),
        **_model_sections(parts),
    }
    made_with = f"fxpar {__version__}"
    document = view_document(f"run {name}", parts.views, sections, made_with=made_with, notes=[*parts.notes, ABOUT])
    _write(folder / REPORT, page_html(document))
    return folder / REPORT


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of the run, those before a resume included; a half-written last line is left out."""
    steps = []
    for line in (folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            steps.append(json.loads(line))
        except ValueError:
            continue
    return steps


def _model_sections(parts: ReportParts) -> dict[str, dict[str, Any] | None]:
    """The tabs of `fxpar viz`; one that cannot be made leaves a note on the page."""
    nodes = sum(view.graph.node_count for view in parts.views)
    if nodes > MOST_NODES:
        parts.notes.append(f"{nodes:,} nodes are too many for the graph in a report; fxpar viz shows it.")
        return {}
    from fxpar.viz.graph_view import graph_section
    from fxpar.viz.memory import memory_section
    from fxpar.viz.mesh import mesh_section

    made: dict[str, Section] = {
        "graph": graph_section,
        "mesh": mesh_section,
        "memory": partial(memory_section, insides=parts.insides),
    }
    if parts.is_of_tasks:
        del made["mesh"]
    found: dict[str, dict[str, Any] | None] = {}
    for name, section in made.items():
        try:
            found[name] = section(parts.views)
        except FxparError as error:
            parts.notes.append(f"no {name}: {error}")
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(str(path), error) from error
