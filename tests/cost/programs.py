"""Lowered programs of a small Llama in bfloat16, and clusters of four devices."""

from __future__ import annotations

import functools

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.passes.pack_documents import pack_documents
from fxpar.tracer import capture

LAYERS, DIM, HEADS, FFN, VOCAB = 2, 512, 8, 1376, 4096
OPTIONS = {"layers": LAYERS, "dim": DIM, "heads": HEADS, "kv_heads": HEADS, "ffn": FFN, "vocab": VOCAB}
DEVICE = Device(400.0, 2000.0, 4.0)
NODE = ClusterSpec(1, 4, 400.0, 50.0, 10.0, device=DEVICE)
PAIR = ClusterSpec(2, 2, 400.0, 50.0, 10.0, device=DEVICE)


@functools.cache
def graph() -> LogicalGraph:
    model = load(
        "llama", options={k: str(v) for k, v in OPTIONS.items()}, tokens=(61,), device="meta", dtype="bfloat16"
    )
    return capture(model.model, model.loss_fn, model.example_batch)


@functools.cache
def program(strategy: str) -> TrainGraph:
    return lower(pack_documents(graph()) if Strategy.parse(strategy).bins > 1 else graph(), strategy)
