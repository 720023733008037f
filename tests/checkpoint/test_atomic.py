"""Whatever happens while a checkpoint is written, the one before stays, and is what a resume finds."""

import json
import os
import resource
import shutil
import signal
import warnings

import pytest

from fxpar.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fxpar.checkpoint.lock import LOCK
from fxpar.errors import (
    CheckpointError,
    CheckpointValueError,
    CheckpointWriteError,
    FxparWarning,
    MissingCheckpointError,
    RankError,
)
from fxpar.runtime.forked import run_forked
from tests.checkpoint.small import assert_same, make, step, whole


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def failing(work):
    """The error of `work(rank)` as text, so that the ranks can be compared."""

    def run(rank):
        try:
            work(rank)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run


def saved_once(folder, world=1):
    def work(rank):
        model, optimizer = make(world)
        step(model, optimizer, 1)
        save_checkpoint(folder, 1, model, optimizer, {"step": 1})
        return whole(model, optimizer)

    return run_forked(world, work, 60)[0] if world > 1 else work(0)


def assert_intact(folder, saved):
    assert names(folder) == ["step-00000001"]
    model, optimizer = make(1, seed=8)
    assert load_checkpoint(latest_checkpoint(folder), model, optimizer) == {"step": 1}
    assert_same(whole(model, optimizer), saved)


def test_nothing_there(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(tmp_path / "checkpoints") is None  # an empty folder needs no word
    with pytest.warns(FxparWarning, match=r"there is no folder '.*checkpoint'; did you mean 'checkpoints'\?"):
        assert latest_checkpoint(tmp_path / "checkpoint") is None
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(MissingCheckpointError, match=r"notes\.txt': is a file"):
        latest_checkpoint(tmp_path / "notes.txt")


def test_keeps_the_last_ones(tmp_path):
    model, optimizer = make(1)
    for i in range(5):
        save_checkpoint(tmp_path / "deep" / "er", i, model, optimizer, {}, keep=2)
    assert names(tmp_path / "deep" / "er") == ["step-00000003", "step-00000004"]
    assert latest_checkpoint(tmp_path / "deep" / "er").name == "step-00000004"


def test_same_step_again(tmp_path):
    model, optimizer = make(1)
    for i in range(3):
        path = save_checkpoint(tmp_path, 7, model, optimizer, {"i": i}, keep=1)
        assert latest_checkpoint(tmp_path) == path
        assert load_checkpoint(path, model, optimizer) == {"i": i}
        assert len(names(tmp_path)) == 1


def test_a_run_that_went_back_goes_on_from_its_own(tmp_path):
    model, optimizer = make(1)
    for i in (20, 30, 40, 25):
        save_checkpoint(tmp_path, i, model, optimizer, {}, keep=3)
    assert latest_checkpoint(tmp_path).name == "step-00000025"
    assert names(tmp_path) == ["step-00000025", "step-00000030", "step-00000040"]


def test_ignores_and_removes_unfinished_ones(tmp_path):
    saved = saved_once(tmp_path)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009.tmp-0a1b2c3d")
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    model, optimizer = make(1)
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000008"]
    assert saved


def test_killed_while_writing(tmp_path):
    """SIGKILL of a rank when its file is half written; the others get an error instead of a checkpoint."""
    saved = saved_once(tmp_path, 2)

    def work(rank):
        model, optimizer = make(2)
        step(model, optimizer, 2)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process in its write
        save_checkpoint(tmp_path, 2, model, optimizer, {})

    with pytest.raises(RankError):
        run_forked(2, work, 60)
    left = [name for name in names(tmp_path) if name != "step-00000001"]
    assert left
    assert all(".tmp-" in name for name in left)
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    shutil.rmtree(tmp_path / left[0])
    assert_intact(tmp_path, saved)


def test_disk_full_on_one_rank(tmp_path, monkeypatch):
    """All ranks raise the same error, which names the rank; nothing is left behind."""
    saved = saved_once(tmp_path, 3)

    def work(rank):
        model, optimizer = make(3)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**12, 0, 10**11 + 10**9 * rank))  # it changes
        if rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        save_checkpoint(tmp_path, 2, model, optimizer, {})

    usage = type(shutil.disk_usage("/"))
    errors = run_forked(3, failing(work), 60)
    assert len(set(errors)) == 1
    assert "CheckpointWriteError" in errors[0]
    assert "rank 2: " in errors[0]
    assert "the checkpoints before are intact" in errors[0]
    assert_intact(tmp_path, saved)


def test_too_little_space(tmp_path, monkeypatch):
    saved = saved_once(tmp_path)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1000, 900, 100))
    model, optimizer = make(1)
    with pytest.raises(CheckpointWriteError, match=r"step 2 needs 0\.\d+ GB, and 0\.000 GB are free"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    assert_intact(tmp_path, saved)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")

    def work(rank):
        model, optimizer = make(2)
        save_checkpoint(tmp_path / "file" / "checkpoints", 2, model, optimizer, {})

    errors = run_forked(2, failing(work), 60)
    assert len(set(errors)) == 1
    assert f"{str(tmp_path / 'file')!r} is not a folder but a file" in errors[0]


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_where_the_folder_should_be_is_named(tmp_path, below):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    model, optimizer = make(1)
    with pytest.raises(CheckpointWriteError, match=r"notes\.txt' is not a folder but a file\. Name a folder"):
        save_checkpoint(file / below, 1, model, optimizer, {})
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    model, optimizer = make(1)
    with pytest.raises(CheckpointWriteError, match="Permission denied"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})


def test_crash_before_the_rename(tmp_path, monkeypatch):
    saved = saved_once(tmp_path)

    def crash(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("fxpar.checkpoint.save.sync", crash)
    model, optimizer = make(1)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=1)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    assert len(names(tmp_path)) == 2
    shutil.rmtree(next(tmp_path.glob("*.tmp-*")))
    assert_intact(tmp_path, saved)


def test_what_cannot_be_stored(tmp_path):
    model, optimizer = make(1)
    with pytest.raises(CheckpointValueError, match=r"extra\.loader\.rng is an object"):
        save_checkpoint(tmp_path, 2, model, optimizer, {"loader": {"rng": object()}})
    with pytest.raises(CheckpointValueError, match="keep=0"):
        save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=0)
    other, _ = make(1)
    with pytest.raises(CheckpointValueError, match="is not a parameter of the model"):
        save_checkpoint(tmp_path, 2, other, optimizer, {})
    assert names(tmp_path) == []


def test_manifest_lists_every_file(tmp_path):
    saved_once(tmp_path)
    path = latest_checkpoint(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == names(path)
    assert manifest["step"] == 1
