"""Kernels that give the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
