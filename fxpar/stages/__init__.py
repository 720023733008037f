"""Pipeline stages: a logical graph cut into consecutive graphs, and each of those into forward and backward parts."""

from __future__ import annotations

from fxpar.stages.cut import cut_stages
from fxpar.stages.layers import Layer, balanced_cuts, find_layers
from fxpar.stages.parts import StageParts, split_parts
from fxpar.stages.staged import Crossing, SharedParam, StagedGraph, StageGraph

__all__ = [
    "Crossing",
    "Layer",
    "SharedParam",
    "StageGraph",
    "StageParts",
    "StagedGraph",
    "balanced_cuts",
    "cut_stages",
    "find_layers",
    "split_parts",
]
