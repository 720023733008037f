"""Modes of torch around a step: kernels that give the same bits every time, no autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxpar.errors import AutocastError
from fxpar.tracer.signature import autocast_dtype


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Within the block torch refuses kernels whose bits may differ from run to run; the setting before is restored.

    On CUDA, cuBLAS needs `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment for that; torch says so.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def cast_as_captured(device: torch.device, captured: torch.dtype | None) -> Iterator[None]:
    """Within the block autocast is off: a captured step has the casts that were on at its capture.

    Raises AutocastError if others are on now.
    """
    now = autocast_dtype(device)
    if now not in (None, captured):
        raise AutocastError(device.type, now, captured)
    with torch.autocast(device.type, enabled=False):
        yield
