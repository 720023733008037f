"""From a logical graph to programs: the ladder of passes, pipelines, and the checks between the passes."""

from __future__ import annotations

from fxpar.lowering.driver import finish, lower, lower_forward, split_phases
from fxpar.lowering.ladder import default_passes

__all__ = ["default_passes", "finish", "lower", "lower_forward", "split_phases"]
