"""Each surviving rank names the lost one, says why, and ends in time; with real processes over gloo."""

import socket

import pytest

from fxpar.monitor.monitor import PATIENCE_INTERVALS
from tests.monitor.ranks import INTERVAL_S, LEAVE_S, SWITCH, TIMEOUT_S, cut, fail, kill, lose_one, sleep, stop
from tests.repeat import thinned

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
VICTIMS = [*((case, 2) for case in CASES), ("killed", 0), ("stopped", 0), ("raises", 0)]


@pytest.mark.parametrize(
    ("case", "victim"), thinned(VICTIMS, [("killed", 2), ("leaves", 2), ("stopped", 0), ("raises", 0)])
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


# The store is gone with rank 0: then a rank that leaves late must not blame one that left before it.
@pytest.mark.parametrize(("victim", "apart_s"), thinned([(2, 0.0), (0, 1.0)], [(0, 1.0)]))
def test_a_hung_rank_is_found_although_nobody_times_out(tmp_path, victim, apart_s):
    reports = lose_one(tmp_path, 3, victim, stop, group_timeout_s=1800, apart_s=apart_s)
    for rank in {0, 1, 2} - {victim}:
        report = reports[rank]
        assert (report["ranks"], report["kind"], report["cause"]) == ([victim], "stopped", "ended"), report
        assert "which ended it in its wait at ranks.py" in report["text"]
        assert report["seconds"] < TIMEOUT_S + LEAVE_S + rank * apart_s + 4 * INTERVAL_S + SLACK_S


def test_a_broken_connection_names_both_ends(tmp_path):
    reports = lose_one(tmp_path, 3, 1, cut, wait_for_victim=True)
    node = socket.gethostname()
    for report in reports:
        assert (report["error"], report["ranks"], report["kind"]) == ("ConnectionLostError", [1, 2], "connection")
        assert f"broke: rank 1 on {node} and rank 2 on {node} noticed it first" in report["text"]
