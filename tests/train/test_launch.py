from __future__ import annotations

import json

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fxpar.errors import LaunchError, RankFailedError
from fxpar.train.launch import describe_failure, first_failure


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
    error = describe_failure(rank, found, "logs")
    assert isinstance(error, RankFailedError)
    assert str(error) == "NanLossError on rank 3: the loss is nan"
    assert error.trace == "Traceback ..."


def test_a_killed_rank_is_the_cause(tmp_path):
    failures = {
        0: failure(tmp_path, 0, "PeerLostError: rank 1 (in phase 'x') died: its process is gone. Rank 0 ...", time=1),
        1: failure(tmp_path, 1, code=-9),
    }
    rank, found = first_failure(failures)
    error = describe_failure(rank, found, "logs")
    assert isinstance(error, LaunchError)
    assert str(error) == "rank 1 was ended by SIGKILL (out of memory?); what it wrote is in 'logs'"


def test_a_rank_that_hung_was_killed_by_the_launcher(tmp_path):
    failures = {
        0: failure(tmp_path, 0, "PeerLostError: rank 1 (in phase 'x') is stopped. Rank 0 ...", time=10**12),
        1: failure(tmp_path, 1, code=-9),
    }
    rank, found = first_failure(failures)
    assert str(describe_failure(rank, found, "logs")).startswith("PeerLostError on rank 0: rank 1 (in phase 'x') is s")


def test_an_error_that_is_not_ours_says_how_to_see_more(tmp_path):
    error = describe_failure(0, failure(tmp_path, 0, "ZeroDivisionError: by zero"), "logs")
    assert str(error) == "ZeroDivisionError on rank 0: by zero. Add --debug to see where"


def test_a_silent_end(tmp_path):
    assert "ended with status 3" in str(describe_failure(1, failure(tmp_path, 1, code=3), "logs"))


@pytest.mark.parametrize("code", [-15, -2])
def test_ranks_that_the_launcher_ended_come_last(tmp_path, code):
    failures = {0: failure(tmp_path, 0, code=code), 1: failure(tmp_path, 1, "RuntimeError: x", time=10**12)}
    assert first_failure(failures)[0] == 1
