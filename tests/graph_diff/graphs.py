"""The small llama, captured and lowered once for all tests of a run."""

from __future__ import annotations

import functools

from fxpar.graph_diff import Digest, GraphDiff, compare, digest
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.tracer import capture

STRATEGIES = ("dp2", "tp2", "tp2+sp", "cp2", "dp2.tp2+sp+zero3", "pp2.tp2")


@functools.cache
def logical(model: str = "llama", layers: int = 3) -> LogicalGraph:
    loaded = load(model, device="meta", options={"layers": str(layers)})
    return capture(loaded.model, loaded.loss_fn, loaded.example_batch, name=loaded.name)


@functools.cache
def lowered(strategy: str) -> TrainGraph:
    return lower(logical(), strategy)


@functools.cache
def side(strategy: str) -> Digest:
    return digest(lowered(strategy))


def difference(old: str, new: str) -> GraphDiff:
    return compare(side(old), side(new))
