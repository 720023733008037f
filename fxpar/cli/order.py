"""`fxpar order`: which strategy runs first, the order of the others, and what is kept, from shapes only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from fxpar.cli.console import human_seconds, print_table, stdout_console
from fxpar.cli.request import check_output, named_once, write_json
from fxpar.cli.source import Layouts
from fxpar.cli.switch import layouts_of, predicted_for, same_world
from fxpar.cli.switch_commands import OrderRequest
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import OrderError, PlannerError
from fxpar.ir.columns import human_bytes
from fxpar.ir.strategy import Strategy
from fxpar.store import home_of
from fxpar.switch import ParamLayout
from fxpar.switch.order import EXHAUSTIVE, Leaving, OrderPlan, SwitchSchedule
from fxpar.switch.planners import planner_names

_FLOWS = {
    "home": "weights from the optimizer's layout, gradients back to it, as in training",
    "chain": "HotSPa's flow, gradients from one strategy to the next",
    "none": "HotSPa's flow, without gradients",
}


def run_order(request: OrderRequest) -> None:
    """Do it. Raises FxparError."""
    if request.planner not in planner_names():
        raise PlannerError(request.planner, planner_names())
    strategies, cluster = same_world(request.source, request.strategy_texts, request.cluster)
    names = [str(one) for one in strategies]
    if again := named_once(strategies)[1]:
        raise OrderError(f"{again[0]}; name each strategy once")
    first = None if request.first is None else str(Strategy.parse(request.first))
    check_output(request.json)
    found = layouts_of(request.source, strategies)
    begun = time.process_time()
    search = schedule_of(request, found, cluster)
    given = search.evaluate(names)
    same_first = search.best(names[0])
    best = search.best(first)
    document = {
        **_figures(best, request.tokens),
        "planner": request.planner,
        "gradients": request.gradients,
        "by": request.by,
        "search": "exhaustive" if len(names) <= EXHAUSTIVE else "local",
        "search_cpu_s": time.process_time() - begun,
        "as_given": _figures(given, request.tokens),
        "same_first": _figures(same_first, request.tokens),
    }
    if write_json(request.json, document):
        plans = {"as given": given, "best, same first": same_first, "best": best}
        _show(request, predicted_for(request.cluster, cluster), plans, document)


def schedule_of(request: OrderRequest, found: Sequence[Layouts], cluster: ClusterSpec) -> SwitchSchedule:
    """As the engine has it, or in HotSPa's flow; who stays where the memory is limited is searched."""
    layouts = {each.params.name: each.params for each in found}
    home: ParamLayout | None = None
    gradients: Leaving | Literal["chain", "none"]
    if request.gradients == "home":
        masters, home = home_of(found[0].params)  # the first says which parameters there are
        gradients = Leaving({each.params.name: each.gradients for each in found}, masters)
    else:
        gradients = request.gradients
    return SwitchSchedule(
        layouts,
        home,
        cluster,
        request.planner,
        resident=tuple(layouts) if home is not None and request.keep_gb is None else (),
        keep_bytes=int((request.keep_gb or 0) * 1e9),
        by=request.by,
        gradients=gradients,
        priced_only=True,
    )


def _figures(plan: OrderPlan, tokens: int | None) -> dict[str, Any]:
    """The plan as JSON; with the tokens of a mini-batch also what it costs for each of them."""
    if tokens is None:
        return plan.to_json()
    sizes = (plan.inter_node_bytes + plan.intra_node_bytes) / tokens
    return {**plan.to_json(), "tokens": tokens, "per_token_bytes": sizes, "per_token_s": plan.predicted_s / tokens}


def _show(request: OrderRequest, where: str, plans: dict[str, OrderPlan], document: dict[str, Any]) -> None:
    console = stdout_console()
    head = f"{request.source.model}, a mini-batch: {_FLOWS[request.gradients]}; bytes of all ranks; {where}"
    console.print(head, markup=False)
    rows = []
    for name, plan in plans.items():
        cells = [name, human_bytes(plan.inter_node_bytes), human_bytes(plan.intra_node_bytes)]
        cells.append(human_seconds(plan.predicted_s))
        if request.tokens is not None:
            each = _figures(plan, request.tokens)
            cells.append(f"{human_bytes(each['per_token_bytes'])}, {human_seconds(each['per_token_s'])}")
        kept = f"  (kept: {', '.join(plan.kept)})" if plan.kept and request.keep_gb is not None else ""
        rows.append((*cells, ", ".join(plan.order) + kept))
    per_token = () if request.tokens is None else (f"per token of {request.tokens:,}",)
    titles = ("", "between nodes", "inside nodes", "predicted", *per_token, "order")
    print_table(console, titles, rows, right=tuple(range(1, len(titles) - 1)))
    for hop in plans["best"].hops:
        helped = f", with {', '.join(hop.holders)}" if hop.holders and request.gradients != "home" else ""
        console.print(
            f"{hop.kind:9} {hop.source} to {hop.target}: {human_bytes(hop.inter_node_bytes)} between nodes, "
            f"{human_bytes(hop.intra_node_bytes)} inside, {human_seconds(hop.predicted_s)}{helped}",
            markup=False,
        )
    console.print(f"{document['search']} search, {document['search_cpu_s']:.2f} CPU s")
