"""The 32B model of the HotSPa paper, shapes only, and its five layouts on 4 x 8 GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from fxpar.ir.strategy import Strategy
from fxpar.models import load
from fxpar.switch import ParamLayout
from fxpar.switch.analytic import ModelShapes, model_shapes

SIZES = {"layers": "60", "dim": "6656", "heads": "64", "kv_heads": "64", "ffn": "17920", "vocab": "30592"}
STRATEGIES = {
    "S1": "dp1.pp2.tp16",
    "S2": "dp2.pp2.tp8",
    "S3": "dp4.pp2.tp4",
    "S4": "dp4.pp4.tp2",
    "S5": "dp8.pp1.tp4",
}


@cache
def shapes_32b() -> ModelShapes:
    loaded = load("llama", options=SIZES, dtype=torch.bfloat16, device="meta")
    return model_shapes(loaded.model, loaded.loss_fn, loaded.example_batch, "32B")


@cache
def layouts_32b() -> dict[str, ParamLayout]:
    """By S1 ... S5."""
    shapes = shapes_32b()
    return {name: replace(shapes.layout(Strategy.parse(text)), name=name) for name, text in STRATEGIES.items()}
