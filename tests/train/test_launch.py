from __future__ import annotations

import json
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fxpar.cli.train import TrainRequest, how_to_go_on
from fxpar.errors import LaunchError, LauncherSignalError, RankFailedError
from fxpar.train.config import parse_config
from fxpar.train.demo import DEMO
from fxpar.train.launch import _interrupts, describe_failure, first_failure
from fxpar.train.stop import StopRequest
from fxpar.train.worker import STEPPING, STOP


def failure(tmp_path, rank, text=None, code=1, time=100):
    file = tmp_path / f"{rank}.json"
    if text is not None:
        info = {"py_callstack": "Traceback ...", "timestamp": str(time)}
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))


def test_a_cause_comes_before_its_consequences(tmp_path):
    failures = {
        0: failure(tmp_path, 0, "PeerLostError: rank 2 ...", time=99),
        1: failure(tmp_path, 1, code=-15),
        2: failure(tmp_path, 2, "NanLossError: the loss is nan", time=101),
        3: failure(tmp_path, 3, "NanLossError: the loss is nan", time=100),
    }
    rank, found = first_failure(failures)
    assert rank == 3
    error = describe_failure(rank, found, tmp_path)
    assert isinstance(error, RankFailedError)
    assert str(error) == "NanLossError on rank 3: the loss is nan"
    assert error.trace == "Traceback ..."


def test_a_killed_rank_is_the_cause(tmp_path):
    failures = {
        0: failure(tmp_path, 0, "PeerLostError: rank 1 (in phase 'x') died: its process is gone. Rank 0 ...", time=1),
        1: failure(tmp_path, 1, code=-9),
    }
    rank, found = first_failure(failures)
    error = describe_failure(rank, found, tmp_path)
    assert isinstance(error, LaunchError)
    assert str(error) == "rank 1 was ended by SIGKILL (out of memory?); it wrote nothing"


def test_the_log_of_the_latest_run_is_named_if_it_says_something(tmp_path):
    killed = failure(tmp_path, 1, code=-9)
    logs = [tmp_path / f"logs/ranks_{name}/attempt_0/{rank}/stderr.log" for name in "ba" for rank in (0, 1)]
    for log in logs:
        log.parent.mkdir(parents=True)
        log.write_text("" if log is logs[3] else "Fatal Python error")
        time.sleep(0.01)
    assert str(describe_failure(1, killed, tmp_path / "logs")).endswith("; it wrote nothing")
    assert describe_failure(0, killed, tmp_path / "logs").log == str(logs[2])


def test_a_rank_that_hung_was_killed_by_the_launcher(tmp_path):
    failures = {
        0: failure(tmp_path, 0, "PeerLostError: rank 1 (in phase 'x') is stopped. Rank 0 ...", time=10**12),
        1: failure(tmp_path, 1, code=-9),
    }
    rank, found = first_failure(failures)
    assert str(describe_failure(rank, found, tmp_path)).startswith(
        "PeerLostError on rank 0: rank 1 (in phase 'x') is s"
    )


def test_an_error_that_is_not_ours_says_how_to_see_more(tmp_path):
    error = describe_failure(0, failure(tmp_path, 0, "ZeroDivisionError: by zero"), tmp_path)
    assert str(error) == "ZeroDivisionError on rank 0: by zero. Add --debug to see where"


def test_a_silent_end(tmp_path):
    assert "ended with status 3" in str(describe_failure(1, failure(tmp_path, 1, code=3), tmp_path))


@pytest.mark.parametrize("code", [-15, -2])
def test_ranks_that_the_launcher_ended_come_last(tmp_path, code):
    failures = {0: failure(tmp_path, 0, code=code), 1: failure(tmp_path, 1, "RuntimeError: x", time=10**12)}
    assert first_failure(failures)[0] == 1


def test_how_to_go_on_is_the_command_with_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"steps": 9, "ranks": None, "resume": False, "compare": None, "debug": False}
    request = TrainRequest(None, True, ("run.seed=3", "model.options.dim=[1, 2]"), **words)
    config = parse_config(DEMO, "--demo", "demo", ["run.folder=runs/demo-now"])
    assert how_to_go_on(request, config) == "There is no checkpoint to go on from: start the run again"
    monkeypatch.setattr("fxpar.train.session.latest", lambda config: config.checkpoints / "step-00000004")
    monkeypatch.setattr("fxpar.checkpoint.load.read_extra", lambda path: {"step": 30})
    assert (
        how_to_go_on(request, config) == "All 30 steps are done, and saved in runs/demo-now/checkpoints/step-00000004"
    )
    monkeypatch.setattr("fxpar.checkpoint.load.read_extra", lambda path: {"step": 4})
    assert str(LauncherSignalError("SIGTERM", "Go on")) == ("ended by SIGTERM; all ranks were ended too. Go on")
    assert how_to_go_on(request, config) == (
        "Go on from runs/demo-now/checkpoints/step-00000004 with: fxpar train --demo --set run.seed=3 --set "
        "'model.options.dim=[1, 2]' --set run.folder=runs/demo-now --steps 9 --resume"
    )


def test_ctrl_c_waits_for_a_step_only_if_one_has_begun(tmp_path):
    """Before the first step, and the second time, it ends at once."""
    said = []
    with _interrupts(tmp_path, said.append):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        (tmp_path / STEPPING).touch()
        signal.raise_signal(signal.SIGINT)
        assert (tmp_path / STOP).exists()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert said == ["stopping after this step; Ctrl-C again ends at once"]


def test_a_rank_of_torchrun_does_so_too(tmp_path):
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stop.step_done()
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopRequest(tmp_path / STOP, tmp_path / STEPPING) as stop:
        stop.step_done()
        assert (tmp_path / STEPPING).exists()
        assert not stop.asked
