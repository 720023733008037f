"""Capture: from a module and a loss function to a LogicalGraph."""

from __future__ import annotations

from fxpar.capture.api import capture

__all__ = ["capture"]
