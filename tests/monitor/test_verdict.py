"""The rules of blame, on made-up heartbeats."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from fxpar.errors import CheckpointWriteError, TransferError
from fxpar.monitor import looks_like_peer_loss
from fxpar.monitor.beat import DONE, EXPLAIN, FAILED, LEFT, RUN, Beat
from fxpar.monitor.signs import is_timeout
from fxpar.monitor.stack import WatchedThread
from fxpar.monitor.standing import Standing
from fxpar.monitor.verdict import Silence, Verdict, Watch, first_gone

WORLD = 4


def beat(rank, count=1, progress=5, status=RUN):
    return Beat(rank, count, 10.0, progress, status, "step 3", "train.py:8 in main", f"node{rank}", 100 + rank)


def judge(before, after, state_of=lambda beat: ""):
    watch = Watch(0, WORLD, 4.0, state_of)
    watch.update(before, 10.0)
    watch.update(after, 14.0)
    return watch.final(14.0)


def beats(**changes):
    """Ranks 0..3 as they beat first, and later; `r2=...` changes rank 2's later beat (None: it does not beat)."""
    before = {rank: beat(rank) for rank in range(WORLD)}
    after = {rank: replace(one, count=5, status=EXPLAIN) for rank, one in before.items()}
    for name, change in changes.items():
        rank = int(name[1:])
        after[rank] = before[rank] if change is None else replace(after[rank], **change)
    return before, after


RULES = [
    ({"r2": None}, "silent", (2,)),
    ({"r2": None, "r3": None}, "silent", (2, 3)),
    # Rank 3 ended because of rank 2; rank 1 has failed: that is certain, and comes first.
    ({"r2": None, "r3": {"status": LEFT, "count": 1}}, "silent", (2,)),
    ({"r2": None, "r1": {"status": FAILED, "count": 1}}, "failed", (1,)),
    ({"r2": {"status": RUN}}, "stuck", (2,)),
    ({"r2": {"status": RUN}, "r3": {"status": RUN, "progress": 6}}, "stuck", (2,)),
    ({"r1": {"status": RUN}, "r3": {"status": RUN}}, "stuck", (1, 3)),
    ({"r1": {"status": DONE, "count": 1}}, "done", (1,)),
    ({"r1": {"status": DONE, "count": 1}, "r3": {"status": RUN}}, "stuck", (3,)),
    ({"r1": {"status": RUN, "progress": 9}}, "slow", (1,)),
    ({}, "connection", (0, 1, 2, 3)),
    ({"r1": {"timed_out": True}, "r3": {"timed_out": True}}, "connection", (0, 2)),
    # Rank 1 tried to reach rank 3 and could not; rank 2 only waits.
    ({"r1": {"unreachable": (3,)}, "r2": {"status": RUN}}, "link", (1, 3)),
    ({"r1": {"gone": {2: 9.5}}, "r2": {"status": RUN, "count": 1}}, "died", (2,)),
]


@pytest.mark.parametrize(("changes", "kind", "ranks"), RULES)
def test_rules(changes, kind, ranks):
    before, after = beats(**changes)
    if kind == "stuck":  # what is ahead was ahead before
        before = {rank: replace(one, progress=after[rank].progress) for rank, one in before.items()}
    verdict = judge(before, after)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert verdict.text
    assert Verdict.from_text(verdict.to_text()) == verdict


@pytest.mark.parametrize(("changes", "kind"), [({"r1": {"status": DONE, "count": 1}}, "done"), ({}, "connection")])
def test_a_rank_that_waits_for_this_one_is_not_stuck(changes, kind):
    """The connection to rank 1 broke at once; rank 3 has not noticed and still waits for this rank."""
    before, after = beats(r3={"status": RUN}, **changes)
    watch = Watch(0, WORLD, 4.0, lambda beat: "", timed_out=False)
    watch.update(before, 10.0)
    watch.update(after, 14.0)
    assert watch.final(14.0).kind == kind


def test_a_closed_connection_may_come_from_a_peer_that_timed_out():
    before, after = beats(r3={"status": RUN}, r1={"timed_out": True})
    watch = Watch(0, WORLD, 4.0, lambda beat: "", timed_out=False)
    watch.update(before, 10.0)
    watch.update(after, 14.0)
    assert (watch.final(14.0).kind, watch.final(14.0).ranks) == ("stuck", (3,))


def test_a_rank_without_a_beat():
    before, after = beats()
    verdict = judge({0: before[0], 1: before[1]}, {0: after[0], 1: after[1]})
    assert (verdict.kind, verdict.ranks) == ("unborn", (2, 3))


@pytest.mark.parametrize(("gone", "kind"), [({2: 9.0}, "died"), ({}, "stopped")])
def test_what_the_same_host_sees_is_certain_at_once(gone, kind):
    watch = Watch(0, WORLD, 4.0, lambda beat: "stopped" if beat.rank == 2 else "running")
    watch.update(beats()[0], 10.0, gone)
    verdict = watch.certain(10.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert "rank 2 (in phase 'step 3' at train.py:8 in main, process 102 on node2, last heartbeat about 0.0 s ago)" in (
        verdict.text
    )


def test_many_ranks_are_not_all_listed():
    before = {rank: beat(rank) for rank in range(100)}
    watch = Watch(0, 100, 4.0, lambda beat: "")
    watch.update(before, 0.0)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more" in watch.final(9.0).text


@pytest.mark.parametrize(
    ("gone", "statuses", "first"),
    [
        ({2: 9.0, 1: 9.2}, {}, (2,)),  # rank 1 ended because of rank 2, without a word
        ({2: 9.2, 1: 9.0}, {1: EXPLAIN}, (2,)),  # rank 1 was looking for the culprit when it ended
        ({2: 9.0, 1: 9.01}, {}, (1, 2)),  # both were killed
        ({1: 9.0}, {1: DONE}, ()),
        ({}, {}, ()),
    ],
)
def test_who_ended_first_is_to_blame(gone, statuses, first):
    known = {rank: beat(rank, status=statuses.get(rank, RUN)) for rank in range(WORLD)}
    assert first_gone(gone, known) == first


def test_a_rank_that_does_not_beat_is_silent_after_the_limit():
    silence, known = Silence(3.0), {1: beat(1), 2: beat(2, status=DONE)}
    assert [silence.update(known, passed_s) for passed_s in (9.0, 2.0, 0.5)] == [[], [], []]
    assert silence.update(known, 0.5) == [known[1]]
    assert silence.update({1: beat(1, count=2)}, 9.0) == []


def test_an_observer_that_was_stopped_itself_counts_little_of_that():
    standing, thread = Standing(2.0), WatchedThread()
    thread._ends()
    standing._looked_s -= 100
    assert standing.look(thread) == 2.0
    assert standing.seconds == 2.0


def test_signs():
    assert is_timeout(RuntimeError("gloo: Timed out waiting 3000ms for recv operation to complete"))
    assert not is_timeout(RuntimeError("Connection closed by peer"))
    assert looks_like_peer_loss(dist.DistBackendError("x"))
    assert looks_like_peer_loss(RuntimeError("[x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"))
    assert not looks_like_peer_loss(RuntimeError("shape mismatch"))
    assert not looks_like_peer_loss(ValueError("Broken pipe"))
    assert looks_like_peer_loss(TransferError("switch", "3", "x"))


def test_an_error_that_a_lost_peer_caused():
    error = CheckpointWriteError("x", "y")
    assert not looks_like_peer_loss(error)
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert looks_like_peer_loss(error)
