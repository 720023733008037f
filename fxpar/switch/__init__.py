"""Switching weights from one layout to another: slices, planners, verified plans. No process group is needed."""

from __future__ import annotations

from fxpar.switch.api import AnySwitchPlan, plan_large_switch, plan_switch
from fxpar.switch.layout import ParamLayout, PlacedParam, layout_of
from fxpar.switch.plan import Move, SwitchPlan

__all__ = [
    "AnySwitchPlan",
    "Move",
    "ParamLayout",
    "PlacedParam",
    "SwitchPlan",
    "layout_of",
    "plan_large_switch",
    "plan_switch",
]
