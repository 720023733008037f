"""Two threads carry out a mini-batch on several ranks: any delays, no deadlock, errors of either thread."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest

from fxpar.runtime.streams import carry_out
from fxpar.schedule.mini_batch import GroupAction, blocking, overlapped
from tests.repeat import examples

RANKS = 3


def ranks_with_delays(plan, seed: int) -> list[list[GroupAction]]:
    """What each rank ended, in order; every action meets that of the other ranks, as a collective does."""
    meet = {action: threading.Barrier(RANKS, timeout=20) for action in plan.actions}
    ended: list[list[GroupAction]] = [[] for _ in range(RANKS)]
    errors = []

    def rank_main(rank: int) -> None:
        delays = random.Random(seed * RANKS + rank)

        def do(action: GroupAction) -> None:
            time.sleep(delays.choice((0, 0, 1e-4, 1e-3)))
            meet[action].wait()
            ended[rank].append(action)

        try:
            carry_out(plan, do, lambda _: nullcontext())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return ended


def test_random_delays_of_ranks_and_streams():
    draw = random.Random(0)
    for seed in range(examples(60)):
        plan = overlapped([draw.random() < 0.3 for _ in range(draw.randint(1, 5))])
        for ended in ranks_with_delays(plan, seed):
            assert sorted(ended) == sorted(plan.actions)
            place = {action: number for number, action in enumerate(ended)}
            for action in plan.actions:
                assert all(place[need] < place[action] for need in plan.needs.get(action, ()))
            for stream in (plan.compute, plan.transfer):
                assert [action for action in ended if action in stream] == list(stream)


def test_without_a_transfer_stream_everything_runs_in_this_thread():
    threads: set[int] = set()
    spent = carry_out(blocking(2), lambda _: threads.add(threading.get_ident()), lambda _: nullcontext())
    assert threads == {threading.get_ident()}
    assert sorted(spent) == sorted(blocking(2).actions)


def test_waiting_counts_as_time_of_what_is_waited_for():
    shown = []

    @contextmanager
    def showing(action):
        shown.append(str(action))
        yield

    def do(action):
        time.sleep(0.05 if action == GroupAction("switch", 0) else 0)

    spent = carry_out(overlapped([False, False]), do, showing)
    assert spent[GroupAction("switch", 0)] >= 0.04
    assert spent[GroupAction("switch", 1)] < 0.04
    assert shown[:3] == ["switch 0", "run 0", "switch 1"]


@pytest.mark.parametrize(
    "failing", [GroupAction("switch", 1), GroupAction("reduce", 0), GroupAction("run", 1)], ids=str
)
def test_the_error_of_either_thread_is_raised_and_ends_the_other(failing):
    plan, done, threads = overlapped([False] * 3), [], threading.active_count()

    def do(action):
        if action == failing:
            raise ValueError(f"{action} failed")
        done.append(action)

    with pytest.raises(ValueError, match=f"{failing} failed"):
        carry_out(plan, do, lambda _: nullcontext())
    for _ in range(200):
        if threading.active_count() == threads:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the thread of the transfers has not ended")
    assert GroupAction("run", 2) not in done
    assert GroupAction("reduce", 1) not in done
