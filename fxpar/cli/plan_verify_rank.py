"""`python -m fxpar.cli.plan_verify_rank FOLDER LAUNCHER`: one of the ranks of `fxpar plan --verify`.

The folder holds `job.json`, and rank 0 leaves `measured.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import fxpar
from fxpar.batching import plan_batch
from fxpar.cli.plan_verify import MEASURED, VerifyJob
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import group_cost
from fxpar.models import load
from fxpar.models.loaded import LoadedModel
from fxpar.models.options import parse_assignments
from fxpar.search.plan_file import Plan, parse_plan
from fxpar.train.config import OptimizerConfig
from fxpar.train.model import model_vocab
from fxpar.train.optimize import make_optimizer
from fxpar.train.process import end_process
from fxpar.train.rank import choose_device
from fxpar.train.worker import JOB, end_with_launcher

FREE_GB_PER_S = 1e9  # links that take no time


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
