"""The one storage behind all executable graphs."""

from __future__ import annotations

from fxpar.store.home import ParamSpec, home_layout, home_of, param_specs, specs_of, wire_layout
from fxpar.store.memory import MemoryReport, choose_resident, memory_report

__all__ = [
    "MemoryReport",
    "ParamSpec",
    "choose_resident",
    "home_layout",
    "home_of",
    "memory_report",
    "param_specs",
    "specs_of",
    "wire_layout",
]
