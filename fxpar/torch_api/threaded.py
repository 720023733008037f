"""A whole world of ranks in one process: every rank a thread, with torch's threaded process group (CPU, for checks)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def _end_others(group: Any, error: BaseException) -> None:
    """Wake the ranks that wait in a collective; torch walks a dict for that which they may be changing."""
    for _ in range(100):
        try:
            group.exception_handle(error)
            return
        except RuntimeError:
            continue


def run_threads(world: int, work: Callable[[int], T], timeout_s: float = 600.0) -> list[T]:
    """`work(rank)` on `world` threads inside a default process group; results by rank.

    The first rank that raises ends the others and its error is raised here; RuntimeError after `timeout_s`. Must not be
    called inside another process group.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as pg  # noqa: TID251

    if dist.is_initialized():
        raise RuntimeError("a process group is initialised already; run the check in a process of its own")
    isolate: Any = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009 - not in the stubs
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = work(rank)
            dist.barrier()
        except BaseException as error:
            errors[rank] = error
            _end_others(pg.ProcessLocalGroup, error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    hook = sys.excepthook  # each process group puts a prefix with its rank before what is printed
    pg._install_threaded_pg()
    isolate(True)
    pg.ProcessLocalGroup.reset()
    threads = [threading.Thread(target=main, args=(rank,), daemon=True, name=f"rank{rank}") for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
    finally:
        pg.ProcessLocalGroup.reset()
        isolate(False)
        pg._uninstall_threaded_pg()
        sys.excepthook = hook
    # A rank that was ended because another failed reports SystemExit; the cause is the other one.
    for error in sorted(errors.values(), key=lambda e: isinstance(e, SystemExit)):
        raise error
    if len(results) != world:
        missing = sorted(set(range(world)) - set(results))
        raise RuntimeError(f"ranks {missing} did not finish within {timeout_s:.0f} s")
    return [results[rank] for rank in range(world)]
