"""A cost model."""

from __future__ import annotations

from fxpar import ClusterSpec
from fxpar.batching import GroupCost
from fxpar.ir.pipeline_graph import TrainGraph

# Seconds of one micro-batch, fitted to runs on one's own machines: fixed + per token + per token squared.
MEASURED = {
    "dp2": GroupCost(fixed_s=1e-3, per_token_s=2e-5, per_square_s=1e-9),
    "tp2": GroupCost(fixed_s=4e-3, per_token_s=1e-3, per_square_s=5e-10),
}


def measured(program: TrainGraph, cluster: ClusterSpec) -> GroupCost:
    """What a micro-batch of `program` took; KeyError for a strategy that nobody has measured."""
    return MEASURED[str(program.strategy).partition("+")[0]]
