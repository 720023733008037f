"""Messages between pipeline stages: in order, and a failure says which rank is missing."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fxpar.errors import RankError, TransferError
from fxpar.runtime.binding import _neighbours
from fxpar.runtime.channels import ProcessGroupChannels, ThreadChannels, ThreadWorld
from fxpar.runtime.forked import run_forked
from fxpar.transport.groups import ProcessGroups

CPU = torch.device("cpu")
LENGTHS = (3, 0, 70_000, 1, 5)  # of an empty tensor, and of one that gloo does not send in one piece


def messages(sender: int) -> Iterator[torch.Tensor]:
    for i, length in enumerate(LENGTHS):
        yield torch.full((length,), 100.0 * sender + i, dtype=torch.float64 if i % 2 else torch.float32)


def exchange(channels, rank: int, world: int) -> bool:
    """Everybody sends to everybody, receives are posted before, between and behind the sends."""
    others = [other for other in range(world) if other != rank]
    arriving = [(other, [(torch.empty_like(m), m) for m in messages(other)]) for other in others]
    received = [channels.receive(pairs[0][0], other) for other, pairs in arriving]
    sent = [(channels.send(m, other), m) for m in messages(rank) for other in others]
    received += [channels.receive(buffer, other) for other, pairs in arriving for buffer, _ in pairs[1:]]
    for work in received:
        work.wait()
    for work, _ in sent:
        work.wait()
    return all(torch.equal(buffer, message) for _, pairs in arriving for buffer, message in pairs)


# ------------------------------------------------------------------------------------------------------------- gloo
def test_gloo_keeps_the_order():
    def work(rank):
        channels = ProcessGroupChannels.make([], ProcessGroups(), CPU)
        return exchange(channels, rank, 3)

    assert run_forked(3, work) == [True] * 3


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_is_gone_is_named(how):
    """Who waits for rank 1 says so: at once where its process has ended, else after the timeout."""

    def work(rank):
        channels = ProcessGroupChannels.make([], ProcessGroups(timeout_s=1.0), CPU)
        buffer = torch.zeros(2)
        sent = channels.send(torch.ones(2), (rank + 1) % 3)
        channels.receive(buffer, (rank - 1) % 3).wait()
        sent.wait()
        if rank == 1:
            time.sleep(0.0 if how == "dies" else 3.0)
            os._exit(0)
        channels.receive(buffer, 1).wait()

    with pytest.raises(
        RankError, match=r"rank [02]: (?s:.)*TransferError: pipeline: transfer with rank\(s\) 1 failed: "
    ):
        run_forked(3, work, timeout_s=30)


def test_a_rank_that_is_not_there():
    def work(rank):
        channels = ProcessGroupChannels.make([], ProcessGroups(), CPU)
        with pytest.raises(TransferError, match=r"rank\(s\) 7 failed"):
            channels.send(torch.ones(2), 7)
        with pytest.raises(TransferError, match=r"rank\(s\) 7 failed"):
            channels.receive(torch.ones(2), 7)
        return True

    assert all(run_forked(2, work))


def test_groups_where_operations_run_in_order():
    """Not on the CPU: a process group for each pair and direction."""
    pairs = [(0, 1), (1, 0), (1, 2)]

    def work(rank):
        groups = ProcessGroups()
        device = torch.device("cuda")
        channels = ProcessGroupChannels.make(pairs, groups, device)
        again = ProcessGroupChannels.make(pairs, groups, device)
        same = all(channels.groups[pair] is again.groups[pair] for pair in pairs)
        made = [channels.groups[pair] is not None for pair in pairs]
        apart = channels.groups[0, 1] is not channels.groups[1, 0] if rank < 2 else True
        # gloo serves as well, so that what has been made can be used here.
        if rank < 2:
            sent = channels.send(torch.tensor([float(rank)]), 1 - rank)
            buffer = torch.empty(1)
            channels.receive(buffer, 1 - rank).wait()
            sent.wait()
            assert buffer.item() == 1 - rank
        return same, apart, made

    assert run_forked(3, work) == [
        (True, True, [True, True, False]),
        (True, True, [True, True, True]),
        (True, True, [False, False, True]),
    ]


def test_pairs_of_a_column():
    assert sorted(_neighbours((3, 7))) == [(3, 7), (7, 3)]
    assert sorted(_neighbours((0, 2, 4))) == [(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2)]


# ---------------------------------------------------------------------------------------------------------- threads
def test_threads_keep_the_order():
    world, found = ThreadWorld(), queue.Queue()
    threads = [
        threading.Thread(target=lambda r=rank: found.put(exchange(ThreadChannels(world, r), r, 3))) for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    assert [found.get(timeout=20) for _ in threads] == [True] * 3


def test_threads_send_a_copy():
    world, tensor, buffer = ThreadWorld(), torch.ones(2), torch.zeros(2)
    work = ThreadChannels(world, 0).send(tensor, 1)
    tensor.zero_()
    receive = ThreadChannels(world, 1).receive(buffer, 0)
    assert work.is_completed()
    assert receive.is_completed()
    receive.wait()
    assert buffer.tolist() == [1, 1]
    assert not ThreadChannels(world, 1).receive(buffer, 0).is_completed()


def test_threads_name_who_sends_nothing():
    channels = ThreadChannels(ThreadWorld(timeout_s=0.05), 1)
    with pytest.raises(TransferError, match=r"rank\(s\) 4 failed: nothing within 0 s"):
        channels.receive(torch.zeros(2), 4).wait()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2)], ids=str)
def test_threads_tell_a_wrong_shape(wrong):
    world = ThreadWorld()
    ThreadChannels(world, 0).send(wrong, 1)
    with pytest.raises(TransferError, match=r"rank\(s\) 0 failed: torch.* has come instead of .*\[2\]"):
        ThreadChannels(world, 1).receive(torch.zeros(2), 0).wait()
