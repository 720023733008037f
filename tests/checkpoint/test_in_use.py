"""Two that save to one folder: the second is refused, on all of its ranks, with the name of the first."""

from __future__ import annotations

import os
import threading

import pytest

from fxpar.checkpoint import load_checkpoint, save, save_checkpoint
from fxpar.checkpoint.lock import release
from fxpar.errors import CheckpointInUseError
from fxpar.runtime.forked import run_forked
from tests.checkpoint.small import make, step


def saving(folder, number):
    """Save in each of two ranks; the error's text, or nothing."""

    def work(rank):
        model, optimizer = make(2)
        step(model, optimizer, number)
        try:
            save_checkpoint(folder, number, model, optimizer, {})
        except CheckpointInUseError as error:
            return str(error)
        return ""

    return run_forked(2, work, 60)


def test_the_second_job_is_refused_while_the_first_lives(tmp_path):
    model, optimizer = make(1)
    first = save_checkpoint(tmp_path, 1, model, optimizer, {})
    for _ in range(2):
        save_checkpoint(tmp_path, 2, model, optimizer, {})  # the same job
    one, other = saving(tmp_path, 3)
    assert one == other
    assert f"process {os.getpid()} on {os.uname().nodename} (saves checkpoints, since " in one
    assert "saves to this folder; wait until that has ended, or save to another folder" in one
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000002.1"]
    assert not first.exists()
    release(tmp_path)
    assert saving(tmp_path, 3) == ["", ""]
    save_checkpoint(tmp_path, 4, model, optimizer, {})  # their processes are gone
    load_checkpoint(tmp_path / "step-00000003", *make(1))
    release(tmp_path)


def test_a_second_thread_is_refused(tmp_path, monkeypatch):
    """As a save in the background is not done when the next one begins."""
    model, optimizer = make(1)
    begun, go_on, write = threading.Event(), threading.Event(), save._write_tensors

    def slow(*args):
        begun.set()
        go_on.wait(30)
        write(*args)

    monkeypatch.setattr(save, "_write_tensors", slow)
    thread = threading.Thread(target=save_checkpoint, args=(tmp_path, 1, model, optimizer, {}))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(CheckpointInUseError, match=r"another thread of this process is saving step-00000001\.tmp-"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    go_on.set()
    thread.join()
    save_checkpoint(tmp_path, 3, model, optimizer, {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
    release(tmp_path)
