"""A model of any depth, for commands that price deep models from shallow ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from fxpar.cli.options import GraphSource
from fxpar.cli.source import read_rows
from fxpar.ir.exec_graph import Outline
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower, outline
from fxpar.models.depth import layer_option
from fxpar.models.options import parse_assignments
from fxpar.search.price import Depth, Lower
from fxpar.search.pricing import Outlines


class Shallow:
    """A model with any number of layers, captured once for each; lowered for a store, or only its parameters placed."""

    def __init__(self, source: GraphSource) -> None:
        option = layer_option(source.model, parse_assignments(source.options))
        self.depth = Depth(1, whole=True) if option is None else Depth(option.layers, option.period)

        @functools.cache
        def rows(layers: int) -> LogicalGraph:
            if option is None or layers == option.layers:
                return read_rows(source)
            return read_rows(replace(source, options=(*source.options, f"{option.name}={layers}")))

        @functools.cache
        def outlines(strategy: Strategy, layers: int) -> Outline:
            return outline(rows(layers), strategy)

        def lowered(strategy: Strategy, layers: int) -> TrainGraph:
            return lower(rows(layers), strategy, for_store=True)

        self.rows: Callable[[int], LogicalGraph] = rows
        self.outlines: Outlines = outlines
        self.lower: Lower = lowered
