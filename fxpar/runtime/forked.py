"""Real ranks on this machine: forked processes with gloo (`mp.spawn` would import torch anew, seconds per rank)."""

from __future__ import annotations

import io
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpar.errors import RankError
from fxpar.torch_api.fork import forget_compile_threads

T = TypeVar("T")


def run_forked(world: int, work: Callable[[int], T], timeout_s: float = 240.0) -> list[T]:
    """`work(rank)` in `world` forked processes inside a gloo process group; results (pickled) by rank.

    Call `torch.set_num_threads(1)` before the first op of this process: a forked child cannot use its parent's threads.
    Raises RankError for the first rank that fails, or for those that are not done within `timeout_s`.
    """
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    results_queue = context.Queue()
    ranks = [context.Process(target=_main, args=(rank, world, port, work, results_queue)) for rank in range(world)]
    for process in ranks:
        process.start()
    results: dict[int, T] = {}
    try:
        while len(results) < world:
            rank, ok, blob = results_queue.get(timeout=timeout_s)
            if not ok:
                raise RankError(str(rank), blob)
            results[rank] = torch.load(io.BytesIO(blob), weights_only=False)
    except queue.Empty:
        missing = ", ".join(str(r) for r in range(world) if r not in results)
        raise RankError(missing, f"not done within {timeout_s:.0f} s") from None
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]


def _main(rank: int, world: int, port: int, work: Callable[[int], Any], results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    forget_compile_threads()
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        buffer = io.BytesIO()
        torch.save(work(rank), buffer)
        dist.barrier()
        results.put((rank, True, buffer.getvalue()))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # the parent's atexit handlers are not this process' to run
