"""`fxpar tasks plan`: waves over several tasks, from a file of costs, without torch, or from a run's configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fxpar.cli.console import human_bytes, human_seconds, print_table, show_notes, stdout_console, working
from fxpar.cli.request import check_output, collected_warnings, write_json, write_output
from fxpar.cli.tasks_commands import TasksRequest
from fxpar.errors import TasksFileError
from fxpar.waves import WavePlan, plan_waves
from fxpar.waves.chains import TasksPlan
from fxpar.waves.chart import chart
from fxpar.waves.file import case_of, read_tasks
from fxpar.waves.runs import RunPlan


def run_tasks(request: TasksRequest) -> None:
    """Plan, and print or write it. Raises FxparError."""
    check_output(request.json)
    check_output(request.output)
    if request.writes_run and not request.is_model:
        raise _no_run(request.file or request.case or "")
    begun = time.process_time()
    of_run, kind = None, ""
    if request.is_model:
        found, of_run, kind = _of_model(request)
    else:
        found = _of_costs(request)
    spent = time.process_time() - begun
    if of_run is not None:
        write_output(request.output, of_run)  # type: ignore[arg-type]
    elif request.output is not None:
        from fxpar.viz.waves import waves_html

        write_output(request.output, waves_html(found.plan, request.case or request.file, found.strategies))
    if write_json(request.json, _document(found, request, spent)) and request.output != "-":
        _show(found, request, spent, kind)


def _of_costs(request: TasksRequest) -> TasksPlan:
    assert request.devices is not None
    tasks = read_tasks(request.file) if request.case is None else case_of(request.case)
    nodes = -(-request.devices // request.devices_per_node)
    cluster = tasks.node.with_nodes(nodes, request.devices_per_node)
    memory = tasks.memory_bytes if request.memory_bytes is None else request.memory_bytes
    with working("planning"):
        plan = plan_waves(tasks.graph, cluster, request.devices, memory_bytes=memory)
    return TasksPlan(plan, memory_bytes=math.inf if memory is None else memory)


def _of_model(request: TasksRequest) -> tuple[TasksPlan, str | None, str]:
    """The plan, the configuration of a run that follows it, if that is asked for, and what the devices sustain. Raises
    TasksFileError.
    """
    from fxpar.cli.tasks_run import read_run_tasks
    from fxpar.tasks import plan_tasks

    tasks = read_run_tasks(request.file, request.devices, request.devices_per_node)
    if request.writes_run and not tasks.can_train:
        raise _no_run(request.file)
    notes: list[str] = []
    with working("capturing") as status, collected_warnings(notes):
        steps = tasks.steps()
        status.update("lowering and planning")
        found = plan_tasks(steps, tasks.cluster, memory_bytes=request.memory_bytes, budget_bytes=tasks.budget_bytes)
    show_notes(notes)
    of_run = None
    if request.writes_run and found.runs:
        told = request.memory is not None or found.runs.needs_budget
        of_run = tasks.planned(found.runs, steps, found.memory_bytes if told else math.inf)
    return found, of_run, str(tasks.cluster.sustained)


_MOST_SHOWN = 8  # amounts of memory


def _no_run(file: str) -> TasksFileError:
    do = "Give each [task.NAME] of a configuration data, or write a page: -o plan.html"
    return TasksFileError(file, "", "it says nothing of data, so nothing can train as planned", do)


def _document(found: TasksPlan, request: TasksRequest, spent: float) -> dict[str, Any]:
    plan = found.plan
    runs = {(run.piece, run.backward): run for run in plan.step.runs}
    waves = {piece: number for number, members in enumerate(plan.waves) for piece in members}
    run = found.runs
    return {
        "tasks": request.case or request.file,
        "devices": plan.devices,
        "devices_per_node": plan.cluster.devices_per_node,
        "step_ms": plan.ms,
        "lower_bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "spindle_ms": plan.spindle_ms if math.isfinite(plan.spindle_ms) else None,
        "sequential_ms": plan.sequential_ms,
        "transfer_share": plan.transfer_share,
        "reduce_ms": plan.step.exposed_ms,
        "peak_bytes": list(plan.step.peak_bytes),
        "memory_bytes": found.memory_bytes if math.isfinite(found.memory_bytes) else None,
        "found_by": plan.found_by,
        "plan_cpu_s": spent,
        **({} if run is None else {"run": _run(run)}),
        "reductions": [
            {
                "weights": one.weights,
                "layers": [one.first, one.last - 1],
                "devices": list(one.devices),
                "start_ms": one.start_ms,
                "end_ms": one.end_ms,
            }
            for one in plan.step.reductions
        ],
        "pieces": [
            {
                "metaop": plan.graph.metaops[piece.metaop].name,
                "layers": [piece.first, piece.last - 1],
                "devices": list(piece.devices),
                **_assigned(found, at),
                "wave": waves[at],
                "receives_from": list(piece.sources),
                **{
                    way: {"start_ms": run.start_ms, "begin_ms": run.begin_ms, "end_ms": run.end_ms}
                    for way, run in (("forward", runs[at, False]), ("backward", runs[at, True]))
                },
            }
            for at, piece in enumerate(plan.pieces)
        ],
    }


def _run(plan: RunPlan) -> dict[str, Any]:
    return {
        "step_ms": plan.ms,
        "moved_ms": plan.moved_ms,
        "sequential_ms": plan.sequential_ms,
        "rank_bytes": list(plan.rank_bytes),
        "in_turns": plan.in_turns,
        "tasks": [
            {"task": run.task, "wave": level, "ranks": list(run.ranks), **asdict(run.option)}
            for run, level in zip(plan.runs, plan.levels, strict=True)
        ],
    }


def _assigned(found: TasksPlan, at: int) -> dict[str, Any]:
    """What a piece of a model is."""
    if not found.chains:
        return {}
    one = found.assignments[at]
    return {"task": one.task, "modules": list(one.modules), "strategy": one.strategy}


def _show(found: TasksPlan, request: TasksRequest, spent: float, kind: str) -> None:
    plan = found.plan
    console = stdout_console()
    runs = {(run.piece, run.backward): run for run in plan.step.runs}
    what = request.case or request.file
    of_kind = f"; predicted for devices of {kind}" if kind else ""
    console.print(f"{what} on {plan.devices} devices: {len(plan.graph.metaops)} MetaOps{of_kind}", markup=False)
    rows = []
    for number, members in enumerate(plan.waves):
        for at in members:
            piece = plan.pieces[at]
            forward, backward = runs[at, False], runs[at, True]
            rows.append(
                (
                    str(number),
                    plan.graph.metaops[piece.metaop].name,
                    f"{piece.first}-{piece.last - 1}",
                    ranges(piece.devices),
                    *([found.assignments[at].strategy] if found.chains else []),
                    f"{forward.start_ms:.1f} - {forward.end_ms:.1f}",
                    f"{backward.start_ms:.1f} - {backward.end_ms:.1f}",
                )
            )
    titles = (
        "wave",
        "MetaOp",
        "layers",
        "devices",
        *(["strategy"] if found.chains else []),
        "forward ms",
        "backward ms",
    )
    print_table(console, titles, rows, right=(0, 2, len(titles) - 2, len(titles) - 1))
    console.print(chart(plan), markup=False, soft_wrap=True)
    step, bound, sequential = (human_seconds(ms / 1000) for ms in (plan.ms, plan.bound_ms, plan.sequential_ms))
    console.print(f"step {step}, no plan takes less than {bound} (gap {plan.gap:.1%})", markup=False)
    versus = f"one after the other {sequential} ({plan.sequential_ms / plan.ms:.2f} times)"
    if math.isfinite(plan.spindle_ms):
        waves = human_seconds(plan.spindle_ms / 1000)
        versus += f", Spindle's waves {waves} ({plan.spindle_ms / plan.ms:.2f} times)"
    console.print(versus, markup=False)
    sent = f"devices receive from others for {plan.transfer_share:.1%} of the step"
    added = f"gradients add {human_seconds(plan.step.exposed_ms / 1000)} at its end"
    console.print(f"{sent}, {added}; planned in {spent:.2f} CPU s", markup=False)
    console.print(f"devices hold at most {_memory(plan.step.peak_bytes, found.memory_bytes)}", markup=False)
    if found.runs is not None:
        _show_runs(found.runs, plan, found.memory_bytes)


def _show_runs(plan: RunPlan, free: WavePlan, memory_bytes: float) -> None:
    """What `fxpar train` can follow."""
    console = stdout_console()
    step, faster = human_seconds(plan.ms / 1000), plan.sequential_ms / plan.ms
    longer = f"; {plan.ms / free.ms - 1:.0%} longer than the plan above, whose pieces no run follows"
    console.print(
        f"\na run can follow this: step {step}, {faster:.2f} times as fast as one after the other"
        + longer * (plan.ms > 1.005 * free.ms),
        markup=False,
    )
    rows = [
        (
            str(level),
            run.task,
            ranges(run.ranks),
            run.option.strategy,
            f"{run.option.ms:.1f}",
            f"{run.option.moved_ms:.2f}",
        )
        for run, level in zip(plan.runs, plan.levels, strict=True)
    ]
    print_table(console, ("wave", "task", "ranks", "strategy", "ms", "moving ms"), rows, right=(0, 4, 5))
    turns = ", where weights of tasks take turns" if plan.in_turns else ""
    console.print(f"ranks hold at most {_memory(plan.rank_bytes, memory_bytes)}{turns}", markup=False)


def _memory(nbytes: Sequence[float], limit: float) -> str:
    """`5.2 GB of 8.0 GB: 0-3 5.2 GB, 4-7 4.9 GB`."""
    alike: dict[str, list[int]] = {}
    for device, held in enumerate(nbytes):
        alike.setdefault(human_bytes(held), []).append(device)
    text = human_bytes(max(nbytes)) + (f" of {human_bytes(limit)}" if math.isfinite(limit) else "")
    if max(nbytes) > limit:
        text += ", more than there is: no order of pieces was found that fits"
    if len(alike) == 1:
        return text
    if len(alike) > _MOST_SHOWN:
        return f"{text}, at least {human_bytes(min(nbytes))}"
    return f"{text}: {', '.join(f'{ranges(tuple(devices))} {held}' for held, devices in alike.items())}"


def ranges(devices: tuple[int, ...]) -> str:
    """`0-3,6`: devices in ascending order, neighbours as a range."""
    found: list[list[int]] = []
    for one in sorted(devices):
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
