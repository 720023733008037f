"""Run exec graphs on ranks."""

from __future__ import annotations

from fxpar.runtime.bound import BoundGraph, bind
from fxpar.runtime.padding import pad, pad_batch

__all__ = ["BoundGraph", "bind", "pad", "pad_batch"]
