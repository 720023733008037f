"""`fxpar plan --verify N`: the N best plans on local ranks, their predicted seconds beside the measured ones.

What starts ranks is imported where it is needed: few plans are run.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fxpar.cli.console import human_seconds, print_table
from fxpar.cli.request import cluster_name
from fxpar.cost.cluster import measured_on
from fxpar.errors import PlanOptionError
from fxpar.profiling.record import check_measured, device_name
from fxpar.search.plan_file import parse_plan
from fxpar.search.verify import Factors, StepSeconds, VerifiedPlan, order_of, refit

MEASURED = "measured.json"
FAR_OFF = 0.15  # of the predicted time: the mean error on a machine that was profiled is below that (benchmarks)


@dataclass(frozen=True)
class VerifyJob:
    """What ranks run: plans as TOML, the mini-batches that they were predicted for, by lengths, and the figures that
    they were predicted with; `optimizer_s` is that of the prediction.
    """

    model: str
    options: Sequence[str]
    dtype: str
    precision: str | None
    plans: Sequence[str]
    batches: tuple[tuple[int, ...], ...]
    cluster: dict[str, Any]
    optimizer_s: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> VerifyJob:
        """The inverse of `asdict`, through JSON."""
        data["batches"] = tuple(map(tuple, data["batches"]))
        return cls(**data)

    @property
    def world(self) -> int:
        return parse_plan(self.plans[0], "plan 1").world


def kind_here(world: int) -> str:
    """The kind of device that so many ranks get on this machine."""
    return "cuda" if torch.cuda.device_count() >= world else "cpu"


def check_verify(count: int, world: int, is_file: bool, cluster: str | None) -> None:
    """Find out before the search that plans cannot run here, or that the figures of the file `cluster` were measured
    on another device. Raises PlanOptionError, MeasuredElsewhereError.
    """
    from fxpar.train.preflight import RANKS_PER_CORE

    cores, devices = os.cpu_count() or 1, torch.cuda.device_count()
    if world > max(RANKS_PER_CORE * cores, devices):
        why = f"plans for {world:,} ranks cannot run on this machine, which has {cores} cores and {devices} GPUs"
        raise PlanOptionError("--verify", count, why)
    if is_file:
        raise PlanOptionError("--verify", count, "a graph file has no weights to run; name its model")
    if cluster is not None:
        check_measured(cluster, torch.device(kind_here(world)))


def other_devices(cluster: str | None, world: int) -> list[str]:
    """A line that says so, if plans are predicted with figures of `cluster` that were not measured on what runs them.
    Raises ClusterError.
    """
    if cluster is None or measured_on(cluster) is not None:  # those of another device are refused
        return []
    here = device_name(torch.device(kind_here(world)))
    return [
        f"plans were predicted for {cluster_name(cluster)}, and run on {world} ranks of {here}, where these figures "
        "were not measured: ratios and factors compare the two, and a plan that is fastest here may not be so there"
    ]


def verified(job: VerifyJob) -> list[VerifiedPlan]:
    """Run the plans on local ranks, one after the other. Raises as `run_ranks` does."""
    from fxpar.train.launch import run_ranks
    from fxpar.train.worker import JOB

    folder = Path(tempfile.mkdtemp(prefix="fxpar-verify-"))  # stays if a rank fails: its error names the log
    (folder / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
    words = ("-m", "fxpar.cli.plan_verify_rank", str(folder), str(os.getpid()))
    run_ranks(job.world, words, folder / "logs", quiet=True)
    found = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    return [VerifiedPlan(tuple(StepSeconds(*step) for step in steps)) for steps in found]


def show_verified(
    console: Console, plans: Sequence[VerifiedPlan], names: Sequence[str], cluster: str | None = None
) -> None:
    """Predicted for `cluster` beside measured, what the refit changes, and whether the order changes; plans have
    `names`.
    """
    factors = refit(plans)
    rows = [
        (
            name,
            human_seconds(plan.predicted_s),
            human_seconds(plan.measured_s),
            f"{plan.measured_s / plan.predicted_s:.3g}",
            human_seconds(plan.refitted_s(factors)),
            f"{plan.refitted_s(factors) / plan.measured_s - 1:+.1%}",
        )
        for name, plan in zip(names, plans, strict=True)
    ]
    console.print()
    titles = ("", "predicted", "measured", "ratio", "refitted", "error")
    print_table(console, titles, rows, right=(1, 2, 3, 4, 5))
    for line in (*far_off(plans, names, cluster), *verdict(plans, factors, names)):
        console.print(line, markup=False)


def verdict(plans: Sequence[VerifiedPlan], factors: Factors, names: Sequence[str]) -> list[str]:
    """What changed, in words."""
    if len(factors.fitted) == 2:
        fit = f"compute takes {factors.compute:.3g} times the predicted time, links {factors.link:.3g} times"
    else:
        fit = f"a step takes {factors.compute:.3g} times the predicted time (compute and links cannot be told apart)"
    lines = [f"refitted: {fit}"]
    for what, seconds in (
        ("refitted", [plan.refitted_s(factors) for plan in plans]),
        ("measured", [plan.measured_s for plan in plans]),
    ):
        order = order_of(seconds)
        if len(plans) > 1:
            stays = order == list(range(len(plans)))
            ordered = ", ".join(names[index] for index in order)
            lines.append(f"order {what}: " + ("as predicted" if stays else f"{ordered}, fastest first"))
    return lines


def far_off(plans: Sequence[VerifiedPlan], names: Sequence[str], cluster: str | None) -> list[str]:
    """A line that says so, and what to do, if some took much longer or shorter than predicted for `cluster` (None:
    usual devices).
    """
    ratios = [plan.measured_s / plan.predicted_s for plan in plans]
    if all(abs(ratio - 1) <= FAR_OFF for ratio in ratios):
        return []
    worst = max(range(len(plans)), key=lambda index: abs(math.log(ratios[index])))
    if cluster is None:
        do = "measure this machine with fxpar profile and name its file with --cluster"
    elif measured_on(cluster) is None:
        do = f"figures of {cluster} were not measured here: name a file that fxpar profile makes on this machine"
    else:
        do = f"measure it anew, while nothing else runs here: fxpar profile -o {shlex.quote(cluster)} --force"
    return [f"more than {FAR_OFF:.0%} off: {names[worst]} took {ratios[worst]:.3g} times the predicted time; {do}"]


def verified_json(plans: Sequence[VerifiedPlan]) -> dict[str, Any]:
    """What `--json` writes of it."""
    factors = refit(plans)
    return {
        "plans": [
            {
                "predicted_s": plan.predicted_s,
                "measured_s": plan.measured_s,
                "refitted_s": plan.refitted_s(factors),
                "steps": [asdict(step) for step in plan.steps],
            }
            for plan in plans
        ],
        "compute_factor": factors.compute,
        "link_factor": factors.link,
        "fitted": list(factors.fitted),
    }
