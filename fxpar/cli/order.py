"""`fxpar order`: which graph runs first, the order of the others, and what is kept, from shapes only."""

from __future__ import annotations

import time
from typing import Any

from fxpar.cli.commands import OrderRequest
from fxpar.cli.console import human_bytes, human_seconds, print_table, stdout_console
from fxpar.cli.request import check_output, write_json
from fxpar.cli.switch import layouts_of, same_world
from fxpar.errors import PlannerError
from fxpar.ir.strategy import Strategy
from fxpar.switch.order import EXHAUSTIVE, OrderPlan, OrderSearch
from fxpar.switch.planners import planner_names


def run_order(request: OrderRequest) -> None:
    """Do it. Raises FxparError."""
    if request.planner not in planner_names():
        raise PlannerError(request.planner, planner_names())
    strategies, cluster = same_world(request.source, request.strategy_texts, request.cluster)
    first = None if request.first is None else str(Strategy.parse(request.first))
    check_output(request.json)
    layouts = layouts_of(request.source, strategies)
    begun = time.process_time()
    keep_bytes = int(request.keep_gb * 1e9)
    search = OrderSearch(layouts, cluster, request.planner, request.gradients, keep_bytes, request.by)
    names = [layout.name for layout in layouts]
    given = search.evaluate(names)
    same_first = search.best(names[0])
    best = search.best(first)
    document = {
        **best.to_json(),
        "planner": request.planner,
        "gradients": request.gradients,
        "by": request.by,
        "search": "exhaustive" if len(names) <= EXHAUSTIVE else "local",
        "search_cpu_s": time.process_time() - begun,
        "as_given": given.to_json(),
        "same_first": same_first.to_json(),
    }
    if write_json(request.json, document):
        _show(request.source.model, {"as given": given, "best, same first": same_first, "best": best}, document)


def _show(model: str, plans: dict[str, OrderPlan], document: dict[str, Any]) -> None:
    console = stdout_console()
    console.print(f"{model}: order of graphs; gradients: {document['gradients']}")
    rows = [
        (
            name,
            human_bytes(plan.inter_node_bytes),
            human_bytes(plan.intra_node_bytes),
            human_seconds(plan.predicted_s),
            " > ".join(plan.order) + (f"  (kept: {', '.join(plan.kept)})" if plan.kept else ""),
        )
        for name, plan in plans.items()
    ]
    print_table(console, ("", "between nodes", "inside nodes", "predicted", "order"), rows, right=(1, 2, 3))
    for hop in plans["best"].hops:
        console.print(
            f"{hop.kind:9} {hop.source} > {hop.target}: {human_bytes(hop.inter_node_bytes)} between nodes, "
            f"{human_seconds(hop.predicted_s)}" + (f", with {', '.join(hop.holders)}" if hop.holders else "")
        )
    console.print(f"{document['search']} search, {document['search_cpu_s']:.2f} CPU s")
