"""The one storage behind all executable graphs."""

from __future__ import annotations

from fxpar.store.home import ParamSpec, home_layout
from fxpar.store.memory import MemoryReport, choose_resident, memory_report
from fxpar.store.schedule import SwitchSchedule, check_order
from fxpar.store.weights import WeightStore, param_specs, wire_layout

__all__ = [
    "MemoryReport",
    "ParamSpec",
    "SwitchSchedule",
    "WeightStore",
    "check_order",
    "choose_resident",
    "home_layout",
    "memory_report",
    "param_specs",
    "wire_layout",
]
