"""The 32B model of the HotSPa paper, shapes only, and its five layouts on 4 x 8 GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from fxpar.lowering import outline
from fxpar.models import load
from fxpar.switch import ParamLayout, layout_of
from fxpar.tracer import capture

LAYERS, CAPTURED = 60, 4
SIZES = {"layers": CAPTURED, "dim": 6656, "heads": 64, "kv_heads": 64, "ffn": 17920, "vocab": 30592}
STRATEGIES = {
    "S1": "dp1.pp2.tp16",
    "S2": "dp2.pp2.tp8",
    "S3": "dp4.pp2.tp4",
    "S4": "dp4.pp4.tp2",
    "S5": "dp8.pp1.tp4",
}


@cache
def layouts_32b() -> dict[str, ParamLayout]:
    """By S1 ... S5. Four layers are captured, each of which stands for fifteen: stages are cut behind layers 15, 30 and
    45 (`benchmarks/bench_hotspa_32b.py` lowers all sixty, and moves the same bytes).
    """
    options = {name: str(size) for name, size in SIZES.items()}
    loaded = load("llama", options=options, dtype=torch.bfloat16, device="meta")
    graph = capture(loaded.model, loaded.loss_fn, loaded.example_batch, name="32B")
    return {name: _repeated(layout_of(outline(graph, text), name)) for name, text in STRATEGIES.items()}


def _repeated(layout: ParamLayout) -> ParamLayout:
    params, each = {}, LAYERS // CAPTURED
    for fqn, param in layout.params.items():
        parts = fqn.split(".")
        if parts[0] != "layers":
            params[fqn] = param
            continue
        for i in range(each):
            params[".".join((parts[0], str(int(parts[1]) * each + i), *parts[2:]))] = param
    return replace(layout, params=params)
