"""Run code as `torchrun --nproc-per-node N` would, in forked ranks of this process: nothing is imported again."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict

from fxpar.runtime.forked import reserved_port, run_forked
from tests import warm  # noqa: F401

# Loads what optimizers and DTensor import lazily: here once, and not in every forked rank (seconds each).
torch.compiler.list_backends()


def run_ranks(ranks: int, body: Callable[[int], None], timeout_s: float = 240.0) -> list[str]:
    """`body(rank)` with the environment that torchrun sets and no process group; what each rank printed."""
    # As under torchrun the store outlives the ranks: one that ends first takes nothing from the others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(rank: int) -> str:
        dist.barrier()
        dist.destroy_process_group()  # the page makes its own
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            body(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.update(MASTER_PORT=str(again), TORCHELASTIC_USE_AGENT_STORE="False")
        dist.init_process_group("gloo", rank=rank, world_size=ranks)  # `run_forked` ends with a barrier
        return said.getvalue()

    with reserved_port() as again:
        return run_forked(ranks, work, timeout_s)
