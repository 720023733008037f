"""Models to cut, captured once per test session, with micro-batches of several lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar import losses
from fxpar.ir.graph import LogicalGraph
from fxpar.models import load
from fxpar.runtime.micro import as_one_sequence
from fxpar.tracer import capture
from tests.captured import squared, tokens, vectors
from tests.random_model import VOCAB, RandomModel

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A captured model with its tensors; `tables(i)` are the inputs of micro-batch i by kind and FQN."""

    graph: LogicalGraph
    params: Tensors
    buffers: Tensors
    batches: tuple[Tensors, ...]

    def tables(self, micro_batch: int) -> dict[str, Tensors]:
        (scale,) = [i for i in self.graph.inputs if i.kind == "scale"]
        return {
            "param": self.params,
            "buffer": self.buffers,
            "batch": as_one_sequence(self.graph.inputs, self.batches[micro_batch], micro_batch),
            "constant": self.graph.constants,
            "scale": {"scale": torch.tensor(0.37, dtype=scale.meta.dtype)},
            "seed": {"seed": torch.tensor(5)},
        }


def take(
    model: nn.Module, loss: Callable, batches: list[dict[str, Tensor]], dtype: torch.dtype = torch.float64
) -> Model:
    model = model.to(dtype)
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in batches]
    graph = capture(model, loss, batches[0])
    params = {name: p.detach() for name, p in model.named_parameters()}
    return Model(graph, params, dict(model.named_buffers()), tuple(batches))


@functools.cache
def loaded(spec: str, **options: Any) -> Model:
    """A built-in model or one of transformers."""
    found = load(spec, options={k: str(v) for k, v in options.items()}, dtype=torch.float64)
    graph = capture(found.model, found.loss_fn, found.example_batch, name=spec)
    return Model(graph, found.params(), found.buffers(), tuple(found.batches))


class Skips(nn.Module):
    """A U: the second half reads what the first half made, the outermost first; frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.out = nn.Linear(8, 4)
        self.layers[3].weight.requires_grad_(False)
        self.layers[4].unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = torch.tanh(self.into(x)), []
        for i, layer in enumerate(self.layers):
            if i < 3:
                kept.append(x)
            x = torch.tanh(layer(x)) * (kept.pop() if i >= 3 else 1.0)
        return self.out(x)


class Norms(nn.Module):
    """Batch norms, whose buffers change with each micro-batch, and a count that is written at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        return self.out(x)


class Counted(nn.Module):
    """Every layer reads a buffer that the first one writes, or the last one."""

    def __init__(self, writer: int = 0) -> None:
        super().__init__()
        self.writer = writer
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.writer:
                self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            x = x + self.average
        return self.out(x)


class Twice(nn.Module):
    """The same layers run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(2):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return self.out(x)


class Recomputed(nn.Module):
    """Layers that are recomputed in the backward, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 16)) for _ in range(4)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Seq2Seq(nn.Module):
    """An encoder whose result all layers of the decoder read; one embedding for both and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        memory = self.embedding(input_ids)
        for layer in self.encoder:
            memory = memory + torch.tanh(layer(memory))
        x = self.embedding(input_ids.flip(-1))
        for layer in self.decoder:
            x = x + F.gelu(layer(torch.cat([x, memory], -1)))
        return x @ self.embedding.weight.t()


class Mean(nn.Module):
    """[B, 8] -> [B, 8], through one number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) * self.weight


class Means(nn.Module):
    """The gradient that a layer sends back is one number per row, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), Mean(), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Step(nn.Module):
    """One layer of a random model as a module."""

    def __init__(self, layer: Callable) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, weights: nn.ParameterList, values: list[Tensor], ids: Tensor) -> list[Tensor]:
        return self.layer(weights, values, ids)


class Random(nn.Module):
    """`RandomModel` with a module per layer; its weights belong to the model, and some are used by several layers."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        self.inner = RandomModel(seed, steps)
        self.steps = nn.ModuleList(Step(layer) for layer in self.inner.layers)
        self.inner.layers = list(self.steps)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids)


_ON_VECTORS = {
    "skips": Skips,
    "norms": Norms,
    "counted": Counted,
    "counted late": lambda: Counted(2),
    "twice": Twice,
    "means": Means,
}
_ON_TOKENS = {"recomputed": Recomputed, "seq2seq": Seq2Seq}


@functools.cache
def odd(name: str) -> Model:
    """One of the small models above."""
    torch.manual_seed(0)
    if name in _ON_VECTORS:
        return take(_ON_VECTORS[name](), squared, vectors(6, 4, 12, 5, 24))
    return take(_ON_TOKENS[name](), losses.causal_lm, plain_tokens(31))


def plain_tokens(vocab: int) -> list[dict[str, Tensor]]:
    return [{k: b[k] for k in ("input_ids", "labels")} for b in tokens(vocab, 8, 7, 12, rows=2)]


def random_model(seed: int, steps: int = 8) -> Model:
    torch.manual_seed(seed)
    return take(Random(seed, steps), losses.causal_lm, plain_tokens(VOCAB)[:2])
