"""`fxpar plan --verify N`: the N best plans on local ranks, their predicted seconds beside the measured ones.

`python -m fxpar.cli.plan_verify FOLDER` is one of the ranks; the folder holds `job.json`, and rank 0 leaves
`measured.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import fxpar
from fxpar.batching import plan_batch
from fxpar.cli.console import human_seconds, print_table
from fxpar.cli.request import cluster_name
from fxpar.cost.cluster import ClusterSpec, measured_on
from fxpar.cost.group import group_cost
from fxpar.errors import PlanOptionError
from fxpar.models import load
from fxpar.models.loaded import LoadedModel
from fxpar.models.options import parse_assignments
from fxpar.profiling.record import check_measured, device_name
from fxpar.search.plan_file import Plan, parse_plan
from fxpar.search.verify import Factors, StepSeconds, VerifiedPlan, order_of, refit
from fxpar.train.config import OptimizerConfig
from fxpar.train.launch import run_ranks
from fxpar.train.model import model_vocab
from fxpar.train.optimize import make_optimizer
from fxpar.train.preflight import RANKS_PER_CORE
from fxpar.train.process import end_process
from fxpar.train.rank import choose_device
from fxpar.train.worker import JOB, end_with_launcher

MEASURED = "measured.json"
FREE_GB_PER_S = 1e9  # links that take no time


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
    folder = Path(tempfile.mkdtemp(prefix="fxpar-verify-"))  # stays if a rank fails: its error names the log
    (folder / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
    words = ("-m", "fxpar.cli.plan_verify", str(folder), str(os.getpid()))
    run_ranks(job.world, words, folder / "logs", quiet=True)
    found = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    return [VerifiedPlan(tuple(StepSeconds(*step) for step in steps)) for steps in found]


def show_verified(console: Console, plans: Sequence[VerifiedPlan], names: Sequence[str]) -> None:
    """Predicted beside measured, what the refit changes, and whether the order changes; plans have `names`."""
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
    for line in verdict(plans, factors, names):
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


# ------------------------------------------------------------------------------------------------------------- a rank
@record
def main() -> None:
    """Errors are left where torch's elastic launcher looks for them."""
    folder = Path(sys.argv[1])
    end_with_launcher(int(sys.argv[2]))
    data = json.loads((folder / JOB).read_text(encoding="utf-8"))
    job = VerifyJob.from_json(data)
    torch.set_num_threads(1)
    device = choose_device("auto", int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        found = [run_plan(job, parse_plan(text, "plan"), device) for text in job.plans]
        if dist.get_rank() == 0:
            (folder / MEASURED).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_plan(job: VerifyJob, plan: Plan, device: torch.device) -> list[tuple[float, float, float]]:
    """[compute_s, link_s, measured_s] of each mini-batch of random tokens; the first one is run before, unmeasured."""
    loaded = load(
        job.model, options=parse_assignments(job.options), dtype=job.dtype, seed=0, noise=False, device=device.type
    )
    vocab = known_ids(loaded)
    cluster = ClusterSpec.from_dict(job.cluster)
    model = fxpar.parallelize(
        loaded.model, plan=plan, loss=loaded.loss_fn, cluster=cluster, precision=job.precision, monitor=False
    )
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(lr=1e-5))
    alone = _compute_only(model, cluster)
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, lengths in enumerate((job.batches[0], *job.batches)):
        sequences = [torch.randint(0, vocab, (length,), generator=draw) for length in lengths]
        predicted_s = model.plan(sequences).predicted_s + job.optimizer_s
        measured_s = _timed(lambda: _step(model, optimizer, sequences), device)  # noqa: B023 (runs at once)
        compute_s = min(alone(lengths) + job.optimizer_s, predicted_s)
        if number:
            found.append((compute_s, predicted_s - compute_s, measured_s))
    return found


def known_ids(loaded: LoadedModel) -> int:
    """How many token ids the model surely knows. Where it does not say which table they index, they are those of its
    example: the largest table may be that of positions.
    """
    if callable(getattr(loaded.model, "get_input_embeddings", None)):
        return model_vocab(loaded.model) or 2
    return int(loaded.example_batch["input_ids"].max()) + 1


def _step(model: Any, optimizer: torch.optim.Optimizer, sequences: Sequence[Tensor]) -> None:
    model.train_step(sequences)
    optimizer.step()
    optimizer.zero_grad()


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - begun


def _compute_only(model: Any, cluster: ClusterSpec) -> Callable[[Sequence[int]], float]:
    """Seconds of a mini-batch as predicted for links that take no time."""
    session = model.fxpar_session
    engine = session.engine
    free = replace(cluster, intra_gb_per_s=FREE_GB_PER_S, inter_gb_per_s=FREE_GB_PER_S, latency_us=1e-6)
    costs = [group_cost(session.compiled.programs[name], free) for name in engine.names]

    def seconds(lengths: Sequence[int]) -> float:
        packed = engine.options.packed
        return plan_batch(lengths, engine.groups, costs, lambda *_: 0.0, packed=packed).predicted_s

    return seconds


if __name__ == "__main__":
    main()
    end_process(0)
