"""Waves over several tasks: layers of many encoders and language models at the same time, each on its own devices.

A MetaOp is a chain of equal layers of one task, a piece so many of its layers on some devices, a wave pieces side by
side. Nothing here imports torch.
"""

from __future__ import annotations

from fxpar.waves.plan import WavePlan, plan_waves
from fxpar.waves.published import CASES
from fxpar.waves.work import MetaOp, TaskGraph

__all__ = ["CASES", "MetaOp", "TaskGraph", "WavePlan", "plan_waves"]
