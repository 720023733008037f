"""What a forked child does not have: the threads of its parent."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from fxpar.runtime.forked import run_forked


def compiled(factor: float) -> float:
    """A compiled function that is in no cache, applied to 3."""
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        function = torch.compile(lambda x: (x.sin() * factor).cos() + factor, backend="inductor")
        return float(function(torch.tensor([3.0, 4.0]))[0])


@pytest.mark.nightly
def test_a_forked_child_compiles_after_its_parent():
    mine = compiled(2.0)
    assert run_forked(1, lambda rank: compiled(2.0), timeout_s=100) == [mine]


def collect_and_say(rank: int) -> int:
    gc.collect()
    return rank


def test_a_forked_child_collects_no_process_group_of_its_parent():
    """Its destructor joins threads that the child does not have."""

    class Holder:
        def __init__(self) -> None:
            self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
            self.itself = self

    gc.disable()
    try:
        Holder()  # garbage that only the collector finds
        assert run_forked(2, collect_and_say, timeout_s=20) == [0, 1]
    finally:
        gc.enable()
