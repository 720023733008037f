"""Small models as the tabs see them, lowered once per session."""

from __future__ import annotations

import functools

import torch

from fxpar.ir.graph import LogicalGraph
from fxpar.lowering import lower
from fxpar.viz import Viewed
from tests.captured import Mlp, llama, squared, take, vectors

STRATEGIES = ("dp2.tp2+sp", "tp2+zero3", "pp2.tp2")


@functools.cache
def viewed(strategy: str) -> Viewed:
    """A small Llama under a strategy, as `fxpar viz` makes it."""
    logical = llama(layers=2).graph
    return Viewed(strategy, lower(logical, strategy), logical, lower(logical, strategy, for_store=True))


@functools.cache
def tall(layers: int, strategy: str = "dp2.tp2") -> Viewed:
    """Many equal layers, of which all but the last have an activation."""
    graph = _tall(layers)
    return Viewed(strategy, lower(graph, strategy), graph)


@functools.cache
def _tall(layers: int) -> LogicalGraph:
    return take(Mlp(torch.relu, (8,) * (layers + 1)), squared, vectors(8, 8, 6)).graph
