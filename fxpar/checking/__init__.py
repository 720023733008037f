"""Does a strategy compute what a single device does? All ranks in one process, no process group."""

from __future__ import annotations

from fxpar.checking.driver import TOLERANCE, CheckResult, assign, check, local_params, run_world
from fxpar.checking.eager import relative_error

__all__ = ["TOLERANCE", "CheckResult", "assign", "check", "local_params", "relative_error", "run_world"]
