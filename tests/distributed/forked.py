"""Real ranks for tests: forked processes with gloo. (`mp.spawn` would import torch anew in each, seconds per rank.)"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_forked(world: int, work: Callable[[int], Any], timeout_s: float = 240.0) -> list[Any]:
    """`work(rank)` in `world` forked processes inside a gloo process group; results by rank. The first failure is
    raised.
    """
    torch.set_num_threads(1)  # before any op: a forked child cannot use its parent's thread pool
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_main, args=(rank, world, port, work, queue)) for rank in range(world)]
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in range(world):
            rank, ok, value = queue.get(timeout=timeout_s)
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]


def _main(rank: int, world: int, port: int, work: Callable[[int], Any], queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        value = work(rank)
        dist.barrier()
        queue.put((rank, True, value))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)
