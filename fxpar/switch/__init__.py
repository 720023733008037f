"""Switching weights from one layout to another: slices, planners, verified plans. No process group is needed."""

from __future__ import annotations

from fxpar.switch.api import plan_switch
from fxpar.switch.layout import ParamLayout, PlacedParam, layout_of
from fxpar.switch.plan import Move, SwitchPlan

__all__ = ["Move", "ParamLayout", "PlacedParam", "SwitchPlan", "layout_of", "plan_switch"]
