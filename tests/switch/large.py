"""The 32B model of the HotSPa paper, shapes only, and its five layouts on 4 x 8 GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from fxpar.ir.graph import LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import outline
from fxpar.models import load
from fxpar.search.published import LAYERS_32B, LAYOUTS, MODEL_32B
from fxpar.switch import ParamLayout, layout_of
from fxpar.tracer import capture

STRATEGIES = dict(zip(("S1", "S2", "S3", "S4", "S5"), LAYOUTS.values(), strict=True))


@cache
def layouts_32b() -> dict[str, ParamLayout]:
    """By S1 ... S5. One layer is captured, which stands for all sixty (`benchmarks/bench_hotspa_32b.py` lowers them and
    moves the same bytes).
    """
    loaded = load("llama", options={**MODEL_32B, "layers": "1"}, dtype=torch.bfloat16, device="meta")
    graph = capture(loaded.model, loaded.loss_fn, loaded.example_batch, name="32B")
    return {name: _repeated(graph, name, Strategy.parse(text)) for name, text in STRATEGIES.items()}


def _repeated(graph: LogicalGraph, name: str, strategy: Strategy) -> ParamLayout:
    """A stage has its share of the layers, on its block of ranks."""
    count = strategy.pipeline_size
    axes = ("dp", "tp") if count > 1 else ("dp", "pp", "tp")
    inside = layout_of(outline(graph, ".".join(f"{axis}{strategy.degree(axis)}" for axis in axes)))
    stages = []
    for k in range(count):
        there = {}
        for fqn, param in inside.params.items():
            copies = (replace(d, mesh=replace(d.mesh, offset=k * inside.world)) for d in param.copies)
            there[fqn] = replace(param, copies=tuple(copies))
        stages.append(there)
    block = [fqn for fqn in inside.params if fqn.startswith("layers.")]
    first, *last = (fqn for fqn in inside.params if fqn not in block)
    params = {first: stages[0][first]}
    for i in range(LAYERS_32B):
        params |= {fqn.replace(".0.", f".{i}.", 1): stages[i * count // LAYERS_32B][fqn] for fqn in block}
    return ParamLayout(name, count * inside.world, params | {fqn: stages[-1][fqn] for fqn in last})
