"""`fxpar switch`: the plan that takes a model's weights from one strategy to another, from shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpar.cli.console import human_seconds, stdout_console, working
from fxpar.cli.options import GraphSource
from fxpar.cli.request import check_output, cluster_name, collected_warnings, same_ranks, write_json
from fxpar.cli.source import Layouts, read_layouts, strategies_of
from fxpar.cli.switch_commands import SwitchRequest
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import PlannerError
from fxpar.ir.columns import folded, human_bytes
from fxpar.ir.strategy import Strategy
from fxpar.precision.precision import parse_dtype
from fxpar.switch.api import plan_switch
from fxpar.switch.plan import SwitchPlan, node_links
from fxpar.switch.planners import planner_names

MOST_LINKS = 8


def run_switch(request: SwitchRequest) -> None:
    """Do it. Raises FxparError."""
    if request.planner not in planner_names():
        raise PlannerError(request.planner, planner_names())
    strategies, cluster = same_world(request.source, request.strategy_texts, request.cluster)
    check_output(request.json)
    before, after = (found.params for found in layouts_of(request.source, strategies))
    plan = plan_switch(before, after, cluster, request.planner)
    plan.verify()
    if write_json(request.json, plan.to_json()):
        head = f"{request.source.model}: {before.name} -> {after.name}; bytes of all ranks"
        _show(f"{head}; {predicted_for(request.cluster, cluster)}", plan)


def same_world(source: GraphSource, texts: Sequence[str], path: str | None) -> tuple[list[Strategy], ClusterSpec]:
    """The strategies, all of one world size, and the cluster of this file, which has so many devices; without a file
    usual GPUs. Raises StrategySyntaxError, UnequalWorldsError, ClusterError.
    """
    cluster = None if path is None else ClusterSpec.from_file(path)
    strategies = strategies_of(source, texts)
    world = same_ranks(strategies)
    if cluster is None:
        return strategies, usual_cluster(world)
    cluster.require(world)
    return strategies, cluster


def layouts_of(source: GraphSource, strategies: Sequence[Strategy]) -> list[Layouts]:
    """The layouts of a model under each strategy, weights in the dtype of the source. None of them is allocated.

    Raises DtypeError, and as `read_for_store` does.
    """
    wire = parse_dtype(source.dtype)
    source = replace(source, dtype=GraphSource.dtype)  # tables of some models stay in fp32, and would not fit
    with working() as status, collected_warnings([]):
        status.update(f"placing the parameters of {source.model}")
        found = read_layouts(source, strategies)
    return [replace(each, params=each.params.with_dtype(wire)) for each in found]


def predicted_for(path: str | None, cluster: ClusterSpec) -> str:
    """The end of a head line: the cluster, and the links that count for what is sent."""
    return f"predicted for {cluster_name(path)} ({cluster.links})"


def _show(head: str, plan: SwitchPlan) -> None:
    data = plan.to_json()
    console = stdout_console()
    console.print(head, markup=False, style="bold")
    rows = [
        ("planner", plan.planner if plan.planner == plan.chosen else f"{plan.planner} ({plan.chosen})"),
        ("inside nodes", human_bytes(data["intra_node_bytes"])),
        ("between nodes", human_bytes(data["inter_node_bytes"])),
        ("stays where it is", human_bytes(data["local_bytes"])),
        ("fullest link out", _link(data, "max_send")),
        ("bound without relays", _link(data, "lower_bound")),
        ("transfers", f"{data['transfers']} in {data['steps']} step(s)"),
        ("predicted", human_seconds(data["predicted_s"])),
        ("planned in", f"{data['plan_cpu_s']:.3f} CPU s"),
        ("fingerprint", data["fingerprint"]),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        line = f"{name:<{width}}  "
        shown = folded(value, console.width, line, " " * len(line)) if console.is_terminal else [line + value]
        console.print("\n".join(shown), markup=False, soft_wrap=True)
    links = [link for link in node_links(data["node_matrix"]) if link[0] != link[1]]
    for source, target, size in links[:MOST_LINKS]:
        console.print(f"  node {source} -> node {target}: {human_bytes(size)}")
    if len(links) > MOST_LINKS:
        console.print(f"  and {len(links) - MOST_LINKS} pairs of nodes with less")


def _link(data: dict, name: str) -> str:
    inside, between = data[f"{name}_intra_bytes"], data[f"{name}_inter_bytes"]
    return f"{human_bytes(inside)} inside, {human_bytes(between)} between nodes"
