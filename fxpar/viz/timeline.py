"""The timeline tab: a step as groups, switches, micro-batches, pipeline actions, reductions; predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.exec_graph import Program
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.memory.state import home_bytes
from fxpar.store import home_layout, param_specs, wire_layout
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch.node_first import cheapest_cost
from fxpar.switch.order import SwitchSchedule
from fxpar.switch.terms import accumulators_of, gradient_placements
from fxpar.viz.inside import Inside
from fxpar.viz.step import Planned, StepGroup, StepTimeline, predict_step
from fxpar.viz.viewed import Viewed

MOST_LANES = 32
MOST_RUNS = 256  # micro-batches of a replica that are added to make tokens equal


@dataclass(frozen=True)
class ShownStep:
    """A step of the tab: a prediction, and beside it what was measured, if anything was."""

    title: str
    predicted: StepTimeline
    measured: StepTimeline | None = None


def timeline_section(
    views: Sequence[Viewed],
    steps: Sequence[ShownStep] = (),
    insides: Mapping[str, Inside] | None = None,
) -> dict[str, Any] | None:
    """The section: `steps` as they were run, or else one step with all strategies in the given order (`shown_steps`).

    `insides` has the costs of the views' programs by strategy, if they are known already.
    """
    if not views:
        return None
    known = insides or inside_of(views)
    return {
        "steps": [_step_json(step) for step in steps or shown_steps(views, known)],
        "inside": {name: inside.to_json() for name, inside in known.items()},
        "assumed": assumptions(cluster_of(views), any(view.cluster is None for view in views), bool(steps)),
    }


def cluster_of(views: Sequence[Viewed]) -> ClusterSpec:
    """The cluster that all views have a place on."""
    return max((view.links for view in views), key=lambda cluster: cluster.world)


def inside_of(views: Sequence[Viewed]) -> dict[str, Inside]:
    """Costs by strategy, which a page works out once for all of its tabs."""
    cluster = cluster_of(views)
    return {view.strategy: Inside(program_of(view), cluster) for view in views}


def program_of(view: Viewed) -> TrainGraph:
    """The program as a run has it, where there is one."""
    return view.graph if view.stored is None else view.stored


def shown_steps(views: Sequence[Viewed], insides: Mapping[str, Inside]) -> list[ShownStep]:
    """One step with a group per strategy; strategies on different numbers of ranks get a step each. All groups have
    the same number of tokens, as far as micro-batches can be added to make it so (`equal_runs`).
    """
    worlds = {view.graph.strategy.world for view in views}
    alike = [replace(view, micro_batches=runs) for view, runs in zip(views, equal_runs(views), strict=True)]
    together = [alike] if len(worlds) == 1 else [[view] for view in alike]
    return [ShownStep(_title(some), predicted_step(some, insides)) for some in together]


def _title(views: Sequence[Viewed]) -> str:
    if len(views) == 1:
        return f"A step under {views[0].strategy}"
    return "One step with a group under each strategy"


def predicted_step(views: Sequence[Viewed], insides: Mapping[str, Inside]) -> StepTimeline:
    """A step in which each view's micro-batches are a group, in the given order, with switches from the home layout.
    Gradients leave once where the next group adds to the same ones.
    """
    programs = {view.strategy: program_of(view) for view in views}
    world = views[0].graph.strategy.world
    specs = param_specs(next(iter(programs.values())))
    home = home_layout(specs, world)
    layouts = {name: layout_of(program, name) for name, program in programs.items()}
    cluster = insides[views[0].strategy].cluster
    schedule = SwitchSchedule(layouts, wire_layout(home, specs), cluster, resident=tuple(programs))
    planned, visited = [], []
    accumulators = [accumulators_of(programs[view.strategy]) for view in views]
    for number, view in enumerate(views):
        program = programs[view.strategy]
        passed_on = accumulators[number] in accumulators[number + 1 : number + 2] and accumulators[number] is not None
        switch = schedule.plan(view.strategy, visited)
        placements = gradient_placements(program)
        trained = ParamLayout("home", world, {fqn: home.params[fqn] for fqn in placements})
        reduction = cheapest_cost(placements, trained, cluster)
        sequences = view.sequences
        group = StepGroup(
            "",
            view.strategy,
            ((sequences.lengths,) * view.runs,) * program.strategy.replicas,
            switch.intra_node_bytes + switch.inter_node_bytes,
            0 if passed_on else reduction.intra_node_bytes + reduction.inter_node_bytes,
            sequences.rows,
        )
        reduce_ms = 0.0 if passed_on else reduction.predicted_s * 1e3
        planned.append(Planned(group, insides[view.strategy], switch.predicted_s * 1e3, reduce_ms))
        visited.append(view.strategy)
    return predict_step(planned, world, optimizer_ms(next(iter(programs.values())), cluster))


def equal_runs(views: Sequence[Viewed]) -> list[int]:
    """Micro-batches of each replica of a view, so that all views have at least the tokens of the largest."""
    each = [view.sequences.tokens * view.graph.strategy.replicas for view in views]
    most = max(tokens * view.runs for tokens, view in zip(each, views, strict=True))
    wanted = (-(-most // tokens) if tokens else view.runs for tokens, view in zip(each, views, strict=True))
    return [max(view.runs, min(runs, MOST_RUNS)) for view, runs in zip(views, wanted, strict=True)]


def optimizer_ms(program: Program, cluster: ClusterSpec) -> float:
    """`adam_ms` of a program's parameters alone."""
    return adam_ms(home_bytes(program), cluster)


def adam_ms(nbytes: tuple[int, int, int], cluster: ClusterSpec) -> float:
    """AdamW on the fullest rank, of the bytes that `bytes_at_home` says: masters and moments are read and written,
    gradients are read.
    """
    masters, moments, gradients = nbytes
    return (2 * masters + 2 * moments + gradients) / (cluster.sustained.memory_gb_per_s * 1e6)


def _overlap(slowdown: float | None) -> str:
    if slowdown is None:
        return (
            "Nothing overlaps inside of a micro-batch: kernels and collectives add up, "
            "as in the planner of mini-batches."
        )
    return (
        "Of collectives and of copies to the host, what kernels wait for counts, as in the planner of "
        f"mini-batches; both are {slowdown:g} times slower at the same time."
    )


def assumptions(cluster: ClusterSpec, is_assumed: bool, is_run: bool) -> list[str]:
    """What the predictions stand on, in sentences for the page."""
    links = f"{cluster.intra_gb_per_s:g} GB/s inside a node"
    if cluster.nodes > 1:
        links += f", {cluster.inter_gb_per_s:g} GB/s between nodes"
    shape = f"{cluster.nodes} × {cluster.devices_per_node} devices"
    source = "usual figures; name a cluster for yours" if is_assumed else "as the cluster says"
    return [
        f"Devices of {cluster.sustained}.",
        f"{shape}, {links}, {cluster.latency_us:g} µs per message ({source}).",
        _overlap(cluster.sustained.overlap_slowdown),
        "The optimizer is AdamW, limited by memory."
        + (
            ""
            if is_run
            else " A step runs every strategy once, in the order given, each with micro-batches for the same number of "
            "tokens; weights come from the home layout."
        ),
    ]


def _step_json(step: ShownStep) -> dict[str, Any]:
    """A step with the sizes of its micro-batches as [tokens, sum of squares, sequences], of one of a group's `rows`."""
    timelines = [one for one in (step.predicted, step.measured) if one is not None]
    groups = step.predicted.groups
    return {
        "title": step.title,
        "groups": [_group_json(group) for group in groups],
        "timelines": [shortened(one).to_json() for one in timelines],
    }


def shortened(timeline: StepTimeline) -> StepTimeline:
    """At most 32 lanes."""
    hidden = len(timeline.lanes) - MOST_LANES
    if hidden <= 0:
        return timeline
    spans = tuple(span for span in timeline.spans if span.lane < MOST_LANES)
    return StepTimeline(timeline.source, timeline.groups, timeline.lanes[:MOST_LANES], spans, hidden)


def _group_json(group: StepGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "strategy": group.strategy,
        "tokens": group.tokens,
        "rows": group.rows,
        "switch_bytes": group.switch_bytes,
        "reduce_bytes": group.reduce_bytes,
        "replicas": [
            [[sum(lengths), sum(n * n for n in lengths), len(lengths)] for lengths in replica]
            for replica in group.micro_batches
        ],
    }
