"""Random programs on tokens: each layer takes one or two earlier values and makes new ones of another width.

No layer mixes tokens but causal attention, so every length and every padding must give the same gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 13
WIDTHS = (3, 4, 5, 6, 8, 9, 10, 12, 15, 16)
Layer = Callable[[nn.ParameterList, list[Tensor], Tensor], list[Tensor]]


class RandomModel(nn.Module):
    """`steps` random layers behind an embedding; `kinds` names them."""

    def __init__(self, seed: int, steps: int = 7) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.weights, self.layers, self.kinds = nn.ParameterList(), [], []
        self.widths = [self.random.choice((4, 6, 8, 12))]
        self.embedding = nn.Embedding(VOCAB, self.widths[0])
        while len(self.layers) < steps:
            kind = self.random.choice(list(MAKERS))
            source = self.random.randrange(len(self.widths))
            made = MAKERS[kind](self, source, self.widths[source])
            if made is not None:
                layer, widths = made
                self.layers.append(layer)
                self.kinds.append(kind)
                self.widths += widths
        self.head = self.weight(VOCAB, sum(self.widths[-3:]))

    def weight(self, *shape: int) -> int:
        """Number of a new parameter."""
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        self.weights.append(nn.Parameter(torch.randn(*shape) * scale))
        return len(self.weights) - 1

    def forward(self, input_ids: Tensor) -> Tensor:
        values = [self.embedding(input_ids)]
        for layer in self.layers:
            values += layer(self.weights, values, input_ids)
        return F.linear(torch.cat(values[-3:], -1), self.weights[self.head])


Made = tuple[Layer, list[int]] | None


def _linear(m: RandomModel, i: int, width: int) -> Made:
    out, bias = m.random.choice(WIDTHS), m.random.random() < 0.4
    known = [j for j, w in enumerate(m.weights) if w.dim() == 2 and w.shape[1] == width]
    if known and m.random.random() < 0.2:  # a weight that is used twice
        a, bias = m.random.choice(known), False
        out = m.weights[a].shape[0]
    else:
        a = m.weight(out, width)
    b = m.weight(out) if bias else None
    return lambda w, v, ids: [F.linear(v[i], w[a], None if b is None else w[b])], [out]


def _product(m: RandomModel, i: int, width: int) -> Made:
    out = m.random.choice(WIDTHS)
    a = m.weight(width, out)
    return lambda w, v, ids: [v[i] @ w[a]], [out]


def _unary(m: RandomModel, i: int, width: int) -> Made:
    f = m.random.choice(
        (
            F.gelu,
            torch.sigmoid,
            lambda x: torch.exp(x.clamp(max=2)),
            lambda x: x * 0.5 + 1,
            lambda x: x.flip(-1),
            lambda x: x.roll(1, -1),
            lambda x: x - x.amax(-1, keepdim=True),
            lambda x: x.cumsum(-1),
            lambda x: torch.where(x > 0, x, x * 0.1),
            lambda x: x.softmax(-1),
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2),
        )
    )
    return lambda w, v, ids: [f(v[i])], [width]


def _norm(m: RandomModel, i: int, width: int) -> Made:
    a = m.weight(width)
    if m.random.random() < 0.5:
        return lambda w, v, ids: [F.layer_norm(v[i], (width,), w[a], None, 1e-2)], [width]
    return lambda w, v, ids: [F.rms_norm(v[i], (width,), w[a], 1e-2)], [width]


def _binary(m: RandomModel, i: int, width: int) -> Made:
    j = m.random.choice([j for j, other in enumerate(m.widths) if other == width])
    f = m.random.choice((torch.add, torch.mul))
    return lambda w, v, ids: [f(v[i], v[j])], [width]


def _join(m: RandomModel, i: int, width: int) -> Made:
    j = m.random.randrange(len(m.widths))
    return lambda w, v, ids: [torch.cat([v[i], v[j]], -1)], [width + m.widths[j]]


def _split(m: RandomModel, i: int, width: int) -> Made:
    if width < 2:
        return None
    at = m.random.randint(1, width - 1)
    return lambda w, v, ids: list(v[i].split([at, width - at], -1)), [at, width - at]


def _slice(m: RandomModel, i: int, width: int) -> Made:
    start = m.random.randrange(width)
    end = m.random.randint(start + 1, width)
    return lambda w, v, ids: [v[i][..., start:end]], [end - start]


def _gate(m: RandomModel, i: int, width: int) -> Made:
    if width % 2:
        return None

    def gated(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        a, b = v[i].view(*v[i].shape[:2], 2, width // 2).unbind(2)
        return [F.silu(a) * b]

    def chunked(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        a, b = v[i].chunk(2, -1)
        return [a * b.tanh()]

    return m.random.choice((gated, chunked)), [width // 2]


def _heads(m: RandomModel, i: int, width: int) -> Made:
    """A weight per head or per element of a head."""
    counts = [n for n in (2, 3, 4) if width % n == 0]
    if not counts:
        return None
    heads = m.random.choice(counts)
    a = m.weight(width // heads)

    def scaled(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        return [(v[i].view(*v[i].shape[:2], heads, -1) * w[a]).reshape(v[i].shape)]

    def swapped(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        x = v[i].view(*v[i].shape[:2], heads, -1).transpose(2, 3).contiguous().transpose(2, 3)
        return [(x + w[a]).reshape(v[i].shape)]

    return m.random.choice((scaled, swapped)), [width]


def _experts(m: RandomModel, i: int, width: int) -> Made:
    """A product of its own for each group of columns."""
    counts = [n for n in (2, 3, 4) if width % n == 0]
    if not counts:
        return None
    count, out = m.random.choice(counts), m.random.choice((2, 3, 4))
    a = m.weight(count, width // count, out)

    def apply(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        B, T = ids.shape
        x = v[i].reshape(B * T, count, width // count).transpose(0, 1)
        return [torch.bmm(x, w[a]).transpose(0, 1).reshape(B, T, count * out)]

    return apply, [count * out]


def _attention(m: RandomModel, i: int, width: int) -> Made:
    heads = m.random.choice([h for h in (1, 2, 3, 4, 6) if width % h == 0])
    kv = m.random.choice([g for g in range(1, heads + 1) if heads % g == 0])
    E, sliced = width // heads, m.random.random() < 0.5
    q_size, kv_size = heads * E, kv * E
    a = m.weight(q_size + 2 * kv_size, width)

    def attend(w: nn.ParameterList, v: list[Tensor], ids: Tensor) -> list[Tensor]:
        x = F.linear(v[i], w[a])
        parts = x.split([q_size, kv_size, kv_size], -1)
        if sliced:
            parts = (x[..., :q_size], x[..., q_size : q_size + kv_size], x[..., -kv_size:])
        q, k, value = (p.reshape(*ids.shape, -1, E).transpose(1, 2) for p in parts)
        out = F.scaled_dot_product_attention(q, k, value, is_causal=True, enable_gqa=True)
        return [out.transpose(1, 2).reshape(v[i].shape)]

    return attend, [width]


def _lookup(m: RandomModel, i: int, width: int) -> Made:
    a = m.weight(VOCAB, width)
    return lambda w, v, ids: [v[i] + w[a][ids]], [width]


def _reshaped(m: RandomModel, i: int, width: int) -> Made:
    left, right, count = m.random.randint(0, 2), m.random.randint(0, 2), m.random.choice((2, 3))
    f, out = m.random.choice(
        (
            (lambda x: F.pad(x, (left, right)), width + left + right),
            (lambda x: x.sum(-1, keepdim=True), 1),
            (lambda x: x.repeat(1, 1, 2), 2 * width),
            (lambda x: x[:, :, None].expand(-1, -1, count, -1).reshape(*x.shape[:2], -1), count * width),
            (lambda x: torch.stack([x, x * 2], -1).reshape(*x.shape[:2], -1), 2 * width),
            (lambda x: x.topk(min(2, width), -1).values, min(2, width)),
        )
    )
    return lambda w, v, ids: [f(v[i])], [out]


MAKERS: dict[str, Callable[[RandomModel, int, int], Made]] = {
    "linear": _linear,
    "linear again": _linear,
    "product": _product,
    "unary": _unary,
    "norm": _norm,
    "binary": _binary,
    "join": _join,
    "split": _split,
    "slice": _slice,
    "gate": _gate,
    "heads": _heads,
    "experts": _experts,
    "attention": _attention,
    "lookup": _lookup,
    "reshaped": _reshaped,
}
