"""Real ranks on this machine: forked processes with gloo (`mp.spawn` would import torch anew, seconds per rank)."""

from __future__ import annotations

import faulthandler
import io
import os
import queue
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpar.errors import RankError
from fxpar.torch_api.fork import forget_parent_threads

T = TypeVar("T")


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine on which ranks can make their store inside of the block, and nobody else will be.

    A port that was only looked up may be taken for a connection of another process before the store listens on it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: then both may have it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def run_forked(world: int, work: Callable[[int], T], timeout_s: float = 240.0) -> list[T]:
    """`work(rank)` in `world` forked processes inside a gloo process group; results (pickled) by rank.

    Call `torch.set_num_threads(1)` before the first op of this process: a forked child cannot use its parent's threads.
    Raises RankError for a rank that a signal ended, else for the first one that fails, or for those that are not done
    within `timeout_s`: with the lines of Python at which they stood.
    """
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    results_queue = context.Queue()
    with reserved_port() as port, ExitStack() as files:
        stacks = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        ranks = [
            context.Process(target=_main, args=(rank, world, port, work, results_queue, stacks[rank]))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        results: dict[int, T] = {}
        try:
            while len(results) < world:
                rank, ok, blob = _next_result(results_queue, ranks, stacks, timeout_s)
                if not ok:
                    raise RankError(str(rank), blob)
                results[rank] = torch.load(io.BytesIO(blob), weights_only=False)  # of a child of this very process
        except queue.Empty:
            missing = [rank for rank in range(world) if rank not in results]
            where = "".join(f"\nrank {rank}:\n{_stack(ranks[rank], stacks[rank])}" for rank in missing)
            raise RankError(", ".join(map(str, missing)), f"not done within {timeout_s:.0f} s{where}") from None
        finally:
            for process in ranks:
                process.join(5 if len(results) == world else 1)
                if process.is_alive():
                    process.kill()
    return [results[rank] for rank in range(world)]


def _next_result(
    results: Any, ranks: Sequence[Any], stacks: Sequence[TextIO], timeout_s: float
) -> tuple[int, bool, Any]:
    """(rank, whether it succeeded, its result or error). Raises queue.Empty if none comes within `timeout_s`, and
    RankError once a signal has ended a rank: what the others say of that is of less use.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            result = results.get(timeout=min(1.0, timeout_s))
        except queue.Empty:
            result = None
        for rank, process in enumerate(ranks):
            if (process.exitcode or 0) < 0:
                how = signal.Signals(-process.exitcode).name
                raise RankError(str(rank), f"ended by {how}\n{_stack(process, stacks[rank])}")
        if result is not None:
            return result
        if time.monotonic() >= end_s:
            raise queue.Empty


def _stack(process: Any, file: TextIO) -> str:
    """Where a rank stands; empty if it does not answer."""
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handler of that process writes, from C
    file.seek(0)
    return file.read() or "no longer there"


def _main(rank: int, world: int, port: int, work: Callable[[int], Any], results: Any, stack: TextIO) -> None:
    forget_parent_threads()
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
