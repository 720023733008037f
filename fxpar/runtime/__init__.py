"""Run exec graphs on ranks."""

from __future__ import annotations

from fxpar.runtime.bound import BoundGraph, bind
from fxpar.runtime.groups import ProcessGroups
from fxpar.runtime.padding import pad, pad_batch

__all__ = ["BoundGraph", "ProcessGroups", "bind", "pad", "pad_batch"]
