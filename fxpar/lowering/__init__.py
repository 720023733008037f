"""From a logical graph to programs: the ladder of passes, pipelines, and the checks between the passes."""

from __future__ import annotations

from fxpar.lowering.alike import LowerAlike
from fxpar.lowering.driver import check_captured, finish, graphs_after, lower, lower_forward, outline, split_phases
from fxpar.lowering.ladder import default_passes

__all__ = [
    "LowerAlike",
    "check_captured",
    "default_passes",
    "finish",
    "graphs_after",
    "lower",
    "lower_forward",
    "outline",
    "split_phases",
]
