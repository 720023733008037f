"""Layers that keep the documents of a row apart, or can be made to, and layers that mix them; run by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.flow import token_flow
from fxpar.ir.graph import LogicalGraph, dim_symbol
from fxpar.losses import cross_entropy_sum, next_token_labels

own = torch.ops.fxpar
VOCAB, WIDTH, LONGEST = 11, 4, 32
LENGTHS = (7, 1, 5)

Layer = Callable[["Net", Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Harmful:
    """`op` is named in the refusal. `shows`: whether packing it all the same changes gradients (in this test)."""

    layer: Layer
    op: str
    shows: bool = True


class Net(nn.Module):
    """Layers on embedded tokens [1, T, WIDTH], residual; `loss` is added to the loss of the tokens."""

    def __init__(self, layers: Sequence[Layer], loss: Callable[[Net, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self.extra = list(layers), loss
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.table, self.head = weight(VOCAB, WIDTH), weight(VOCAB, WIDTH)
        self.a, self.b, self.c = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
        self.positions, self.kernel = weight(LONGEST, WIDTH), weight(WIDTH, 1, 3)
        self.inner = weight(1, WIDTH, LONGEST)
        self.relative = weight(2 * LONGEST)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()[None])
        self.register_buffer("numbers", torch.arange(LONGEST)[None] % 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.table)
        for layer in self.layers:
            x = x + layer(self, x, input_ids).tanh()
        return F.linear(x, self.head)


def loss_of(model: Net, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    loss = cross_entropy_sum(logits, batch["labels"])
    return loss if model.extra is None else loss + model.extra(model, logits, batch["labels"])


def documents() -> list[dict[str, Tensor]]:
    """Batches of one document each; every token is above 0, which is what padding has."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, VOCAB, (1, n), generator=generator) for n in LENGTHS]
    return [{"input_ids": x, "labels": next_token_labels(x)} for x in ids]


def alone(model: Net) -> list[Tensor]:
    """Loss and gradients summed over the documents, each run by itself, by plain torch."""
    params = list(model.parameters())
    loss = sum(loss_of(model, document) for document in documents())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True))]


def sites(logical: LogicalGraph) -> list[str]:
    """What the graph's packing rewrites."""
    return sorted(set(token_flow(logical, dim_symbol("T"), "documents").sites.values()))


def _recurrence(net: Net, x: Tensor, delta: bool) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in _heads(net, x))
    decay = -F.softplus((x @ net.b).unflatten(-1, (2, WIDTH // 2)))
    decay = decay[..., :1] if delta else decay
    return own.recurrence(q, F.normalize(k, dim=-1), v, decay, v[..., 0].sigmoid(), None, delta).flatten(2)


def _heads(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple((x @ w).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for w in (net.a, net.b, net.c))  # type: ignore


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def causal(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return _merged(F.scaled_dot_product_attention(*_heads(net, x), is_causal=True))


def bidirectional(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return _merged(F.scaled_dot_product_attention(*_heads(net, x)))


def tril(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return _merged(F.scaled_dot_product_attention(*_heads(net, x), attn_mask=mask))


def mask_of_a_buffer(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~net.mask[:, : x.shape[1], : x.shape[1]], -1e9)
    return _merged(scores.softmax(-1) @ v)


def added_triangle(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    hidden = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return _merged((q @ k.transpose(-1, -2) + hidden).softmax(-1) @ v)


def alibi(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    at = torch.arange(x.shape[1])
    scores = q @ k.transpose(-1, -2) - 0.1 * (at[:, None] - at[None, :]).abs()
    return _merged(scores.softmax(-1) @ v)


def _entropy(net: Net, x: Tensor, floor: float) -> Tensor:
    """Values times the entropy of a token's attention."""
    q, k, v = _heads(net, x)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return _merged(v * (weights * (weights + floor if floor else weights).log()).sum(-1, keepdim=True))


def floored_entropy(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return _entropy(net, x, 1e-9)


def relative_bias(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    at = torch.arange(x.shape[1])
    bias = F.embedding(at[:, None] - at[None, :] + LONGEST, net.relative[:, None])[..., 0]
    return _merged((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)


def table_of_positions(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x + net.positions[: x.shape[1]]


def shifted_table(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x + net.positions[2 : 2 + x.shape[1]]


def looked_up_positions(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.embedding(torch.arange(3, 3 + x.shape[1]), net.positions)


def counted_positions(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    """As roberta: padding tokens are not counted."""
    known = ids.ne(2).int()
    return x + F.embedding(known.cumsum(1) * known + 1, net.positions)


def counted_ones(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.ones(1, x.shape[1], dtype=x.dtype).cumsum(-1)[..., None]


def buffer_by_position(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x * net.numbers[:, : x.shape[1], None]


def mask_by_columns_first(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    mask = net.mask.double()[None][..., : x.shape[1]][:, :, : x.shape[1]]
    return _merged((q @ k.transpose(-1, -2)).masked_fill(mask == 0, float("-inf")).softmax(-1) @ v)


def gathered(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.gather(net.numbers, 1, torch.arange(x.shape[1])[None])[..., None]


def rotary(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def per_token(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    y = F.layer_norm(x, (WIDTH,)) @ net.a
    y = y.sort(-1).values + y.cumsum(-1) + y.amax(-1, keepdim=True) + y.logsumexp(-1, keepdim=True)
    return torch.where(ids[..., None] > 4, y, y.flip(-1)) * y.softmax(-1)


HARMLESS: dict[str, Layer] = {
    f.__name__: f
    for f in (
        causal,
        bidirectional,
        tril,
        mask_of_a_buffer,
        mask_by_columns_first,
        added_triangle,
        alibi,
        relative_bias,
        floored_entropy,
        table_of_positions,
        shifted_table,
        looked_up_positions,
        counted_positions,
        counted_ones,
        buffer_by_position,
        gathered,
        rotary,
        per_token,
    )
}
HARMLESS |= {
    "recurrence": lambda n, x, i: _recurrence(n, x, delta=True),
    "recurrence with a decay per row": lambda n, x, i: _recurrence(n, x, delta=False),
    "causal convolution": lambda n, x, i: own.causal_conv(x.mT, n.kernel[:, 0], None, None).mT,
    "as many tokens from the end": lambda n, x, i: x[:, -x.shape[1] :] @ n.a,
}


def _linear_attention(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    return _merged(q.sigmoid() @ (k.sigmoid().transpose(-1, -2) @ v))


def _quadratic_linear_attention(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    return _merged((q @ k.transpose(-1, -2)).sigmoid().tril() @ v)


def _from_the_end(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.arange(1 - x.shape[1], 1)[:, None]


def _of_a_column(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x + net.inner[0, :, : x.shape[1]].t()


def _half_triangle(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    """Token i sees the first half of what is before it."""
    T = x.shape[1]
    mask = torch.ones(T, 2 * T, dtype=torch.bool).tril().view(T, T, 2)[..., 0]
    return _merged(F.scaled_dot_product_attention(*_heads(net, x), attn_mask=mask))


def _first_by_lookup(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    return x * F.embedding(torch.zeros(1, dtype=torch.long), x[0])


def _rows_of_products(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    """[LONGEST, T] products, of which the first T rows are taken."""
    scores = (net.positions @ x[0].t())[: x.shape[1]]
    return scores.tril().softmax(-1)[None] @ x


def _own_attention_mask(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    return _merged((q @ k.transpose(-1, -2)).relu() @ v)


def _copies_in_one_dim(net: Net, x: Tensor, ids: Tensor) -> Tensor:
    """Each token T times, in a dim of T * T: T times a number that is T as well."""
    T = x.shape[1]
    return x[0][:, None].expand(T, T, WIDTH).reshape(T * T, WIDTH).view(T, T, WIDTH).sum(1)[None]


HARMFUL: dict[str, Harmful] = {
    "copies in one dim": Harmful(_copies_in_one_dim, "view"),
    "rows of products": Harmful(_rows_of_products, "slice", shows=False),
    "half a triangle": Harmful(_half_triangle, "tril"),
    "first token by a lookup": Harmful(_first_by_lookup, "embedding"),
    "linear attention": Harmful(_linear_attention, "bmm"),
    "linear attention by pairs": Harmful(_quadratic_linear_attention, "bmm"),
    "entropy": Harmful(lambda n, x, i: _entropy(n, x, 0.0), "sum"),  # 0 * log(0) between documents
    "attention without a softmax": Harmful(_own_attention_mask, "bmm"),
    "ones @ x": Harmful(lambda n, x, i: torch.ones(1, x.shape[1], dtype=x.dtype) @ x[0] * n.a[0], "mm"),
    "max": Harmful(lambda n, x, i: x * x.max(), "max"),
    "amax over tokens": Harmful(lambda n, x, i: x * x.amax(1, keepdim=True), "amax"),
    "vector norm": Harmful(lambda n, x, i: x / x.norm(), "norm"),
    "prod": Harmful(lambda n, x, i: x * x.prod(1, keepdim=True), "prod"),
    "topk": Harmful(lambda n, x, i: x * x.topk(1, 1).values, "topk"),
    "sort of tokens": Harmful(lambda n, x, i: x.sort(1).values, "sort"),
    "a crop that is longer than any document": Harmful(lambda n, x, i: x[:, -9000:], "slice", shows=False),
    "last token": Harmful(lambda n, x, i: x * x[:, -1:], "slice"),
    "first token": Harmful(lambda n, x, i: x * x[:, 0][:, None], "select"),
    "token before": Harmful(lambda n, x, i: F.pad(x, (0, 0, 1, 0))[:, :-1] * x, "constant_pad_nd"),
    "roll": Harmful(lambda n, x, i: x * x.roll(1, 1), "roll"),
    "flip": Harmful(lambda n, x, i: x * x.flip(1), "flip"),
    "scaled by T": Harmful(lambda n, x, i: x / x.shape[1], "div"),
    "scaled by log T": Harmful(lambda n, x, i: x * torch.full((), x.shape[1], dtype=x.dtype).log(), "full"),
    "mean": Harmful(lambda n, x, i: x * x.mean(1, keepdim=True), "mean"),
    "mean of all": Harmful(lambda n, x, i: x * x.sum() / x.numel(), "sum"),
    "sum": Harmful(lambda n, x, i: x * x.sum(1, keepdim=True), "sum"),
    "softmax over tokens": Harmful(lambda n, x, i: x.softmax(1), "_softmax"),
    "log softmax over tokens": Harmful(lambda n, x, i: x.log_softmax(1), "_log_softmax"),
    "running sum": Harmful(lambda n, x, i: x.cumsum(1), "cumsum"),
    "convolution": Harmful(
        lambda n, x, i: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), n.kernel, groups=WIDTH).transpose(1, 2), "pad"
    ),
    "batch norm": Harmful(
        lambda n, x, i: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT, "batch_norm", shows=False
    ),  # alone it refuses a document of one token
    "counted from the end": Harmful(_from_the_end, "arange"),
    "table along its columns": Harmful(_of_a_column, "slice"),
    "tokens as indices": Harmful(lambda n, x, i: x * x[0, i[0] % 2][None], "index"),
    "attention over halves of tokens": Harmful(
        lambda n, x, i: F.scaled_dot_product_attention(*(x.view(1, 1, -1, 2),) * 3, is_causal=True).view(x.shape),
        "attention",
        shows=False,  # the documents do not fit in
    ),
    "variance": Harmful(lambda n, x, i: x * x.var(1, keepdim=True).nan_to_num(), "var"),
}
