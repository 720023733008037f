"""Each surviving rank names the lost one, says why, and ends in time; with real processes over gloo."""

import socket

import pytest

from fxpar.monitor.monitor import PATIENCE_INTERVALS
from tests.monitor.ranks import INTERVAL_S, SWITCH, TIMEOUT_S, fail, kill, lose_one, sleep, stop

WORLD = 4
# What a loaded machine may add.
SLACK_S = 5.0
LIMIT_S = TIMEOUT_S + (2 * PATIENCE_INTERVALS + 3) * INTERVAL_S + SLACK_S

CASES = {
    "killed": (kill, "died", "died: its process is gone"),
    "stopped": (stop, "stopped", "is stopped (SIGSTOP or a debugger)"),
    "sleeps": (sleep, "stuck", "in sleep"),
    "raises": (fail, "failed", "failed by an error of its own: ValueError: the data is bad"),
    "leaves": (SystemExit, "done", "ended its work while other ranks still wait"),
}


def leave():
    raise SystemExit(0)


# Rank 0 serves the store: it is the victim too where that matters.
@pytest.mark.parametrize(
    ("case", "victim"), [*((case, 2) for case in CASES), ("killed", 0), ("stopped", 0), ("raises", 0)]
)
def test_survivors_name_the_lost_rank(tmp_path, case, victim):
    how, kind, words = CASES[case]
    reports = lose_one(tmp_path, WORLD, victim, leave if how is SystemExit else how)
    for rank, report in enumerate(reports):
        if rank == victim:
            continue
        assert report["error"] == "PeerLostError", report
        assert (report["ranks"], report["kind"]) == ([victim], kind), report
        assert f"rank {victim} (in phase {SWITCH!r}" in report["text"] or case == "leaves"
        assert words in report["text"]
        assert f"Rank {rank} on {socket.gethostname()} noticed it in phase {SWITCH!r}" in report["text"]
        assert report["cause"] == "RuntimeError"
        assert report["seconds"] < LIMIT_S


def test_the_rank_itself_keeps_its_own_error(tmp_path):
    reports = lose_one(tmp_path, 2, 1, fail, wait_for_victim=True)
    assert (reports[1]["error"], reports[1]["text"]) == ("ValueError", "the data is bad")


def test_a_rank_that_wakes_up_learns_that_it_was_given_up(tmp_path):
    import time

    reports = lose_one(tmp_path, 3, 1, lambda: time.sleep(TIMEOUT_S + 8 * INTERVAL_S), wait_for_victim=True)
    assert [report["ranks"] for report in reports] == [[1], [1], [1]]
    assert "the other ranks gave up on this rank" in reports[1]["text"]


def test_nobody_is_blamed_when_all_is_well(tmp_path):
    reports = lose_one(tmp_path, 3, 1, lambda: None, wait_for_victim=True)
    assert [report["error"] for report in reports] == ["none"] * 3
