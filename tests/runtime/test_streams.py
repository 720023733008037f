"""Two threads carry out a mini-batch on several ranks: any delays, no deadlock, errors of either thread."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext

import pytest

from fxpar.runtime.arrivals import Arrivals, Handed
from fxpar.runtime.streams import carry_out
from fxpar.schedule import KINDS, Action, Send, Wait, schedule, with_transfers
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


PHASES = 3  # of a switch or a reduction


class _Rank:
    """A rank whose groups are pipelines or plain runs: weights are waited for in the first forward of a stage, and its
    last backward hands gradients over. Phases of transfers meet those of the ranks that take part in them.
    """

    def __init__(self, rank, plan, pipelines, world, delays):
        self.rank, self.pipelines, self.world, self.delays = rank, pipelines, world, delays
        self.weights = {group: Arrivals() for group in pipelines}
        self.gradients = {group: Handed() for group in pipelines}

    def do(self, action):
        if action.kind == "run":
            with self.gradients[action.group].arrivals.coming():
                self._run(action.group)
        elif action.kind == "switch":
            with self.weights[action.group].coming():
                for phase in range(PHASES):
                    self._meet(action, phase)
                    self.weights[action.group].came([f"{phase}"])
        else:
            for phase in range(PHASES):
                if self.world.has(self.rank, action.group, phase):
                    assert self.gradients[action.group][f"{phase}"] == self.rank
                self._meet(action, phase)

    def _meet(self, action, phase):
        self._pause()
        if self.rank in self.world.members(action, phase):
            self.world.meetings[action, phase].wait()

    def _run(self, group):
        pipeline = self.pipelines[group]
        steps = [Action("F", 0, 0), Action("B", 0, 0)] if pipeline is None else with_transfers(pipeline)[self.rank]
        ends = {step.stage: step for step in steps if isinstance(step, Action) and step.part in "BW"}
        for step in steps:
            self._pause()
            if isinstance(step, Send):
                self.world.queue_of(group, step.transfer).put(None)
            elif isinstance(step, Wait):
                self.world.queue_of(group, step.transfer).get(timeout=20)
            elif isinstance(step, Action) and step.part == "F" and not step.micro_batch:
                for phase in range(PHASES):
                    self.weights[group].wait(f"{phase}")
            elif step in ends.values() and step.stage == max(ends):
                for phase in range(PHASES):
                    self._pause()
                    self.gradients[group].came({f"{phase}": self.rank})

    def _pause(self):
        if self.delays.random() < 0.3:
            time.sleep(self.delays.choice((0, 1e-4, 1e-3)))


class _World:
    """Who takes part in which phase, drawn at random; everybody meets at the last one."""

    def __init__(self, plan, draw):
        self.queues, self._lock = defaultdict(queue.Queue), threading.Lock()
        self._of = {
            (action, phase): range(RANKS) if phase == PHASES - 1 else draw.sample(range(RANKS), draw.randint(1, RANKS))
            for action in plan.transfer
            for phase in range(PHASES)
        }
        self.meetings = {key: threading.Barrier(len(ranks), timeout=20) for key, ranks in self._of.items()}

    def queue_of(self, group, transfer):
        """Made by whoever comes first; without the lock both sides might make one, and a message be lost."""
        with self._lock:
            return self.queues[group, transfer]

    def members(self, action, phase):
        return self._of[action, phase]

    def has(self, rank, group, phase):
        return rank in self._of[GroupAction("reduce", group), phase] and (rank + group + phase) % 3 > 0


def test_random_delays_of_pipelines():
    """No rank waits for ever, whatever stage comes late, and whichever ranks a phase of a transfer concerns."""
    draw = random.Random(1)
    for seed in range(examples(25)):
        plan = overlapped([draw.random() < 0.3 for _ in range(draw.randint(1, 4))])
        pipelines = {
            group: None if draw.random() < 0.2 else schedule(kind, RANKS, RANKS * draw.randint(1, 2), virtual=virtual)
            for group in range(len(plan.compute))
            for kind, virtual in [draw.choice([*((kind, 1) for kind in KINDS), ("interleaved_1f1b", 2)])]
        }
        world, errors = _World(plan, draw), []

        def rank_main(rank, plan=plan, pipelines=pipelines, world=world, errors=errors, seed=seed):
            try:
                one = _Rank(rank, plan, pipelines, world, random.Random(seed * RANKS + rank))
                carry_out(plan, one.do, lambda _: nullcontext())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert not any(one.qsize() for one in world.queues.values())


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
