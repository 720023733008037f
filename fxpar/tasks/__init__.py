"""Plans of waves for a model: what its tasks share and repeat is read off their captured graphs, and priced."""

from __future__ import annotations

from fxpar.tasks.contract import TaskStep
from fxpar.tasks.plan import captured, plan_tasks

__all__ = ["TaskStep", "captured", "plan_tasks"]
