"""Two threads carry out a mini-batch on several ranks: any delays, no deadlock, errors of either thread."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest

from fxpar.runtime.arrivals import Arrivals
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
            carry_out(plan, fed(plan, do), lambda _: nullcontext())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return ended


def fed(plan, do):
    """`do` where an action ends after the one that feeds it, with its error if it fails."""
    arrivals = {action: Arrivals() for action in plan.fed_by.values()}

    def feeding(action):
        with arrivals[action].coming() if action in arrivals else nullcontext():
            do(action)
            if action in plan.fed_by:
                arrivals[plan.fed_by[action]].wait_for_all()

    return feeding


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
    assert shown[:3] == ["run 0", "switch 0", "run 1"]  # the run would wait inside


AFTER = {
    "switch 1": {"switch 0", "run 0", "run 1"},
    # `reduce 1` has begun, and learns here only that nothing comes.
    "run 1": {"switch 0", "run 0", "switch 1", "reduce 0", "switch 2", "reduce 1"},
}


@pytest.mark.parametrize("failing", ["switch 1", "reduce 0", "run 1"])
def test_the_error_of_either_thread_is_raised_when_nothing_is_under_way(failing):
    """Where the compute thread fails, the transfers that need nothing more from it are done: the same on all ranks."""
    plan, done, shown, threads = overlapped([False] * 3), [], [], threading.active_count()

    def do(action):
        time.sleep(0.01)
        if str(action) == failing:
            raise ValueError(f"{action} failed")
        done.append(str(action))

    @contextmanager
    def showing(action):
        shown.append(str(action))
        try:
            yield
        except ValueError:
            shown.append("error")
            raise

    with pytest.raises(ValueError, match=f"{failing} failed"):
        carry_out(plan, fed(plan, do), showing)
    assert threading.active_count() == threads
    assert shown[shown.index("error") - 1] == {"switch 1": "run 1"}.get(failing, failing)  # the run waits for it inside
    assert set(done) == AFTER.get(failing, set(done) - {"reduce 0", "switch 2", "run 2"})
    if failing == "run 1":
        assert shown[shown.index("error") + 1 :] == ["switch 1", "reduce 0", "switch 2", "reduce 1", "reduce 2"]


def test_what_the_compute_thread_waits_for_may_have_ended_before_the_error():
    """`reduce 0` fails while run 1 is under way, and only run 2 asks for what comes after it."""
    shown = []

    @contextmanager
    def showing(action):
        shown.append(str(action))
        yield

    def do(action):
        time.sleep({"run 1": 0.05}.get(str(action), 0))
        if str(action) == "reduce 0":
            raise ValueError("reduce 0 failed")

    plan = overlapped([False] * 3)
    with pytest.raises(ValueError, match="reduce 0 failed"):
        carry_out(plan, fed(plan, do), showing)
    assert shown[:5] == ["run 0", "switch 0", "run 1", "switch 1", "reduce 0"]


def test_an_interrupt_waits_for_a_transfer_but_not_for_ever(monkeypatch):
    monkeypatch.setattr("fxpar.runtime.streams.INTERRUPTED_S", 0.1)
    hangs = threading.Event()

    def do(action):
        if str(action) == "switch 1":
            hangs.wait()
        if str(action) == "run 0":
            raise KeyboardInterrupt

    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        carry_out(overlapped([False] * 2), do, lambda _: nullcontext())
    assert time.perf_counter() - begun < 5
    hangs.set()
