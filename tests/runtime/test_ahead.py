"""The plan of the next mini-batch is made while this one runs, and is the same as without."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from fxpar.batching import BatchPlan
from fxpar.errors import MiniBatchesError, ReusedMiniBatchError, SequenceTooLongError
from fxpar.runtime.ahead import DrawnAhead, PlansAhead
from tests.runtime.hot import World, parallel, precompile, sequences, small

TWO = {64: "dp2", 512: "tp2+sp"}
PAIR = World(2, lambda: precompile(small, TWO))
BATCHES = [sequences(seed, (5, 60, 33, 130, 8)) for seed in range(3)]


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "fxpar-plan"]


# ------------------------------------------------------------------------------------------------------ without ranks
def test_a_plan_is_of_just_these_lengths():
    plans, made = PlansAhead(), [((5, 3), BatchPlan(())), ((5, 4), BatchPlan(())), ((5, 4), BatchPlan(()))]
    plans.begin(lambda: made[0])
    plans.begin(lambda: made[1])
    assert plans.take((5,)) is None
    assert plans.take((5, 4)) is made[1][1]
    assert plans.take((5, 4)) is None
    assert plans.take((5, 3)) is made[0][1]
    for number in range(3):
        plans.begin(lambda number=number: made[number])
    assert plans.take((5, 3)) is None  # two are kept
    plans.clear()
    assert plans.take((5, 4)) is None
    assert not threads()


def test_what_a_thread_cannot_plan_is_left_to_the_step():
    plans = PlansAhead()
    plans.begin(lambda: 1 // 0)
    assert plans.take(()) is None


def test_a_plan_that_takes_long_is_waited_for():
    plans, plan = PlansAhead(), BatchPlan(())
    plans.begin(lambda: time.sleep(0.2) or ((), plan))
    assert threads()
    assert plans.take(()) is plan
    assert not threads()


def test_a_process_that_ends_waits_for_its_plan():
    """Not ended by a signal because a thread of it is still in native code."""
    text = (
        "import sys, time, torch\n"
        "from fxpar.runtime.ahead import PlansAhead\n"
        "PlansAhead().begin(lambda: [time.sleep(0.3), print('planned'), torch.ones(3).sum()])\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "planned\n"), done.stderr


class Loader:
    """Counts up; its state is the next number."""

    def __init__(self, stop: int = 4, bad: int = -1) -> None:
        self.next, self.stop, self.bad = 0, stop, bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.stop:
            raise StopIteration
        if self.next == self.bad:
            raise ValueError("no such file")
        self.next += 1
        return [self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_each_mini_batch_is_drawn_and_begun_before_the_one_before_it_is_handed_out():
    begun, seen = [], []
    for batch in DrawnAhead(Loader(), begun.append):
        seen.append((batch, list(begun)))
    assert seen == [([0], [[1]]), ([1], [[1], [2]]), ([2], [[1], [2], [3]]), ([3], [[1], [2], [3]])]


def test_the_state_is_that_after_what_was_handed_out():
    ahead = DrawnAhead(Loader(), lambda found: None)
    assert ahead.state_dict() == {"next": 0}
    assert [next(ahead), next(ahead)] == [[0], [1]]
    state = ahead.state_dict()
    assert state == {"next": 2}
    again = DrawnAhead(Loader(), lambda found: None)
    next(again)
    again.load_state_dict(state)
    assert list(again) == [[2], [3]]
    assert again.state_dict() == {"next": 4}
    with pytest.raises(AttributeError, match="state_dict"):
        DrawnAhead([[0]], print).state_dict()


def test_an_error_of_drawing_comes_with_its_mini_batch():
    ahead = DrawnAhead(Loader(bad=2), lambda found: None)
    assert [next(ahead), next(ahead)] == [[0], [1]]
    with pytest.raises(ValueError, match="no such file"):
        next(ahead)


def test_a_loop_goes_on_where_it_stopped_and_begins_anew_after_the_end():
    ahead = DrawnAhead([[0], [1], [2]], lambda found: None)
    assert next(iter(ahead)) == [0]
    assert list(ahead) == [[1], [2]]
    assert list(ahead) == [[0], [1], [2]]
    assert list(DrawnAhead(Loader(stop=1), print)) == [[0]]


@pytest.mark.parametrize("kept", ["the tensors", "the list"])
def test_a_loader_that_writes_over_what_it_gave_is_told(kept):
    def reusing():
        ids, found = torch.zeros(4, dtype=torch.int64), []
        for number in range(3):
            found = [ids.fill_(number)] if kept == "the tensors" else found
            if kept == "the list":
                found[:] = [torch.full((4,), number)]
            yield found

    with pytest.raises(ReusedMiniBatchError, match="Make new tensors and a new list for each"):
        next(DrawnAhead(reusing(), lambda found: None))


@pytest.mark.parametrize("given", [3, torch.zeros(4), {"input_ids": torch.zeros(4)}])
def test_what_is_no_series_of_mini_batches(given):
    with pytest.raises(MiniBatchesError, match=rf"was given '{type(given).__name__}'\. Pass a loader or a list"):
        DrawnAhead(given, print)


# --------------------------------------------------------------------------------------------------------- with ranks
@PAIR.case
def with_and_without(rank):
    return [losses_and_planners(ahead) for ahead in (False, True)]


def losses_and_planners(ahead):
    """Losses, whether each plan was made in a thread, and threads that are left."""
    model = parallel(small, strategies=TWO, merge=True)
    made, engine = [], model.fxpar_session.engine
    inner = engine._plan
    engine._plan = lambda *args: made.append(threading.current_thread().name) or inner(*args)
    losses = [model.train_step(one).loss for one in (model.plan_ahead(BATCHES) if ahead else BATCHES)]
    return losses, [name == "fxpar-plan" for name in made], threads()


@PAIR.case
def changed_meanwhile(rank):
    """What was written to after it was drawn is planned anew, and so are sequences that come instead."""
    model = parallel(small, strategies=TWO)
    batches = [[ids.clone() for ids in one] for one in BATCHES]
    ahead = model.plan_ahead(batches)
    model.train_step(next(ahead))
    batches[1][0].add_(1000)  # beyond the vocabulary
    try:
        model.train_step(next(ahead))
    except Exception as error:
        first = type(error).__name__
    other = model.train_step(BATCHES[0]).loss  # not what is next
    return first, other, model.train_step(next(ahead)).loss, threads()


@PAIR.case
def too_long(rank):
    """On both ranks, in the step of the mini-batch that is too long."""
    model = parallel(small, strategies=TWO)
    ahead = model.plan_ahead([BATCHES[0], sequences(1, (5, 513)), BATCHES[1]])
    first = model.train_step(next(ahead)).loss
    second = next(ahead)
    with pytest.raises(SequenceTooLongError, match="513"):
        model.train_step(second)
    model.zero_grad()
    return first, model.train_step(next(ahead)).loss


def test_the_same_plans_and_losses_as_without():
    for (plain, none, _), (losses, in_thread, left) in with_and_without():
        assert losses == plain
        assert none == [False] * 3
        assert sorted(in_thread) == [False, True, True]  # nothing runs before the first one
        assert left == []


def test_what_changed_is_planned_anew():
    found = changed_meanwhile()
    for error, *_ in found:
        assert error == "TokenIdError"
    assert found[0][1:] == found[1][1:]
    assert found[0][3] == []


def test_what_is_wrong_with_a_mini_batch_is_raised_in_its_step():
    first, second = too_long()
    assert first == second
    assert first == pytest.approx(with_and_without()[0][0][0][:2], rel=1e-10)
