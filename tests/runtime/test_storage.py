"""The memory that a session plans with, against what its steps allocate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxpar.cost.cluster import usual_cluster
from fxpar.cost.device import CPU
from fxpar.errors import MemoryBudgetError, StagingBytesError
from fxpar.runtime import storage
from fxpar.runtime.forked import run_forked
from fxpar.store import MemoryReport
from fxpar.store.home import ParamSpec
from tests.memory.measured import peak_bytes
from tests.runtime.hot import make_llama, parallel, precompile

STRATEGIES = {64: "dp2", 128: "pp2", 256: "tp2+sp"}
TOKENS = 512  # of a micro-batch
STAGING = 1 << 16  # less than the gradients of a graph
# Kernels so dear to start that no micro-batch is smaller than it must be.
CLUSTER = replace(usual_cluster(2, 2, "cpu"), device=replace(CPU, launch_us=1e4))


def make():
    return make_llama(layers="2", dim="32", heads="4", kv_heads="4", ffn="64")


def measured(limit: int, strategy: str) -> tuple[int, MemoryReport]:
    """Bytes that a step takes at its peak above what was there before it, gradients at home too, and the report."""
    options = {"token_budget": TOKENS, "staging_bytes": STAGING, "cluster": CLUSTER}
    model = parallel(make, strategies={limit: strategy}, **options)
    replicas = 2 if strategy == "dp2" else 1
    batch = [torch.arange(limit) % 97] * (2 * replicas * TOKENS // limit)
    model.train_step(batch)  # kernels allocate scratch that they keep, the first time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        report = model.train_step(batch)
    assert report.groups[0].micro_batches == 2
    return peak_bytes(profiler), model.memory


def work(rank: int) -> dict[str, tuple[int, MemoryReport]]:
    found = {strategy: measured(limit, strategy) for limit, strategy in STRATEGIES.items()}
    needed = found["dp2"][1]

    def made(**options) -> MemoryReport:
        options = {"strategies": {64: "dp2"}, "token_budget": TOKENS, "staging_bytes": STAGING, **options}
        return parallel(make, **options).memory

    with pytest.raises(StagingBytesError, match=r"staging_bytes = 100 is too small: .* Give 1,024 bytes or more"):
        made(staging_bytes=100)
    assert made(memory_budget_bytes=needed.total_bytes) == needed
    too_small = needed.total_bytes - 1
    with pytest.raises(MemoryBudgetError, match=r"lower token_budget(.|\n)*activations"):
        made(memory_budget_bytes=too_small)
    half = made(memory_budget_bytes=too_small, token_budget=TOKENS // 2)
    assert half.activation_bytes < 0.6 * needed.activation_bytes
    # A sequence alone in its row: a micro-batch has no more tokens than the longest sequence, whatever the budget.
    assert made(packed=False).activation_bytes == made(token_budget=None).activation_bytes
    assert made(strategies=STRATEGIES).activation_bytes == max(report.activation_bytes for _, report in found.values())
    return found


@pytest.mark.parametrize(("shape", "row_bytes", "least"), [((64, 9, 5), 180, 768), ((8, 40), 32, 256), ((), 4, 256)])
def test_less_than_a_row_each_way_in_two_buckets_is_refused(shape, row_bytes, least):
    """As its master has it, along the longest dim; a message begins at a multiple of 64 bytes."""
    specs = [ParamSpec("small", (2, 2), torch.bfloat16), ParamSpec("weight", shape, torch.bfloat16)]
    if not shape:
        specs = specs[1:]
    storage.check_staging(specs, least)
    why = f"staging_bytes = {least - 1} is too small: a row of 'weight' has {row_bytes} bytes, .* Give {least} bytes or"
    with pytest.raises(StagingBytesError, match=why):
        storage.check_staging(specs, least - 1)


@pytest.mark.parametrize(("count", "nodes", "overlaps"), [(1, 1, False), (1, 2, True), (2, 1, True)])
def test_one_group_overlaps_between_nodes_only(count, nodes, overlaps, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    cluster = usual_cluster(2 * nodes, 2, "cpu")
    assert storage.may_overlap(count, torch.device("cpu"), None, cluster) == overlaps


def test_a_step_takes_what_was_predicted_and_no_budget_is_below_that():
    precompile(make, STRATEGIES)
    ranks = run_forked(2, work)
    for strategy in STRATEGIES.values():
        taken, (report, *_) = zip(*(found[strategy] for found in ranks), strict=True)
        predicted = report.activation_bytes + report.gradient_bytes
        assert predicted <= max(taken), strategy
        # Gloo takes copies of its own in collectives and messages of a graph, which a network card would not.
        slack = {"dp2": report.staging_bytes, "pp2": 0.03 * predicted, "tp2+sp": 0.5 * predicted}[strategy]
        assert max(taken) <= predicted + slack, strategy
