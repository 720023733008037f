"""How things are timed: medians over rounds, series that end in time, the slowest rank."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch

from fxpar.profiling.kept import Kept
from fxpar.profiling.points import MOST_RUNS, ROUNDS, Trial, measured
from fxpar.runtime.forked import run_forked

CPU = torch.device("cpu")


def sleeping(*seconds: float, runs: list[float] | None = None):
    """Trials that take so long, and as much work as time."""
    for one in seconds:

        def run(one: float = one) -> None:
            time.sleep(one)
            if runs is not None:
                runs.append(one)

        yield Trial("product", "float32", round(1e3 * one), one, lambda run=run: run)


def points_of(*seconds: float, budget: float, runs: list[float] | None = None):
    return measured([sleeping(*seconds, runs=runs)], CPU, budget, lambda text: None)


def test_seconds_are_those_of_one_run():
    (point,) = points_of(0.01, budget=0.03)
    assert (point.kind, point.of, point.size, point.amount) == ("product", "float32", 10, 0.01)
    assert 0.01 <= point.seconds < 0.1


def test_several_times_in_one_run():
    (point,) = measured(
        [iter([Trial("launch", "kernel", 1, 1.0, lambda: partial(time.sleep, 0.02), 10)])], CPU, 0.01, print
    )
    assert 0.002 <= point.seconds < 0.02


def test_a_series_ends_before_a_trial_that_would_take_too_long():
    assert [point.size for point in points_of(0.001, 0.002, 0.004, 0.4, budget=0.05)] == [1, 2, 4]
    few = points_of(0.01, 0.02, 0.03, 0.04, budget=0.005)  # a line needs three
    assert [point.size for point in few] == [10, 20, 30]


def test_a_slow_dtype_holds_nobody_up():
    """bfloat16 on a CPU without instructions for it: a product of 1,024 takes 9 s."""
    assert [point.size for point in points_of(0.01, 0.3, 0.6, budget=0.005)] == [10]


def test_runs_are_bounded():
    runs: list[float] = []
    points_of(0.02, budget=0.001, runs=runs)
    assert len(runs) == 2 * ROUNDS  # in each round one to warm up, and one that says how long it takes, and counts
    runs.clear()
    points_of(0.0, budget=1e9, runs=runs)
    assert len(runs) == (MOST_RUNS + 2) * ROUNDS


def test_all_points_are_measured_in_each_round():
    """What else the machine does in one of them changes none: the median counts."""
    said: list[str] = []
    measured([sleeping(0.001, 0.002)], CPU, 0.2, said.append)
    what = [f"(round {n} of {ROUNDS}) product in float32, {size} wide" for n in range(1, ROUNDS + 1) for size in (1, 2)]
    assert said == [f"{number} of {2 * ROUNDS} {each}" for number, each in enumerate(what, 1)]


def test_what_is_measured_is_said():
    said: list[str] = []
    measured([sleeping(0.01, 0.3)], CPU, 0.005, said.append)  # the second one would take too long
    assert said[0] == f"1 of {2 * ROUNDS} (round 1 of {ROUNDS}) product in float32, 10 wide"
    assert said[-1] == f"{ROUNDS} of {ROUNDS} (round {ROUNDS} of {ROUNDS}) product in float32, 10 wide"


def test_the_slowest_rank_counts():
    """Both ranks do the same trials as often, although one of them is twice as fast."""

    def work(rank: int) -> tuple[list, int]:
        runs: list[float] = []
        series = [sleeping(*((0.02, 0.04, 0.04, 2.0) if rank else (0.01, 0.02, 0.02, 1.0)), runs=runs)]
        points = measured(series, CPU, 0.3, lambda text: None)
        return [point.seconds for point in points], len(runs)

    (first, runs), (second, runs_of_other) = run_forked(2, work, 60.0)
    assert first == second
    assert [0.02, 0.04, 0.04] <= first < [0.2, 0.4, 0.4]
    assert runs == runs_of_other


@pytest.mark.parametrize(
    ("kind", "of", "size", "words"),
    [
        ("thin product", "float32", 1024, "thin product in float32, 1,024 wide"),
        ("backward attention", "bfloat16", 512, "backward attention in bfloat16, 512 tokens"),
        ("all_reduce", "intra", 4096, "all-reduce inside a node, 4,096 bytes"),
        ("launch", "kernel", 1, "launch of a kernel"),
    ],
)
def test_a_trial_says_what_its_size_is_of(kind, of, size, words):
    assert Trial(kind, of, size, 1.0, lambda: lambda: None).words() == words


@pytest.mark.parametrize("torn", ['["c", 3', '["c", 3.0]', '["c", NaN]\n', '["c", 0]\n', '["c"]\n', "\0\0\0"])
def test_nothing_is_lost_when_interrupted_twice(torn, tmp_path):
    """The last line may be torn anywhere: what is measured next is read again."""
    path, settings = tmp_path / "x.part", {"ranks": 2}
    path.write_text(json.dumps(settings) + '\n["a", 1.0]\n["b", 2.0]\n' + torn)
    Kept.of(path, settings).add("d", 4.0)
    assert Kept.of(path, settings).seconds == {"a": 1.0, "b": 2.0, "d": 4.0}
    assert path.read_text().count("\n") == 4
