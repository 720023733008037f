"""Run code as `torchrun --nproc-per-node N` would, in forked ranks of this process: nothing is imported again."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from fxpar.runtime.forked import run_forked


def run_ranks(ranks: int, body: Callable[[int], None], timeout_s: float = 240.0) -> list[str]:
    """`body(rank)` with the environment that torchrun sets and no process group; what each rank printed."""
    ports = [_free_port(), _free_port()]

    def work(rank: int) -> str:
        dist.destroy_process_group()  # the page makes its own
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]),
        )  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            body(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(ports[1])
        dist.init_process_group("gloo", rank=rank, world_size=ranks)  # `run_forked` ends with a barrier
        return said.getvalue()

    return run_forked(ranks, work, timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
