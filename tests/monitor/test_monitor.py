"""One rank's monitor on a store without processes: what it writes, what it costs, what it does when it is alone."""

import multiprocessing as mp
import os
import pickle
import threading
import time
from dataclasses import replace
from socket import gethostname

import pytest
import torch.distributed as dist

from fxpar.errors import ConnectionLostError, PeerLostError
from fxpar.monitor import Monitor, unwatched
from fxpar.monitor.beat import FAILED, LEFT
from fxpar.monitor.door import Door, address_towards, try_doors
from fxpar.monitor.process import Neighbours


class CountingStore(dist.Store):
    """Counts the calls that reach the store below; clones count into the same lists."""

    def __init__(self, store, calls):
        super().__init__()
        self.store, self.calls = store, calls

    def clone(self):
        return self

    def set(self, key, value):
        self.calls.append(("set", len(value)))
        self.store.set(key, value)

    def get(self, key):
        self.calls.append(("get", 0))
        return self.store.get(key)

    def check(self, keys):
        self.calls.append(("check", 0))
        return self.store.check(keys)

    def add(self, key, value):
        self.calls.append(("add", 0))
        return self.store.add(key, value)

    def wait(self, keys, timeout):
        self.store.wait(keys, timeout)  # at the start only

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected, desired)


def wait_until(condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_small_write_per_interval():
    calls = []
    with Monitor(0, 1, CountingStore(dist.HashStore(), calls), interval_s=0.2) as monitor:
        began = time.monotonic()
        for i in range(1000):
            monitor.phase(f"step {i}")
        time.sleep(1.0)
        rounds = (time.monotonic() - began) / 0.2
        writes = [size for kind, size in calls if kind == "set"]
        others = len(calls) - len(writes)
    assert 1 <= len(writes) <= rounds + 4
    assert max(writes) < 600
    assert others <= 3 * len(writes) + 8


def test_phase_is_restored_after_a_block_and_kept_in_an_error():
    monitor = Monitor(0, 1, dist.HashStore())
    monitor.phase("step 1")
    with monitor.phase("switch"):
        pass
    assert monitor._phase == "step 1"
    with pytest.raises(ValueError, match="x"), monitor.phase("reduce"):
        raise ValueError("x")
    assert monitor._phase == "reduce"


def test_alone_with_a_broken_connection():
    with Monitor(0, 1, dist.HashStore(), interval_s=0.05) as monitor:
        monitor.phase("step 4")
        lost = monitor.explain(RuntimeError("Connection closed by peer [::1]:5\nframe #0: ..."))
    assert (lost.kind, lost.ranks) == ("connection", (0,))
    assert "noticed it in phase 'step 4' by RuntimeError: Connection closed by peer [::1]:5. Look" in str(lost)
    assert isinstance(lost.__cause__, RuntimeError)
    assert str(pickle.loads(pickle.dumps(lost))) == str(lost)
    assert monitor.explain(lost) is lost


def test_not_started():
    lost = Monitor(0, 1, dist.HashStore()).explain(RuntimeError("Broken pipe"))
    assert (lost.kind, lost.ranks) == ("unknown", ())
    assert str(lost) == str(unwatched(RuntimeError("Broken pipe"), 0, "start")).replace(f" on {gethostname()}", "")


def test_silent_rank_on_another_machine():
    """A heartbeat that stops where nobody can look at the process: found by the counter alone."""
    store, ended = dist.HashStore(), []
    # A test that fails must not let the monitors end the process of the tests. Busy machines stop threads for a while.
    monitors = [Monitor(rank, 2, store, interval_s=0.5, end=ended.append) for rank in range(2)]
    try:
        for rank, monitor in enumerate(monitors):
            monitor.start()
            monitor._own_host = f"node{rank}"
            monitor._door.name = ""
        monitors[1].phase("step 8")
        time.sleep(1.0)
        monitors[1]._link._round = lambda count: None  # it goes on, but nothing arrives any more
        time.sleep(0.7)  # nor is a heartbeat under way that would make it look alive
        began = time.monotonic()
        lost = monitors[0].explain(RuntimeError("Timed out waiting"))
        assert (lost.kind, lost.ranks) == ("silent", (1,)), str(lost)
        assert "rank 1 (in phase 'step 8'" in str(lost)
        assert 0.7 <= time.monotonic() - began < 30.0
    finally:
        for monitor in monitors:
            monitor.stop(RuntimeError("the test is over"))
    assert not ended


def test_all_ranks_report_the_first_verdict():
    store = dist.HashStore()
    monitors = [Monitor(rank, 3, store, interval_s=0.1).start() for rank in range(3)]
    monitors[2].stop(ValueError("no data"))
    found = [monitors[rank].explain(RuntimeError("Timed out waiting")) for rank in range(2)]
    assert [(lost.kind, lost.ranks) for lost in found] == [("failed", (2,))] * 2
    assert all("ValueError: no data" in str(lost) for lost in found)
    for monitor in monitors[1::-1]:
        monitor.stop(found[0])
    # A second life on the same store does not see the verdict of the first.
    again = [Monitor(rank, 3, store, interval_s=0.1).start() for rank in range(3)]
    time.sleep(0.3)
    assert all(monitor._link.verdict is None for monitor in again)
    for monitor in again[::-1]:
        monitor.stop()
    wait_until(
        lambda: not any(thread.name in ("fxpar-monitor", "fxpar-neighbours") for thread in threading.enumerate())
    )


def test_rank_0_that_never_starts():
    monitor = Monitor(1, 2, dist.HashStore(), interval_s=0.05).start()
    with pytest.raises(PeerLostError, match="rank 0 never started its monitor"), monitor.explained("meeting"):
        raise RuntimeError("Timed out waiting")
    monitor.stop()


def test_leaving_the_block_explains_what_looks_like_a_lost_peer_and_nothing_else():
    store = dist.HashStore()
    with pytest.raises(PeerLostError), Monitor(0, 1, store, interval_s=0.05):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match="mine"), Monitor(0, 1, store, interval_s=0.05):
        raise RuntimeError("mine")


def test_two_machines_that_do_not_reach_each_other():
    store, ended = dist.HashStore(), []
    monitors = [Monitor(rank, 2, store, interval_s=0.5, end=ended.append).start() for rank in range(2)]
    try:
        for rank, monitor in enumerate(monitors):
            monitor._own_host = f"node{rank}"
        monitors[1]._door.name = "127.0.0.2|1"  # where nobody listens
        time.sleep(1.0)
        text = "rank 0 on node0 cannot connect to rank 1 on node1: the network"
        with pytest.raises(ConnectionLostError, match=text) as lost, monitors[0].explained("step 3"):
            raise RuntimeError("Timed out waiting")
        assert (lost.value.kind, lost.value.ranks) == ("link", (0, 1))
    finally:
        for monitor in monitors[::-1]:
            monitor.stop(RuntimeError("the test is over"))
    assert not ended


def test_doors():
    door, shut = Door("127.0.0.1"), Door("127.0.0.1")
    shut.close()
    assert try_doors({3: door.name, 4: shut.name, 5: door.name}, 1.0) == (4,)
    door.clear()
    door.close()
    assert address_towards(dist.PrefixStore("x", dist.HashStore())) == "127.0.0.1"


def test_neighbours_are_missed_at_once_and_named_once():
    processes = [mp.get_context("fork").Process(target=time.sleep, args=(seconds,)) for seconds in (0.2, 60)]
    seen = []
    neighbours = Neighbours(60.0, seen.append)
    for rank, process in enumerate(processes):
        process.start()
        neighbours.add(rank, process.pid)
    neighbours.start()
    wait_until(lambda: [0] in seen)
    processes[1].kill()
    wait_until(lambda: [1] in seen)
    neighbours.close()
    neighbours.join(10)
    assert not neighbours.is_alive()
    assert [gone for gone in seen if gone] == [[0], [1]]
    descriptors = [os.pipe() for _ in range(4)]  # among them the numbers that the thread had
    neighbours.add(2, os.getpid())
    neighbours.close()
    for read, write in descriptors:
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)


def test_who_ended_first_does_not_depend_on_when_rank_0_was_heard_of():
    """Seconds count from rank 0's start once that is known, and from this rank's own before."""
    store = dist.HashStore()
    late = Monitor(1, 3, store, interval_s=0.3).start()
    assert late._link is not None
    time.sleep(0.3)
    late._look([2])
    judge = Monitor(0, 3, store, interval_s=0.3).start()
    late._link.ask()
    wait_until(lambda: 0 in late._link.beats)
    late._look([])
    late._look([0])
    assert late._link.gone[2] < late._link.gone[0]
    for monitor in (late, judge):
        monitor.stop(PeerLostError((2,), "died", "", 0, "", "", ""))


def test_the_host_stays_until_a_slow_rank_has_read_why_it_failed():
    store = dist.HashStore()
    host, slow = (Monitor(rank, 2, store, interval_s=0.1).start() for rank in range(2))
    link, quick = slow._link, slow._link._round

    def late_round(count):
        time.sleep(0.4)
        quick(count)

    link._round = late_round
    host.stop(ValueError("no data"))
    assert link.verdict is not None
    assert "ValueError: no data" in link.verdict.text
    slow.stop(PeerLostError((0,), "failed", "", 1, "", "", ""))


def test_a_store_that_is_gone_with_a_host_that_failed():
    """The last beat of the host says that it failed, its message was not read."""
    store = dist.HashStore()
    host, other = (Monitor(rank, 2, store, interval_s=0.1).start() for rank in range(2))
    wait_until(lambda: 0 in other._link.beats)
    other._link.beats = {0: replace(other._link.beats[0], status=FAILED)}
    verdict = other._search.of_store("closed the connection")
    assert (verdict.kind, verdict.ranks) == ("failed", (0,))
    assert "which its own output shows" in verdict.text
    for monitor in (other, host):
        monitor.stop()


def test_an_error_of_its_own_is_none_if_a_peer_is_gone():
    """Errors that do not look like a lost peer, but come right after one."""
    store = dist.HashStore()
    monitors = [Monitor(rank, 2, store, interval_s=0.1).start() for rank in range(2)]
    monitors[0]._link.gone[1] = 0.1
    monitors[0].stop(KeyError("a wrapper of its own"))
    assert monitors[0]._status == LEFT
    monitors[1].stop(KeyError("its own"))
    assert monitors[1]._status == FAILED
