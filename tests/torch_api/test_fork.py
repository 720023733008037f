"""Compiling in a forked child after the parent has compiled."""

from __future__ import annotations

import pytest
import torch

from fxpar.runtime.forked import run_forked


def compiled(factor: float) -> float:
    """A compiled function that is in no cache, applied to 3."""
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        function = torch.compile(lambda x: (x.sin() * factor).cos() + factor, backend="inductor")
        return float(function(torch.tensor([3.0, 4.0]))[0])


@pytest.mark.slow
def test_a_forked_child_compiles_after_its_parent():
    mine = compiled(2.0)
    assert run_forked(1, lambda rank: compiled(2.0), timeout_s=100) == [mine]
