"""Every call of torch's attention is captured as fxpar's op (or plain math) and gives the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from fxpar.tracer.documents import document_ids_from_cu_seqlens, document_ids_from_positions, packed
from tests.tracer.helpers import check, ops


class Projected(nn.Module):
    """q, k, v by one linear layer from x [B, S, 24], then `attend`."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 48)
        self.attend = attend

    def forward(self, x):
        q, k, v = self.linear(x).chunk(3, -1)
        return self.attend(self, *(t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v)))


def loss(model, batch):
    return model(batch["x"]).pow(2).sum()


def sdpa(**options):
    return lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def bool_mask(m, q, k, v):
    S = q.shape[2]
    mask = (torch.arange(S)[:, None] - torch.arange(S)).abs() < 3
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def float_mask(m, q, k, v):
    S = q.shape[2]
    mask = -(torch.arange(S)[:, None] - torch.arange(S)).abs().to(q.dtype).expand(4, S, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def row_mask(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(torch.arange(q.shape[2]) != 1)[None, None, None])


def learned_mask(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.linear.bias[0] * q[:, :, :, :1])


def grouped(m, q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)


def three_dims(m, q, k, v):
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], is_causal=True)


def five_dims(m, q, k, v):
    q, k, v = (t.unflatten(1, (2, 2)) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def broadcast(m, q, k, v):
    return F.scaled_dot_product_attention(q, k[:1, :1], v[:1, :1])


def cross(m, q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3, :2])


def uneven_causal(m, q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3], is_causal=True)


CASES = {
    "plain": (sdpa(), True),
    "causal": (sdpa(is_causal=True), True),
    "scale": (sdpa(scale=0.2), True),
    "bool mask": (bool_mask, True),
    "float mask": (float_mask, True),
    "row mask": (row_mask, True),
    "learned mask": (learned_mask, False),
    "grouped": (grouped, True),
    "three dims": (three_dims, True),
    "five dims": (five_dims, True),
    "broadcast": (broadcast, True),
    "cross": (cross, True),
    "uneven causal": (uneven_causal, False),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    attend, as_op = CASES[name]
    batches = [{"x": torch.randn(2, S, 24, dtype=torch.float64)} for S in (6, 11)]
    graph = check(Projected(attend).double(), loss, batches, dynamic={"x": {1: "T"}})
    found = ops(graph)
    assert ("fxpar.attention" in found) == as_op
    assert not any("scaled_dot_product" in name for name in found)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_module(need_weights):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(24, 4, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=need_weights)[0]

    batches = [{"x": torch.randn(2, S, 24, dtype=torch.float64)} for S in (6, 11)]
    graph = check(Wrapped().double(), loss, batches, dynamic={"x": {1: "T"}})
    assert ("fxpar.attention" in ops(graph)) != need_weights


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
BOUNDS = torch.tensor([0, 3, 5, 6, 10], dtype=torch.int32)


def test_document_ids():
    ids = document_ids_from_positions(POSITIONS)
    assert ids.tolist() == [[1, 1, 1, 2, 2, 3, 4, 4, 4, 4], [1] * 10]
    assert document_ids_from_positions(POSITIONS[0]).tolist() == ids[:1].tolist()
    assert document_ids_from_cu_seqlens(BOUNDS, 10).tolist() == ids[:1].tolist()
    assert document_ids_from_cu_seqlens(BOUNDS[:-1], 10)[0].tolist() == [1, 1, 1, 2, 2, 3, 4, 4, 4, 4]


def packed_loss(model, batch):
    if "cu_seqlens" in batch:
        ids = document_ids_from_cu_seqlens(batch["cu_seqlens"], batch["x"].shape[1])
    else:
        ids = document_ids_from_positions(batch["position_ids"])
    with packed(ids):
        return loss(model, batch)


def alone(model, batch):
    """Each document of the packed row by itself."""
    bounds = batch["cu_seqlens"].tolist() if "cu_seqlens" in batch else [0, 3, 5, 6, 10]
    return sum(loss(model, {"x": batch["x"][:, a:b]}) for a, b in itertools.pairwise(bounds))


def in_windows(size):
    """Each document of packed tokens by itself, with `size` as varlen_attn counts it."""
    left, right = size

    def attend(q, k, v):
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = torch.ones_like(back, dtype=torch.bool)
        if left >= 0:
            seen &= back <= left
        if right >= 0:
            seen &= back >= -right
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    return lambda m, q, k, v: attend(q, k[:, :2], v[:, :2])


@pytest.mark.parametrize("size", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_varlen(size):
    def varlen(m, q, k, v):
        q, k, v = (t[0].transpose(0, 1) for t in (q, k[:, :2], v[:, :2]))
        bounds = m.bounds
        out = varlen_attn(q, k, v, bounds, bounds, q.shape[0], q.shape[0], window_size=size, enable_gqa=True)
        return out.transpose(0, 1)[None]

    def with_bounds(model, batch):
        model.bounds = batch["cu_seqlens"]
        return loss(model, batch)

    def by_hand(model, batch):
        function, model.attend = model.attend, in_windows(size)
        value = alone(model, batch)
        model.attend = function
        return value

    model = Projected(varlen).double()
    model.bounds = BOUNDS
    x = torch.randn(1, 10, 24, dtype=torch.float64)
    dynamic = {"x": {1: "T"}, "cu_seqlens": {0: "C"}}
    graph = check(model, with_bounds, [{"x": x, "cu_seqlens": BOUNDS}], expected=by_hand, dynamic=dynamic)
    assert model.bounds is BOUNDS
    assert "fxpar.attention" in ops(graph)


def test_packed_documents_equal_documents_alone():
    model = Projected(sdpa(is_causal=True)).double()
    x = torch.randn(1, 10, 24, dtype=torch.float64)
    graph = check(model, packed_loss, [{"x": x, "position_ids": POSITIONS[:1]}], expected=alone)
    (node,) = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.attention.default)
    assert node.args[3] is not None
    assert node.args[4] is None
    short = {"x": torch.randn(1, 7, 24, dtype=torch.float64), "cu_seqlens": torch.tensor([0, 6, 7], dtype=torch.int32)}
    batches = [{"x": x, "cu_seqlens": BOUNDS}, short]
    options = {"dynamic": {"x": {1: "T"}, "cu_seqlens": {0: "C"}}}
    check(model, packed_loss, batches, expected=alone, **options)
    check(model, packed_loss, batches, **options)  # the block acts on eager runs too
