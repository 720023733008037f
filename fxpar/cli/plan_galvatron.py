"""`fxpar plan --cost galvatron`: a strategy per layer from Galvatron's profiles; and its plans in fxpar's words.

Nothing here imports torch: the profile is the model.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.cli.console import plain_table, stdout_console
from fxpar.cli.request import check_output, write_json
from fxpar.errors import NothingFitsError, PlanFileError, PlanOptionError
from fxpar.search.galvatron import GalvatronCost
from fxpar.search.galvatron_files import read_profiles
from fxpar.search.galvatron_plan import GalvatronPlan, as_strategy, read_galvatron_plan
from fxpar.search.layered import LayeredPlan, search
from fxpar.search.plan_file import is_plan

_MEMORY = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([mg])i?b?", re.IGNORECASE)
_UNITS = {"m": 2**20, "g": 2**30}
_GB = 2**30


@dataclass(frozen=True)
class GalvatronRequest:
    """What to plan for. `layers` and `hidden` are 0 where the name of the profiled model says them."""

    profiles: str  # a folder
    devices: int
    batch: int
    seq_len: int
    memory: str
    uniform: bool = False
    micro_batches: int | None = None
    model: str | None = None
    layers: int = 0
    hidden: int = 0
    json: str | None = None


def parse_memory(text: str) -> int:
    """40802189312 for "38GB": a GB has 2^30 bytes, as Galvatron counts. Raises PlanOptionError."""
    match = _MEMORY.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise PlanOptionError(
            "--memory", text, "write what a device has, such as 38GB (of 2^30 bytes, as Galvatron counts)"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def run_plan_galvatron(request: GalvatronRequest) -> None:
    """Find the plan, and print or write it. Raises FxparError."""
    memory_bytes = parse_memory(request.memory)
    check_output(request.json)
    profiles = read_profiles(request.profiles, request.model)
    sizes = request.devices, request.batch, request.seq_len, request.layers, request.hidden
    cost = GalvatronCost(profiles, *sizes)
    begun = time.process_time()
    found = search(cost, memory_bytes, request.uniform, request.micro_batches)
    spent = time.process_time() - begun
    try:
        static = search(cost, memory_bytes, True, request.micro_batches)
    except NothingFitsError:  # where only a mixture fits
        static = None
    document = {
        "cost": "galvatron",
        "model": profiles.model,
        "devices": request.devices,
        "batch": request.batch,
        "seq_len": request.seq_len,
        "memory_bytes": memory_bytes,
        "plans": [_plan_document(found, request.seq_len)],
        "best_static": static and {"strategy": static.strategies[0], "predicted_s": static.predicted_s},
        "speedup": static and static.predicted_s / found.predicted_s,
        "search_cpu_s": spent,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "notes": list(cost.measured.notes),
    }
    if write_json(request.json, document):
        _show(request, document, found)


def imported_plan(path: str, devices: int | None) -> GalvatronPlan:
    """A plan of Galvatron's. Raises PlanFileError for one of fxpar's, and as `read_galvatron_plan`."""
    if is_plan(path):
        do = f"Train with it: fxpar train CONFIG --plan {path}"
        raise PlanFileError(path, "it is a plan of fxpar's own, and --import reads those of Galvatron", do)
    return read_galvatron_plan(path, devices)


def run_import_galvatron(path: str, devices: int | None = None, json: str | None = None) -> None:
    """Print a plan of Galvatron's as strategies per layer, and as one strategy. Raises FxparError."""
    check_output(json)
    plan = imported_plan(path, devices)
    texts = tuple(str(one) for one in plan.layers)
    runs = _runs(texts, plan.division)
    document = {
        "devices": plan.devices,
        "batch": plan.batch,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "division": list(plan.division),
        "layers": list(texts),
        "ends": str(plan.ends),
        "strategy": str(as_strategy(plan)),
        "runs": [{"stage": stage, "layers": [first, last], "strategy": text} for stage, first, last, text in runs],
    }
    if write_json(json, document):
        console = stdout_console()
        steps = _micro_batches(plan.micro_batches)
        console.print(f"{path}: {plan.devices} devices, batch {plan.batch} in {steps}, {plan.schedule}", markup=False)
        _show_runs(runs, str(plan.ends))
        console.print(f"as one strategy: {document['strategy']}", markup=False)


def _plan_document(found: LayeredPlan, seq_len: int) -> dict[str, Any]:
    runs = _runs(found.strategies, found.division)
    text = " > ".join(
        ", ".join(f"{last - first + 1} x {one}" for at, first, last, one in runs if at == stage)
        for stage in range(len(found.division))
    )
    return {
        "groups": [{"limit": seq_len, "strategy": text, "seconds": found.predicted_s}],
        "predicted_s": found.predicted_s,
        "lower_bound_s": found.lower_bound_s,
        "memory_bytes": {text: max(found.memory_bytes)},
        "stage_memory_bytes": list(found.memory_bytes),
        "micro_batches": found.micro_batches,
        "division": list(found.division),
        "layers": list(found.strategies),
        "ends": found.ends,
    }


def _runs(strategies: Sequence[str], division: Sequence[int]) -> list[tuple[int, int, int, str]]:
    """(stage, first layer, last layer, strategy) of equal neighbours."""
    stages = [stage for stage, count in enumerate(division) for _ in range(count)]
    found = []
    for (stage, text), group in itertools.groupby(enumerate(strategies), lambda one: (stages[one[0]], one[1])):
        places = [place for place, _ in group]
        found.append((stage, places[0], places[-1], text))
    return found


def _show(request: GalvatronRequest, document: dict[str, Any], found: LayeredPlan) -> None:
    console = stdout_console()
    memory = f"{document['memory_bytes'] / _GB:g} GB"
    asked = f"batch {request.batch} of {request.seq_len} tokens, {memory} per device (GB of 2^30 bytes)"
    console.print(f"{document['model']} on {request.devices} devices, {asked}", markup=False)
    _show_runs(_runs(found.strategies, found.division), found.ends, found.memory_bytes)
    bound = f"no plan takes less than {found.lower_bound_s:.4f} s (gap {found.gap:.2%})"
    steps = _micro_batches(found.micro_batches)
    console.print(f"predicted: {found.predicted_s:.4f} s per step in {steps}; {bound}", markup=False)
    static = document["best_static"]
    if static and not request.uniform:
        console.print(f"best with one strategy: {static['strategy']}, {static['predicted_s']:.4f} s", markup=False)
    looked = f"{found.evaluated:,} plans and parts of plans priced, {found.pruned:,} of them dropped early"
    console.print(f"{looked}; {document['search_cpu_s']:.2f} CPU s", markup=False)
    for note in document["notes"]:
        console.print(f"note: {note}", markup=False)


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _show_runs(runs: Sequence[tuple[int, int, int, str]], ends: str, memory: Sequence[int] = ()) -> None:
    """A line per run of equal layers."""
    rows = []
    for stage, group in itertools.groupby(runs, lambda run: run[0]):
        for number, (_, first, last, text) in enumerate(group):
            used = f"{memory[stage] / _GB:.1f} GB" if memory and number == 0 else ""
            rows.append((str(stage), f"{first}-{last}" if last > first else str(first), text, used))
    rows.append(("", "ends", ends, ""))
    titles = ("stage", "layers", "strategy", "memory" if memory else "")
    stdout_console().print(plain_table(titles, rows, right=(3,)), markup=False)
