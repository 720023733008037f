"""`torch.compile(model, backend="fxpar", options={"strategy": "dp2.tp2"})`: a training loop as it is, in parallel.

For a plain loop on every rank of an initialised process group, as written for `DistributedDataParallel`, which this
replaces: every rank holds all weights (equal on all ranks) and its own optimizer; each data-parallel replica feeds a
batch of its own, all ranks of one replica feed the same. Forward and backward run under the strategy on pieces that
are cut from the weights without traffic. Values come back whole, gradients whole and averaged over replicas. Dropout
draws from `options["seed"]` and a count of calls, not from torch's generator. New running statistics of batch norms
are averaged over replicas.

With `options={"strategies": {1024: "dp4", 8192: "tp4"}}` each call runs under the first strategy that takes its tokens.
Weights are whole, so every strategy's pieces are views of them and a switch moves nothing. All ranks must come to the
same strategy: under dp4 four batches of at most 1,024 tokens, under tp4 one batch that all have.

Pass `fullgraph=True`: what Dynamo leaves to plain torch (behind a graph break, beyond its limit of recompilations) is
not seen here, so its gradients are those of one replica.

Weights that are stored sharded are what `fxpar.parallelize` is for.
"""

from __future__ import annotations

from fxpar.dynamo.driver import backend
from fxpar.dynamo.options import OPTIONS, BackendOptions

__all__ = ["OPTIONS", "BackendOptions", "backend"]
