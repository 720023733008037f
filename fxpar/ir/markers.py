"""Ops that mark something in a graph between two passes and do nothing."""

from __future__ import annotations

from torch import Tensor


def vary(x: Tensor) -> Tensor:
    """A replica's value seen as one term over dp; the same local tensor."""
    return x
