"""What is said of forked ranks that do not come back."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from fxpar.errors import RankError
from fxpar.runtime.forked import run_forked
from tests.runtime.hot import World


def test_a_failing_rank_is_reported():
    def work(rank: int) -> int:
        if rank == 1:
            raise ValueError("boom")
        return rank

    with pytest.raises(RankError, match="boom"):
        run_forked(2, work)


def test_a_rank_that_hangs_says_where():
    def wait_for_ever(rank: int) -> None:
        if rank == 1:
            dist.recv(torch.zeros(1), src=0)

    with pytest.raises(RankError, match=r"not done within 2 s(.|\n)*rank 1:(.|\n)*wait_for_ever"):
        run_forked(2, wait_for_ever, timeout_s=2)


@pytest.mark.parametrize("waits", [True, False], ids=["others wait for it", "others fail"])
def test_a_rank_that_a_signal_ends_says_where(waits):
    """And not what its peers make of that, whether they fail for it or wait."""

    def step_on_a_null_pointer(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if waits:
            signal.pause()
        dist.recv(torch.zeros(1), src=1)

    with pytest.raises(RankError, match=r"^rank 1: ended by SIGSEGV\n(.|\n)*in step_on_a_null_pointer"):
        run_forked(2, step_on_a_null_pointer, timeout_s=60)


def test_a_shared_world_that_fails_is_built_once():
    """Each further test of its file fails with the same error, at once."""
    built = []

    def prepare() -> None:
        built.append("world")
        raise ValueError("no model")

    results = World(2, prepare).case(print)
    for _ in range(2):
        with pytest.raises(ValueError, match="no model"):
            results()
    assert built == ["world"]
