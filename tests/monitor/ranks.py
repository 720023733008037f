"""Forked gloo ranks of which one is lost; what the others report comes back through files."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpar.errors import PeerLostError
from fxpar.monitor import Monitor
from fxpar.runtime.forked import reserved_port
from fxpar.torch_api.fork import forget_parent_threads

TIMEOUT_S = 2.0
INTERVAL_S = 0.25
LEAVE_S = 4.0
SWITCH = "step 12, switch dp4 -> dp2.tp2"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(100)


def fail() -> None:
    raise ValueError("the data is bad")


def cut() -> None:
    """The connection of the pair breaks, see `_main`; both ends live."""
    for descriptor in _PAIR:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


_PAIR: list[int] = []  # descriptors of the connection between the victim and the rank after it, in the victim


def lose_one(
    folder: Path,
    world: int,
    victim: int,
    how: Callable[[], None],
    wait_for_victim: bool = False,
    group_timeout_s: float = TIMEOUT_S,
    apart_s: float = 0.0,
) -> list:
    """Each rank's report `{error, ranks, kind, text, seconds, cause}` by rank; None for one that wrote nothing.

    All ranks exchange with their neighbours, then reduce; the victim calls `how` when its neighbours have begun to
    send to it. Fails if a survivor does not end. `group_timeout_s` is that of the process group, and rank n leaves
    n * `apart_s` later.
    """
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    with reserved_port() as port:
        arguments = (folder, world, victim, how, port, group_timeout_s, apart_s)
        ranks = [context.Process(target=_main, args=(rank, *arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            for rank, process in enumerate(ranks):
                if rank != victim or wait_for_victim:
                    process.join(25)
                    assert not process.is_alive(), f"rank {rank} did not end"
        finally:
            for process in ranks:
                process.kill()
                process.join()
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _main(
    rank: int,
    folder: Path,
    world: int,
    victim: int,
    how: Callable[[], None],
    port: int,
    group_timeout_s: float,
    apart_s: float,
) -> None:
    forget_parent_threads()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout_s))
    pair = _make_pair(rank, victim, (victim + 1) % world)
    report: dict = {"error": "none"}
    began = time.monotonic()

    def end(lost: PeerLostError) -> None:
        found = {"error": type(lost).__name__, "ranks": list(lost.ranks), "kind": lost.kind, "text": str(lost)}
        found |= {"cause": "ended", "seconds": time.monotonic() - began}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(1)

    options = {"interval_s": INTERVAL_S, "timeout_s": TIMEOUT_S, "leave_s": LEAVE_S + rank * apart_s}
    try:
        with Monitor.of_world(**options, end=end) as monitor:
            data = torch.ones(1_000_000)
            monitor.phase("warm up")
            dist.all_reduce(data)
            with monitor.phase(SWITCH):
                time.sleep(2 * INTERVAL_S)
                began = time.monotonic()
                if rank == victim:
                    time.sleep(0.1)
                    how()
                if how is cut and rank in (victim, (victim + 1) % world):
                    time.sleep(0.2)
                    dist.all_reduce(data, group=pair)
                right, left = (rank + 1) % world, (rank - 1) % world
                pair = [dist.P2POp(dist.isend, data, right), dist.P2POp(dist.irecv, torch.empty_like(data), left)]
                for work in dist.batch_isend_irecv(pair):
                    work.wait()
                dist.all_reduce(data)
    except PeerLostError as error:
        cause = type(error.__cause__).__name__
        report = {"error": type(error).__name__, "ranks": list(error.ranks), "kind": error.kind, "text": str(error)}
        report["cause"] = cause
    except BaseException as error:
        report = {"error": type(error).__name__, "text": str(error)}
    report["seconds"] = time.monotonic() - began
    (folder / f"{rank}.json").write_text(json.dumps(report))
    os._exit(0)


def _make_pair(rank: int, victim: int, after: int) -> dist.ProcessGroup | None:
    """A group of the victim and the rank after it; the victim keeps the descriptors of its connections."""
    before = _sockets()
    pair = dist.new_group([victim, after])
    if rank in (victim, after):
        dist.barrier(group=pair)
    if rank == victim:
        _PAIR[:] = [descriptor for descriptor in _sockets() - before if _is_connected(descriptor)]
    return pair


def _sockets() -> set[int]:
    links = {descriptor: Path(f"/proc/self/fd/{descriptor}") for descriptor in map(int, os.listdir("/proc/self/fd"))}
    return {descriptor for descriptor, link in links.items() if link.is_socket()}


def _is_connected(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        try:
            found.getpeername()
        except OSError:
            return False
    return True
