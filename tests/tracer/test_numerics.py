"""The captured graph computes what eager autograd computes, at the example's length and at others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import errors, losses
from fxpar.tracer import capture
from tests.tracer.helpers import check, difference, eager, ops, run
from tests.tracer.models import MLP, ConvNet, Decoder, ViT


def tokens(T: int, B: int = 2, vocab: int = 61) -> dict[str, Tensor]:
    ids = torch.randint(vocab, (B, T))
    labels = losses.next_token_labels(ids)
    labels[:, -1] = ids[:, 0]
    labels[0, : T // 3] = -100
    return {"input_ids": ids, "labels": labels}


def images(B: int) -> dict[str, Tensor]:
    return {"images": torch.randn(B, 3, 8, 8, dtype=torch.float64), "labels": torch.randint(5, (B,))}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")


@pytest.mark.parametrize("tied", [False, True])
def test_decoder(tied):
    layers = 1 if tied else 2
    model = Decoder(layers, tied).double()
    graph = check(model, losses.causal_lm, [tokens(T) for T in (12, 7, 33, 1, 64)])
    found = ops(graph)
    assert found.count("fxpar.attention") == found.count("fxpar.attention_backward") == layers
    assert {"fxpar.embedding", "fxpar.cross_entropy"} <= set(found)
    head = next(i for i in graph.inputs if i.fqn == "embed.weight")
    assert head.aliases == (("head.weight",) if tied else ())
    (dim,) = graph.dims
    assert (dim.name, dim.example, dim.minimum, dim.maximum) == ("T", 12, 1, 64)


class OfPositions(nn.Module):
    """Whole numbers become fractions by four kinds of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 4), nn.Linear(4, 61)

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1])
        factor = (place / 3 + 1) * torch.sqrt(place + 1) + (place > 2) * 0.7 + torch.where(place > 4, 1.0, 0.3)
        return self.head(self.embed(input_ids) * factor.unsqueeze(-1))


class Bigram(nn.Module):
    """Says the next token by the last one: what casts and gradients do, without what attention costs to capture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def test_the_default_dtype_is_that_of_the_capture():
    before = torch.get_default_dtype()
    model, batch = OfPositions().double(), tokens(12)
    try:
        torch.set_default_dtype(torch.float64)
        graph = capture(model, losses.causal_lm, batch)
        expected = eager(model, losses.causal_lm, batch)
    finally:
        torch.set_default_dtype(before)
    assert difference(run(graph, model, batch), expected) <= 1e-14


def test_mlp_over_a_dynamic_batch():
    def loss(model, batch):
        return losses.mse_sum(model(batch["x"]), batch["y"])

    batches = [
        {"x": torch.randn(B, 8, dtype=torch.float64), "y": torch.randn(B, 4, dtype=torch.float64)} for B in (6, 1, 11)
    ]
    graph = check(MLP().double(), loss, batches)
    assert [dim.name for dim in graph.dims] == ["B"]
    assert "aten.addmm" not in ops(graph)


def test_vit():
    graph = check(ViT().double(), classify, [images(B) for B in (3, 1, 5)])
    attention = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.attention.default)
    assert [node.args[5] for node in attention] == [False]


def test_batch_norm_returns_new_statistics():
    model = ConvNet().double()
    graph = check(model, classify, [images(B) for B in (4, 9)], tolerance=1e-11)
    batch = images(6)
    results = run(graph, model, batch)
    model(batch["images"])
    written = [out.fqn for out in graph.outputs if out.kind == "buffer"]
    assert written == [name for name, _ in model.named_buffers()]
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(results["buffer", name], buffer, rtol=1e-12, atol=0.0)


class First(nn.Module):
    """The first of several results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


LAYERS = {
    "lstm": (lambda: First(nn.LSTM(8, 4, batch_first=True)), (3, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 2, 2)),
        (4, 6),
    ),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), (8,)),
    "norms": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8)), (5, 8)),
    "upsampling": (lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name):
    make, shape = LAYERS[name]
    batches = [{"x": torch.randn(B, *shape, dtype=torch.float64)} for B in (4, 1)]
    check(make().double(), lambda m, b: m(b["x"]).pow(3).sum(), batches)


def test_frozen_and_unused_parameters():
    model = Bigram().double()
    model.embed.weight.requires_grad_(False)
    model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.warns(errors.FxparWarning, match="does not depend on extra"):
        graph = check(model, losses.causal_lm, [tokens(9), tokens(5)])
    grads = [out.fqn for out in graph.outputs if out.kind == "grad"]
    assert "embed.weight" not in grads
    assert "extra" not in grads
    frozen = next(i for i in graph.inputs if i.fqn == "embed.weight")
    assert frozen.kind == "param"
    assert not frozen.requires_grad
    assert "fxpar.embedding_backward" not in ops(graph)


def test_bf16_and_autocast():
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return losses.causal_lm(model, batch)

    graph = check(Decoder(layers=1), loss, [tokens(8), tokens(21)], tolerance=0.05)
    matmuls = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert {node.meta["tensor"].dtype for node in matmuls} == {torch.bfloat16}
    attention = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.attention.default)
    assert {node.args[0].meta["tensor"].dtype for node in attention} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        around = check(Bigram(), losses.causal_lm, [tokens(8)], tolerance=0.05)
    assert "aten._to_copy" in ops(around)
    half = check(Bigram().bfloat16(), losses.causal_lm, [tokens(8)], tolerance=0.1)
    assert half.inputs[-2].meta.dtype == torch.float32  # the scale, as the loss


def test_cuda_autocast_acts_where_there_is_no_cuda():
    def loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return losses.causal_lm(model, batch)

    graph = capture(Bigram(), loss, tokens(8))
    matmuls = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert {node.meta["tensor"].dtype for node in matmuls} == {torch.bfloat16}
