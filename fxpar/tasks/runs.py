"""The ways in which a run may train a task: one strategy for all of it, or towers as stages on ranks of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

from torch import fx

from fxpar.errors import FxparError
from fxpar.ir.node_meta import fqn_of
from fxpar.lowering import lower
from fxpar.tasks.contract import Contracted, TaskStep
from fxpar.tasks.layers import around
from fxpar.tasks.times import Layout
from fxpar.waves.runs import Option, RunPlan, plan_runs

MOST_STAGES = 4


def planned_runs(
    tasks: Mapping[str, TaskStep], found: Sequence[Contracted], layouts: Mapping[str, Sequence[Layout]], devices: int
) -> RunPlan:
    """The shortest step that the runtime can run: each task on consecutive ranks, its towers side by side or not, and
    tasks on disjoint ranks at the same time. Towers that cannot be lowered are left out.
    """
    options = {name: _whole(layouts[name]) for name in tasks}
    sequential_ms = sum(min(one.ms for one in mine) for mine in options.values())
    for name, step in tasks.items():
        options[name] += _of_towers(step, [one for one in found if one.task == name], found, layouts[name], devices)
    while True:
        plan = plan_runs(options, devices, sequential_ms)
        refused = [run for run in plan.runs if not _can_run(tasks[run.task], run.option.strategy)]
        if not refused:
            return plan
        for run in refused:
            options[run.task].remove(run.option)


def _whole(layouts: Sequence[Layout]) -> list[Option]:
    return [Option(one.width, sum(one.ms), one.strategy) for one in layouts]


def _can_run(step: TaskStep, strategy: str) -> bool:
    """Of a strategy without stages it is known."""
    if ">" not in strategy:
        return True
    try:
        lower(step.logical, strategy, for_store=True)
    except FxparError:
        return False
    return True


def _of_towers(
    step: TaskStep, mine: Sequence[Contracted], found: Sequence[Contracted], layouts: Sequence[Layout], devices: int
) -> list[Option]:
    """Stages of neighbours among the MetaOps of a task, in the order in which its loss calls them."""
    place = {node: at for at, node in enumerate(step.forward.calls)}
    order = sorted(range(len(mine)), key=lambda i: min(place[node] for node in mine[i].part.all_calls))
    number = {id(one): i for i, one in enumerate(mine)}
    reads = [{number[id(found[a])] for a in one.reads} for one in mine]
    options = []
    for stages in _splits(order):
        cuts = _cuts([[node for i in stage for node in mine[i].part.all_calls] for stage in stages])
        if cuts is not None:
            options += _options(step, stages, cuts, reads, layouts, devices)
    return options


def _splits(order: Sequence[int]) -> Iterator[list[list[int]]]:
    for count in range(2, min(len(order), MOST_STAGES) + 1):
        for ends in combinations(range(1, len(order)), count - 1):
            yield [list(order[first:last]) for first, last in pairwise([0, *ends, len(order)])]


def _cuts(stages: Sequence[Sequence[fx.Node]]) -> list[str] | None:
    """For each stage but the first the outermost module that begins with it; None where there is none."""
    before: set[str] = set()
    cuts = []
    for number, calls in enumerate(stages):
        modules = {module for node in calls for module in around(fqn_of(node))}
        if number:
            first = next((one for one in around(fqn_of(calls[0])) if one and one not in before), None)
            if first is None:
                return None
            cuts.append(first)
        before |= modules
    return cuts


def _options(
    step: TaskStep,
    stages: Sequence[Sequence[int]],
    cuts: Sequence[str],
    reads: Sequence[set[int]],
    layouts: Sequence[Layout],
    devices: int,
) -> Iterator[Option]:
    """By replicas and ranks of each stage, under the layouts that are the fastest there."""
    for replicas in sorted({one.replicas for one in layouts}):
        alike = [one for one in layouts if one.replicas == replicas]
        widths = sorted({one.width for one in alike})
        fastest = [
            {
                width: min((one for one in alike if one.width == width), key=lambda one: sum(one.ms[i] for i in stage))
                for width in widths
            }
            for stage in stages
        ]
        for chosen in product(widths, repeat=len(stages)):
            if sum(chosen) <= devices:
                mine = [by_width[width] for by_width, width in zip(fastest, chosen, strict=True)]
                first, *others = (one.strategy for one in mine)
                text = " > ".join([f"{first}+zb_h1+cut({'|'.join(cuts)})", *others])
                batches = 1 if step.logical.packing is not None else math.ceil(step.batches / replicas)
                yield Option(sum(chosen), _step_ms(stages, mine, reads, batches), text)


def _step_ms(
    stages: Sequence[Sequence[int]], layouts: Sequence[Layout], reads: Sequence[set[int]], batches: int
) -> float:
    """Of the first batch each MetaOp begins when its stage has done those before it, and what it reads is there; the
    backward is the same in reverse. The others follow as fast as the slowest stage is.
    """
    ends: dict[int, float] = {}
    slowest = 0.0
    for stage, layout in zip(stages, layouts, strict=True):
        now = 0.0
        for i in stage:
            now = max([now, *(ends[a] for a in reads[i] if a in ends)]) + layout.ms[i] / batches
            ends[i] = now
        slowest = max(slowest, sum(layout.ms[i] for i in stage) / batches)
    return max(ends.values()) + (batches - 1) * slowest
