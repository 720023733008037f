"""fxpar: capture a model once, lower it to a verified program per rank and parallel strategy."""

from __future__ import annotations

__version__ = "0.1.0"
