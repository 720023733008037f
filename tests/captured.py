"""Small models captured once per test session, with tensors and micro-batches of unequal lengths to run them on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar import expert_mm, losses, weighted_sum
from fxpar.checking import CheckResult, check
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.models.gpt import Gpt, GptOptions
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.runtime.micro import as_one_sequence
from fxpar.tracer import capture

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Captured:
    graph: LogicalGraph
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batches: tuple[Batch, ...]

    def check(self, strategy: str, tolerance: float | None = None) -> CheckResult:
        (result,) = check(self.graph, [strategy], self.params, self.buffers, self.batches, tolerance=tolerance)
        return result


@functools.lru_cache(64)
def lowered(captured: Captured, strategy: str) -> TrainGraph:
    """The program of a strategy, for tests that only read it."""
    return lower(captured.graph, strategy)


def take(
    model: nn.Module, loss: Callable, batches: list[Batch], dtype: torch.dtype = torch.float64, **options
) -> Captured:
    """Capture `model` with the first batch, all floating-point tensors in `dtype`."""
    model = model.to(dtype)
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    graph = capture(model, loss, batches[0], **options)
    params = {name: p.detach() for name, p in model.named_parameters()}
    numbered = tuple(as_one_sequence(graph.inputs, batch, i) for i, batch in enumerate(batches))
    return Captured(graph, params, dict(model.named_buffers()), numbered)


def tokens(vocab: int, *lengths: int, rows: int = 1) -> list[Batch]:
    """Rows of tokens with positions; a few labels are not valid."""
    batches = []
    for T in lengths:
        ids = torch.randint(vocab, (rows, T))
        labels = torch.randint(vocab, (rows, T))
        labels[0, T // 2] = losses.IGNORE_INDEX
        batches.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(T).expand(rows, T).clone()})
    return batches


def vectors(width: int, out: int, *rows: int) -> list[Batch]:
    return [{"x": torch.randn(n, width), "y": torch.randn(n, out)} for n in rows]


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return losses.mse_sum(model(batch["x"]), batch["y"])


def llama(
    layers: int = 1,
    kv_heads: int = 2,
    heads: int = 4,
    dim: int = 32,
    ffn: int = 48,
    vocab: int = 97,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    length: int = 13,
) -> Captured:
    """The plain Llama on two rows; its vocabulary divides by nothing."""
    return _llama(layers, kv_heads, heads, dim, ffn, vocab, tied, dtype, length)


@functools.cache  # by all values: `llama()` and `llama(layers=1)` are one capture
def _llama(
    layers: int,
    kv_heads: int,
    heads: int,
    dim: int,
    ffn: int,
    vocab: int,
    tied: bool,
    dtype: torch.dtype,
    length: int,
) -> Captured:
    torch.manual_seed(0)
    options = LlamaOptions(layers, dim, heads, kv_heads, ffn, vocab, tied=tied)
    lengths = (length, 7, 24, 18, 5)
    model = Llama(options)
    for p in model.parameters():
        if p.dim() == 1:  # of a norm: with ones, a rank that had others' weights would compute the same
            nn.init.uniform_(p, 0.5, 1.5)
    return take(model, losses.causal_lm, tokens(vocab, *lengths, rows=2), dtype)


@functools.cache
def gpt(dropout: float = 0.25, heads: int = 4) -> Captured:
    torch.manual_seed(0)
    options = GptOptions(2, 32, heads, 50, 61, 64, dropout)
    return take(Gpt(options), losses.causal_lm, tokens(61, 12, 7, 20))


class Mlp(nn.Module):
    """Widths that divide by nothing; `activation` need not keep zeros."""

    def __init__(self, activation: Callable[[Tensor], Tensor], widths: tuple[int, ...] = (6, 11, 10, 5)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: torch.exp(x * 0.5),
    "cos": torch.cos,
    "shift": lambda x: (x + 1.0) * 0.5,
    "reciprocal": lambda x: 1.0 / x.square(),  # infinite where padding is zero
    "softplus": F.softplus,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "normalise": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1.0),
    "maximum": lambda x: x - x.amax(-1, keepdim=True),
    "clamp": lambda x: x.clamp(min=0.3),
}


@functools.cache
def mlp(activation: str = "gelu") -> Captured:
    torch.manual_seed(0)
    return take(Mlp(ACTIVATIONS[activation]), squared, vectors(6, 5, 12, 24, 12))


class Fused(nn.Module):
    """Attention whose q, k, v come from one matrix, and a gate and an up projection from another.

    `how` cuts the first: "split" in unequal parts, "chunk" in equal ones, "slice" by indices, "view" as [.., 3, H, E].
    """

    def __init__(self, how: str, heads: int, kv_heads: int, width: int = 16, vocab: int = 31) -> None:
        super().__init__()
        self.how, self.heads, self.kv_heads, self.E = how, heads, kv_heads, 4
        self.embedding = nn.Embedding(vocab, width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.E)
        self.out = nn.Linear(heads * self.E, width)
        self.gate_up = nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(24, width, bias=False)
        self.head = nn.Linear(width, vocab)

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        q, kv = self.heads * self.E, self.kv_heads * self.E
        if self.how == "split":
            return qkv.split([q, kv, kv], -1)
        if self.how == "chunk":
            return qkv.chunk(3, -1)
        if self.how == "slice":
            return qkv[..., :q], qkv[..., q : q + kv], qkv[..., -kv:]
        return qkv.view(*qkv.shape[:2], 3, q).unbind(2)

    def forward(self, input_ids: Tensor) -> Tensor:
        B, T = input_ids.shape
        x = self.embedding(input_ids)
        q, k, v = (part.view(B, T, -1, self.E).transpose(1, 2) for part in self.parts(self.qkv(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


@functools.cache
def fused(how: str, heads: int = 4, kv_heads: int = 4) -> Captured:
    torch.manual_seed(0)
    return take(Fused(how, heads, kv_heads), losses.causal_lm, tokens(31, 8, 5, 12))


class Norms(nn.Module):
    """BatchNorm, whose running statistics change with every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.into(x)))


class Counter(nn.Module):
    """A buffer that the forward writes, a frozen parameter, an unused one, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 9), nn.Linear(9, 4)
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.into(x)) * self.frozen * torch.tensor([1.0, 2.0, 3.0] * 3, dtype=x.dtype)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return self.out(h + self.average)


class Shared(nn.Module):
    """Gradients that are views of one another, and one that is a broadcast scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))
        self.r = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.p + self.q.t()) + self.r.sum()


class Sizes(nn.Module):
    """Parameters with no dim, one element, no element, a first dim that is smaller than any degree."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1))
        self.row, self.nothing = nn.Parameter(torch.randn(1, 9)), nn.Parameter(torch.randn(0, 9))
        self.cube = nn.Parameter(torch.randn(2, 1, 9))
        self.into, self.out = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.into(x) * self.gain + self.shift) * self.row
        return self.out(h + self.nothing.sum() + self.cube.square().sum((0, 1)))


class Adapted(nn.Module):
    """Low-rank adapters on frozen weights, in a block that is used twice and recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(31, 16), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)
        self.a, self.b = nn.Linear(16, 3, bias=False), nn.Linear(3, 24, bias=False)
        self.head = nn.Linear(16, 31)
        self.embedding.weight.requires_grad_(False)
        self.up.weight.requires_grad_(False)

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x) + self.b(self.a(x)) * 0.5))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)


class Experts(nn.Module):
    """Every token through all experts, weighted by the two largest of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(31, 16), nn.Linear(16, 4, bias=False), nn.Linear(16, 31)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 12) * 0.2), nn.Parameter(torch.randn(4, 12, 16) * 0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        flat = x.reshape(-1, 16)
        scores = self.router(flat).softmax(-1)
        best, index = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, index, best)
        y = torch.einsum("enf,efd->end", F.gelu(torch.einsum("nd,edf->enf", flat, self.up)), self.down)
        return self.head(x + (y * weights.t()[..., None]).sum(0).view(x.shape))


class Routed(nn.Module):
    """Each token through two of five experts with biases, and through one that all share."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(31, 16), nn.Linear(16, 5), nn.Linear(16, 31)
        self.up, self.bias = (nn.Parameter(torch.randn(*s, 2 * hidden) * 0.2) for s in ((5, 16), (5,)))
        self.down = nn.Parameter(torch.randn(5, hidden, 16) * 0.2)
        self.shared = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        flat = x.reshape(-1, 16)
        weights, ids = self.router(flat).softmax(-1).topk(2, -1)
        up = expert_mm(flat[:, None].expand(-1, 2, -1), self.up, ids) + F.embedding(ids, self.bias)
        gate, value = up.chunk(2, -1)
        y = weighted_sum(expert_mm(F.silu(gate) * value, self.down, ids), weights)
        return self.head(x + (y + self.shared(flat)).view(x.shape))


@functools.cache
def odd(name: str) -> Captured:
    """`norms`, `counter`, `shared`, `sizes` on vectors; `adapted`, `experts`, `routed` on tokens."""
    torch.manual_seed(0)
    on_tokens = {"adapted": Adapted, "experts": Experts, "routed": Routed}
    if name in on_tokens:
        batches = [{k: b[k] for k in ("input_ids", "labels")} for b in tokens(31, 8, 7, 12, rows=2)]
        return take(on_tokens[name](), losses.causal_lm, batches)
    on_vectors = {"norms": Norms, "counter": Counter, "shared": Shared, "sizes": Sizes}
    return take(on_vectors[name](), squared, vectors(6, 4, 12, 24, 12, 36, 12))
