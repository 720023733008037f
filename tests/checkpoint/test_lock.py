"""Locks of folders: the second is told who the first is; a lock whose holder is gone does not count."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace

import pytest

from fxpar.checkpoint import lock
from fxpar.checkpoint.lock import LOCK, Holder, holder, release, take


def in_child(work):
    """`work()` in a forked process: (its text, the process' number), while the process lives on until it is killed."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(there, str(work()).encode())
        time.sleep(60)
        os._exit(0)
    os.close(there)
    return os.read(here, 4096).decode(), pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def stranger(folder, **changes):
    """The lock of a process of another machine."""
    other = replace(Holder.here("trains"), host="far", machine="far boot pid", **changes)
    (folder / LOCK).write_text(json.dumps(asdict(other)))
    return other


def test_the_second_is_told_who_the_first_is(tmp_path):
    first, pid = in_child(lambda: take(tmp_path, "trains 'demo'"))
    try:
        assert first == "None"
        other = take(tmp_path, "trains too")
        assert other == holder(tmp_path)
        assert (other.pid, other.work, other.host) == (pid, "trains 'demo'", os.uname().nodename)
        assert str(other).startswith(f"process {pid} on {other.host} (trains 'demo', since 20")
        release(tmp_path)  # of nobody else
        assert holder(tmp_path) == other
    finally:
        os.kill(pid, signal.SIGKILL)
    while lock.started(pid):
        time.sleep(0.01)
    # Killed, and nobody has asked for its exit status: its number is still there.
    assert holder(tmp_path) is None
    assert take(tmp_path, "trains too") is None
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    os.waitpid(pid, 0)


def test_a_rank_names_the_command_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ranks")
    first, pid = in_child(lambda: take(tmp_path, "trains"))
    try:
        assert first == "None"
        text = str(holder(tmp_path))
        assert text.startswith(f"process {os.getpid()} on {os.uname().nodename} (trains, its rank is process {pid}, ")
    finally:
        end(pid)


def test_a_lock_of_a_version_that_named_no_command(tmp_path):
    kept = {key: value for key, value in asdict(replace(Holder.here("trains"), pid=1)).items() if key != "command"}
    (tmp_path / LOCK).write_text(json.dumps({**kept, "started": lock.started(1)}))
    assert str(holder(tmp_path)).startswith("process 1 on ")


def test_a_process_takes_its_own_again_and_gives_it_back(tmp_path):
    assert take(tmp_path, "a") is None
    assert take(tmp_path, "b") is None
    assert holder(tmp_path) is None
    release(tmp_path)
    assert list(tmp_path.iterdir()) == []
    first, pid = in_child(lambda: take(tmp_path, "c"))
    end(pid)
    assert first == "None"


def test_the_number_of_a_process_used_again_is_not_the_process(tmp_path):
    other = replace(Holder.here("trains"), pid=os.getppid(), started="1")
    (tmp_path / LOCK).write_text(json.dumps(asdict(other)))
    assert holder(tmp_path) is None
    assert take(tmp_path, "trains") is None


def test_another_machine_is_alive_while_it_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SILENT_S", 0.4)
    monkeypatch.setattr(lock, "_LOOK_S", 0.02)
    other, done = stranger(tmp_path), threading.Event()

    def beat():
        while not done.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    assert take(tmp_path, "trains") == other
    done.set()
    thread.join()
    assert holder(tmp_path) == other  # that it is gone shows only after a while
    assert take(tmp_path, "trains") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "[" * 100_000, '{"host": 1, "machine": 2, "pid": ""}'])
def test_a_lock_that_says_nothing_is_not_for_ever(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SILENT_S", 0.02)
    monkeypatch.setattr(lock, "_LOOK_S", 0.01)
    (tmp_path / LOCK).write_text(text)
    assert holder(tmp_path) is None
    assert take(tmp_path, "trains") is None


def test_the_holder_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    others = set(threading.enumerate())
    assert take(tmp_path, "trains") is None
    before = (tmp_path / LOCK).stat().st_mtime_ns
    end_at = time.monotonic() + 10
    while (tmp_path / LOCK).stat().st_mtime_ns == before:
        assert time.monotonic() < end_at
        time.sleep(0.01)
    release(tmp_path)
    while not set(threading.enumerate()) <= others:  # and its thread ends with it
        assert time.monotonic() < end_at
        time.sleep(0.01)


def test_one_of_many_takes_a_stale_lock(tmp_path):
    """All at once, over and over: exactly one has it."""
    for turn in range(3):
        (tmp_path / LOCK).write_text(json.dumps(asdict(replace(Holder.here("trains"), pid=2**22 + turn, started="1"))))
        start = time.time() + 0.1

        def at_once(start=start):
            time.sleep(max(0.0, start - time.time()))
            return take(tmp_path, "trains")

        found = racing(at_once, 6)
        assert found.count("None") == 1, found
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def racing(work, count):
    """`work()` in that many forked processes at a time; all live until all are done."""
    pipes, pids = [], []
    for _ in range(count):
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(there, str(work()).encode())
            time.sleep(60)
            os._exit(0)
        os.close(there)
        pipes.append(here)
        pids.append(pid)
    found = [os.read(here, 4096).decode() for here in pipes]
    for pid in pids:
        end(pid)
    return found
