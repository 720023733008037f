"""Layouts of strategies: equal to those of lowered graphs where these exist; pipeline stages by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpar.annotate import annotate
from fxpar.errors import LayoutError, NotYetError
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.models.loaded import LoadedModel
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch.analytic import ModelShapes, ParamInfo, model_shapes, stage_starts
from fxpar.tracer import capture
from tests.captured import llama
from tests.repeat import thinned


@functools.cache
def shapes(**options: object) -> ModelShapes:
    loaded = load("llama", options={k: str(v) for k, v in options.items()}, device="meta")
    return model_shapes(loaded.model, loaded.loss_fn, loaded.example_batch, "llama")


@functools.cache
def logical(layers: int) -> LogicalGraph:
    loaded = load("llama", options={"layers": str(layers)}, device="meta")
    return capture(loaded.model, loaded.loss_fn, loaded.example_batch)


def stages(layout: ParamLayout, fqn: str) -> list[range]:
    meshes = [dist.mesh for dist in layout.params[fqn].copies]
    assert all(mesh.ranks == tuple(range(mesh.offset, mesh.offset + mesh.size)) for mesh in meshes)
    return [range(mesh.offset, mesh.offset + mesh.size) for mesh in meshes]


@pytest.mark.parametrize(
    "text",
    thinned(
        ["dp2", "tp2", "dp2.tp2+sp", "cp2", "dp2.tp2+zero1", "tp2.dp2+zero3"], ["dp2.tp2+sp", "cp2", "tp2.dp2+zero3"]
    ),
)
def test_as_the_lowered_graph_stores_them(text):
    strategy = Strategy.parse(text)
    captured = llama()
    graph = lower(captured.graph, strategy)
    stored = layout_of(graph)
    assert stored.world == strategy.world
    assert list(stored.params) == list(captured.params)
    if strategy.zero not in (1, 2):  # these store shards but compute with whole parameters
        model = model_of(captured)
        assert model.layout(strategy).params == stored.params
    annotated = layout_of(annotate(captured.graph, strategy))
    assert annotated.params["head.weight"].shape == stored.params["head.weight"].shape


def model_of(captured):
    params = {fqn: ParamInfo(tuple(p.shape), p.dtype, (0,)) for fqn, p in captured.params.items()}
    return ModelShapes("llama", params, 0, captured.graph)


def test_gradients_lie_as_zero_stores_them():
    captured, strategy = llama(), Strategy.parse("dp2.tp2+zero1")
    scattered = model_of(captured).layout(Strategy.parse("dp2.tp2")).scattered()
    assert scattered.params == layout_of(lower(captured.graph, strategy)).params


def test_stages_are_consecutive_ranks_wherever_pp_stands():
    model = shapes(layers=5)
    for text in ("dp2.pp2.tp2", "pp2.dp2.tp2", "dp2.tp2.pp2"):
        layout = model.layout(Strategy.parse(text))
        assert layout.world == 8
        assert stages(layout, "embedding.weight") == [range(0, 4)]
        assert [stages(layout, f"layers.{i}.ffn.up_proj.weight") for i in range(5)] == [[range(0, 4)]] * 3 + [
            [range(4, 8)]
        ] * 2
        assert stages(layout, "norm.weight") == stages(layout, "head.weight") == [range(4, 8)]
        dist = layout.params["layers.4.ffn.up_proj.weight"].copies[0]
        assert dist.mesh == Mesh((("dp", 2), ("tp", 2)), 4)
        assert str(dist) == "f32[_@tp, _]"


@pytest.mark.parametrize(
    ("layers", "count", "starts"), [(8, 4, [0, 2, 4, 6]), (7, 3, [0, 3, 5]), (5, 4, [0, 2, 3, 4]), (6, 1, [0])]
)
def test_uneven_layers(layers, count, starts):
    assert stage_starts(layers, count) == starts


def test_tied_embedding_lies_on_both_ends():
    layout = shapes(layers=4, tied="true").layout(Strategy.parse("pp4.tp2"))
    assert stages(layout, "embedding.weight") == [range(0, 2), range(6, 8)]
    assert "head.weight" not in layout.params
    assert stages(layout.scattered(), "embedding.weight") == [range(0, 2)]


def test_two_layers_stand_for_all():
    model = shapes(layers=30)
    names = [i.fqn for i in model.logical.inputs if i.kind == "param"]
    assert {name.split(".")[1] for name in names if name.startswith("layers")} == {"0", "1"}
    assert len(model.layout(Strategy.parse("tp2")).params) == 30 * 9 + 3
    loaded = load("llama", options={"layers": "3"}, device="meta")
    before = [name for name, _ in loaded.model.named_parameters()]
    model_shapes(loaded.model, loaded.loss_fn, loaded.example_batch, "m")
    assert [name for name, _ in loaded.model.named_parameters()] == before  # the model is given back whole


class Funnel(nn.Module):
    """Layers of unequal width: none stands for another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n // 2) for n in (64, 32, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def funnel() -> LoadedModel:
    batch = {"x": torch.empty(6, 64, device="meta")}
    return LoadedModel("funnel", Funnel().to("meta"), lambda m, b: m(b["x"]).sum(), batch, (batch,))


def test_unequal_layers_are_captured_in_full():
    loaded = funnel()
    layout = model_shapes(loaded.model, loaded.loss_fn, loaded.example_batch, "funnel").layout(
        Strategy.parse("pp2.tp2")
    )
    assert stages(layout, "layers.1.weight") == [range(0, 2)]
    assert stages(layout, "layers.3.bias") == [range(2, 4)]


def test_bad_requests():
    model = shapes(layers=5)
    with pytest.raises(LayoutError, match="llama has 5 layers for 6 pipeline stages"):
        model.layout(Strategy.parse("pp6"))
    with pytest.raises(NotYetError, match="axis 'ep'"):
        model.layout(Strategy.parse("ep2"))


@pytest.mark.parametrize(
    "text",
    thinned(
        ["dp2.pp2.tp2", "pp4+zb_h1", "pp3+cut(layers.1|layers.4)", "pp2+interleaved_1f1b(2)"],
        ["pp3+cut(layers.1|layers.4)", "pp2+interleaved_1f1b(2)"],
    ),
)
def test_stages_as_the_lowered_graph_has_them(text):
    """The same meshes and placements; where lowering balances cost in another way, its cuts are named."""
    strategy = Strategy.parse(text)
    program = lower(logical(5), strategy, for_store=True)
    assert isinstance(program, PipelineGraph)
    named = replace(strategy, pipeline=replace(strategy.pipeline, cuts=program.cuts))
    analytic, stored = shapes(layers=5).layout(named), layout_of(program)
    assert analytic.world == stored.world
    for fqn, param in stored.params.items():
        assert analytic.params[fqn].copies == param.copies, fqn


@pytest.mark.parametrize("cut", ["head", "layers.0", "layers.9"])
def test_a_cut_that_is_no_layer(cut):
    with pytest.raises(LayoutError, match=f"'{cut}' is no layer"):
        shapes(layers=5).layout(Strategy.parse(f"pp2+cut({cut})"))
