"""One rank's monitor on a store without processes: what it writes, what it costs, what it does when it is alone."""

import pickle
import threading
import time

import pytest
import torch.distributed as dist

from fxpar.errors import PeerLostError
from fxpar.monitor import Monitor, unwatched


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
        self.calls.append(("wait", 0))
        self.store.wait(keys, timeout)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected, desired)


def wait_until(condition, limit_s=10.0):
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
    assert str(lost) == str(unwatched(RuntimeError("Broken pipe"), 0, "start"))


def test_silent_rank_on_another_machine():
    """A heartbeat that stops where nobody can look at the process: found by the counter alone."""
    store = dist.HashStore()
    monitors = [Monitor(rank, 2, store, interval_s=0.1) for rank in range(2)]
    for rank, monitor in enumerate(monitors):
        monitor.start()
        monitor._own_host = f"node{rank}"
        monitor._door.name = ""
    monitors[1].phase("step 8")
    time.sleep(0.3)
    monitors[1]._link._round = lambda count: None  # it goes on, but nothing arrives any more
    began = time.monotonic()
    lost = monitors[0].explain(RuntimeError("Timed out waiting"))
    assert (lost.kind, lost.ranks) == ("silent", (1,))
    assert "rank 1 (in phase 'step 8'" in str(lost)
    assert 0.4 <= time.monotonic() - began < 3.0
    for monitor in monitors:
        monitor.stop(lost)


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
    wait_until(lambda: not any(thread.name == "fxpar-monitor" for thread in threading.enumerate()))


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
