"""`fxpar rounds`: batches of lengths as rounds of teams, without a model. Nothing here imports torch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxpar.cli.console import human_seconds, print_table, stdout_console, working
from fxpar.cli.request import check_output, write_json
from fxpar.cli.rounds_commands import RoundsRequest
from fxpar.errors import DegreeError
from fxpar.rounds import RoundPlan, TeamCost, cost_of, homogeneous_ms, plan_rounds
from fxpar.rounds.batches import Batch, batches_of
from fxpar.search.lengths import read_lengths


def run_rounds(request: RoundsRequest) -> None:
    """Plan the batches, and print or write them. Raises FxparError."""
    check_output(request.json)
    lengths = read_lengths(request.lengths or "", tokenizer=request.tokenizer)
    longest = request.max_length or int(lengths.max())
    batches = batches_of(lengths, request.batch_range, request.batch, longest, request.devices)
    degrees = request.team_degrees
    if not degrees:
        raise DegreeError(request.min_degree, f"no team of so many ranks is left on {request.devices} devices")
    if max(degrees) > request.devices:
        raise DegreeError(max(degrees), f"a team has from 1 to {request.devices} ranks")
    found = []
    with working() as status:
        costs, node = _costs(request, degrees, longest, batches, status.update)
        for module in ("scipy.optimize", "scipy.sparse"):
            importlib.import_module(module)  # no part of what planning the first batch takes
        for number, one in enumerate(batches):
            status.update(f"planning batch {one.number}, {number + 1} of {len(batches)}")
            found.append(_planned(one, request, costs, node))
    document = {
        "model": request.source.model or None,
        "cost": request.priced_by,
        "devices": request.devices,
        "devices_per_node": node,
        "degrees": list(degrees),
        "tokens_per_device": max(cost.tokens // degree for degree, cost in costs.items()),
        "batches": found,
        "total_s": _seconds(found, "predicted_ms"),
        "lower_bound_s": _seconds(found, "lower_bound_ms"),
        "any_cut_lower_bound_s": _seconds(found, "any_cut_lower_bound_ms"),
        "static_s": _seconds(found, "static_ms"),
        "best_homogeneous_s": _seconds(found, "best_homogeneous_ms"),
    }
    if write_json(request.json, document):
        _show(request, document)


def _costs(
    request: RoundsRequest,
    degrees: tuple[int, ...],
    longest: int,
    batches: Sequence[Batch],
    said: Callable[[str], object],
) -> tuple[dict[int, TeamCost], int]:
    """By degree, and the devices of a node."""
    if not request.source.model:
        cost = cost_of(request.priced_by).with_memory(request.memory_gib)
        return cost.teams(degrees, request.devices, longest), request.node
    from fxpar.cli.rounds_model import model_teams

    most = max(int(one.lengths.sum()) for one in batches)
    return model_teams(request, degrees, longest, most, said)


def _planned(
    batch: Batch, request: RoundsRequest, costs: Mapping[int, TeamCost], devices_per_node: int
) -> dict[str, Any]:
    begun = time.process_time()
    plan = plan_rounds(batch.lengths, request.devices, costs, devices_per_node=devices_per_node)
    spent = time.process_time() - begun
    alike = homogeneous_ms(batch.lengths, request.devices, costs, devices_per_node=devices_per_node)
    best, largest = min(alike, key=lambda degree: alike[degree]), max(alike)
    return {
        "batch": batch.number,
        "sequences": len(batch.lengths),
        "dropped": batch.dropped,
        "tokens": int(batch.lengths.sum()),
        "micro_batches": [
            {
                "layout": one.layout,
                "predicted_ms": one.ms,
                "lower_bound_ms": one.bound_ms,
                "groups": [
                    {
                        "ranks": [team.ranks[0], team.ranks[-1]],
                        "predicted_ms": team.ms,
                        "lengths": list(team.lengths),
                        "sequences": batch.places[list(team.sequences)].tolist(),
                    }
                    for team in one.teams
                ],
            }
            for one in plan.rounds
        ],
        **_figures(plan),
        "plan_cpu_s": spent,
        "static_ms": alike[largest],
        "static_degree": largest,
        "best_homogeneous_ms": alike[best],
        "best_homogeneous_degree": best,
    }


def _figures(plan: RoundPlan) -> dict[str, float]:
    return {
        "predicted_ms": plan.predicted_ms,
        "lower_bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "any_cut_lower_bound_ms": plan.any_cut_bound_ms,
    }


def _seconds(batches: list[dict[str, Any]], key: str) -> float:
    return sum(one[key] for one in batches) / 1000


def _show(request: RoundsRequest, document: dict[str, Any]) -> None:
    console, batches = stdout_console(), document["batches"]
    degrees = ", ".join(map(str, document["degrees"]))
    asked = f"up to {document['tokens_per_device']:,} tokens per device, teams of {degrees}"
    named = f"{request.source.model}, {request.priced_by}" if request.source.model else request.priced_by
    console.print(f"{named} on {request.devices} devices: {asked}", markup=False)
    titles = ("batch", "tokens", "rounds", "predicted", "bound", "any cut", "static", "one degree", "CPU s")
    rows = [
        (
            str(one["batch"]),
            f"{one['tokens']:,}",
            " | ".join(each["layout"] for each in one["micro_batches"]),
            _ms(one["predicted_ms"]),
            _ms(one["lower_bound_ms"]),
            _ms(one["any_cut_lower_bound_ms"]),
            _ms(one["static_ms"]),
            f"{_ms(one['best_homogeneous_ms'])} ({one['best_homogeneous_degree']})",
            f"{one['plan_cpu_s']:.2f}",
        )
        for one in batches
    ]
    print_table(console, titles, rows, right=(0, 1, 3, 4, 5, 6, 7, 8))
    total, bound, free = (document[f"{key}_s"] for key in ("total", "lower_bound", "any_cut_lower_bound"))
    bounds = f"no teams for these rounds take less than {_total(bound)} (gap {total / bound - 1:.1%})"
    console.print(f"total: {_total(total)}; {bounds}, and no rounds less than {_total(free)}", markup=False)
    static, alike = document["static_s"], document["best_homogeneous_s"]
    versus = f"the largest degree everywhere {_total(static)} ({static / total:.2f} times), the best one degree"
    console.print(f"{versus} per batch {_total(alike)} ({alike / total:.2f} times)", markup=False)
    if dropped := sum(one["dropped"] for one in batches):
        console.print(f"left out: {dropped} longer than {request.max_length:,} tokens", markup=False)


def _total(seconds: float) -> str:
    """Of batches: totals that are near each other are told apart."""
    return f"{seconds:.2f} s" if seconds >= 1 else human_seconds(seconds)


def _ms(value: float) -> str:
    return human_seconds(value / 1000)
