"""The one storage behind all executable graphs."""

from __future__ import annotations

from fxpar.store.home import ParamSpec, home_layout, param_specs, specs_of, wire_layout
from fxpar.store.memory import MemoryReport, choose_resident, memory_report
from fxpar.store.schedule import SwitchSchedule

__all__ = [
    "MemoryReport",
    "ParamSpec",
    "SwitchSchedule",
    "choose_resident",
    "home_layout",
    "memory_report",
    "param_specs",
    "specs_of",
    "wire_layout",
]
