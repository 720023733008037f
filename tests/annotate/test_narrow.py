"""Fewer key-value heads than ranks of tp: cut over an outer sub-axis, and no collective more than with as many."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import losses
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.tracer import capture
from tests.captured import Captured, fused, llama, lowered, take, tokens
from tests.repeat import thinned

HEADS = 8


def few(kv_heads: int) -> Captured:
    return llama(heads=HEADS, kv_heads=kv_heads, dim=64)


def traffic(captured: Captured, strategy: str) -> Counter:
    """Collectives of the body, those of the data axes left out; where a sum is taken on its way is often a tie."""
    body = [c for c in lowered(captured, strategy).communications() if c.part == "body"]
    return Counter((c.kind, c.axis, c.backward) for c in body if c.axis in ("tp", "cp"))


def stored(captured: Captured, strategy: str | Strategy) -> dict[str, str]:
    """How each parameter of the first layer is stored, such as `[16@tp:(1)2, 64]`."""
    program = lowered(captured, strategy) if isinstance(strategy, str) else lower(captured.graph, strategy)
    return {
        info.fqn.removeprefix("layers.0.").removesuffix(".weight"): place.dist.describe(info.meta.shape).lstrip(
            "bf0123456789"
        )
        for info, place in program.params()
        if "layers.0." in info.fqn
    }


@pytest.mark.parametrize(
    ("strategy", "kv_heads"),
    thinned(
        itertools.product(["tp4", "tp4+sp", "tp8", "tp8+sp", "dp2.tp4"], [1, 2]),
        [("tp4", 1), ("tp8+sp", 2)],
    ),
)
def test_no_collective_more_than_with_as_many_heads_as_ranks(strategy, kv_heads):
    assert traffic(few(kv_heads), strategy) == traffic(few(HEADS), strategy)


PLACES = [
    ("tp4", 4, "[32@tp, 64]"),
    ("tp4", 2, "[16@tp:(1)2, 64]"),
    ("tp8", 2, "[16@tp:(1)2, 64]"),
    ("tp8", 4, "[32@tp:(1)4, 64]"),
    ("tp4", 1, "[8, 64]"),
    ("dp2.tp4+zero3", 2, "[16@tp:(1)2@dp, 64]"),
]


@pytest.mark.parametrize(
    ("strategy", "kv_heads", "expected"), thinned(PLACES, [place for place in PLACES if place[1] < 4])
)
def test_where_weights_lie(strategy, kv_heads, expected):
    found = stored(few(kv_heads), strategy)
    assert {found["attention.k_proj"], found["attention.v_proj"]} == {expected}
    assert found["attention.q_proj"].startswith("[64@tp")
    assert "tp:" not in found["attention.q_proj"]
    assert found["attention.o_proj"].startswith("[64")


def test_gradients_of_keys_and_values_are_settled_in_one():
    """Ranks with the same head have a term each of its projections' gradients: one fused all-reduce per step."""
    last = [c for c in lowered(few(2), "tp4").communications() if c.part != "body"]
    assert [(c.kind, c.axis, c.fused) for c in last] == [("all_reduce", "tp:(2)2", 2)]
    both = [c for c in lowered(few(2), "dp2.tp4").communications() if c.part != "body"]
    assert ("all_reduce", "dp.tp:(2)2") in {(c.kind, c.axis) for c in both}


@pytest.mark.parametrize("kv_heads", thinned([4, 8], [8]))
def test_programs_of_models_with_enough_heads_know_no_sub_axes(kv_heads):
    program = lowered(few(kv_heads), "dp2.tp4+sp+zero1")
    assert not [axis for axis in program.axes() if ":" in axis]
    assert not [axis for _, place in program.params() for axis in place.dist.shard_axes if ":" in axis]


STRATEGIES = [
    "tp4",
    "tp4+sp",
    "dp2.tp4",
    "tp8",
    "dp2.tp4+zero2",
    "dp2.tp4+sp+zero3",
    "tp4.dp2+zero1",
    "cp2.tp4",
    "tp4+remat",
    "pp2.tp4+cut(layers.0.ffn)",
]


@pytest.mark.parametrize(
    ("strategy", "kv_heads"),
    thinned(
        itertools.product(STRATEGIES, [1, 2]),
        [("tp4", 1), ("dp2.tp4+sp+zero3", 2), ("cp2.tp4", 2), ("pp2.tp4+cut(layers.0.ffn)", 2)],
    ),
)
def test_exact(strategy, kv_heads):
    result = few(kv_heads).check(strategy)
    assert result.ok, result
    assert result.grad_max_rel_err <= 1e-10


@pytest.mark.parametrize(("placement", "expected"), [("S(0)@tp", "[16@tp, 64]"), ("R@tp", "[16, 64]")])
def test_an_override_means_the_whole_axis(placement, expected):
    strategy = Strategy.parse("tp4", overrides={"*.k_proj.weight": placement})
    found = stored(few(2), strategy)
    assert found["attention.k_proj"] == expected
    assert found["attention.v_proj"] == "[16@tp:(1)2, 64]"


@pytest.mark.parametrize(("kv_heads", "strategy"), thinned(itertools.product([1, 2], ["tp4", "tp4+sp"]), [(2, "tp4")]))
def test_a_fused_projection_is_cut_over_all_ranks(kv_heads, strategy):
    """It has queries in it: they are not computed on more ranks for the sake of keys and values."""
    captured = fused("split", 8, kv_heads)
    for info, place in lowered(captured, strategy).params():
        assert not [axis for axis in place.dist.shard_axes if ":" in axis], info.fqn
    assert captured.check(strategy).ok


class Groups(nn.Module):
    """One projection, of a key-value head and its query heads after the other, as in Megatron-LM and Falcon."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads, self.E = kv_heads, 4
        self.embedding, self.head = nn.Embedding(31, 32), nn.Linear(32, 31)
        self.qkv, self.out = nn.Linear(32, (8 + 2 * kv_heads) * 4), nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, self.kv_heads, -1, self.E)
        q, k, v = qkv[..., :-2, :].reshape(B, T, 8, self.E), qkv[..., -2, :], qkv[..., -1, :]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).reshape(B, T, -1)))


@functools.cache
def groups(kv_heads: int) -> Captured:
    torch.manual_seed(0)
    return take(Groups(kv_heads), losses.causal_lm, tokens(31, 8, 5, 12))


@pytest.mark.parametrize("kv_heads", thinned([1, 2], [2]))
def test_a_projection_of_groups_of_heads_is_cut_over_all_ranks(kv_heads):
    """Along its input: its result falls into as many pieces as there are key-value heads."""
    (lies,) = [place.dist for info, place in lowered(groups(kv_heads), "tp4").params() if info.fqn == "qkv.weight"]
    assert lies.shard_axes == ("tp",)
    result = groups(kv_heads).check("tp4")
    assert result.ok, result


# ------------------------------------------------------------------------- what stands between projection and attention
class Attention(nn.Module):
    """Biases, a norm of every key head or a rotation by complex numbers."""

    def __init__(self, how: str, kv_heads: int, dim: int = 32) -> None:
        super().__init__()
        self.how, self.E = how, dim // 8
        self.q, self.k, self.v = (nn.Linear(dim, n * self.E, bias=how == "bias") for n in (8, kv_heads, kv_heads))
        self.out = nn.Linear(dim, dim)
        self.k_norm = nn.LayerNorm(self.E)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, self.E) for f in (self.q, self.k, self.v))
        if self.how == "norm":
            k = self.k_norm(k)
        if self.how == "complex":
            q, k = (
                torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(3) for y in (q, k)
            )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(B, T, -1))


class Model(nn.Module):
    def __init__(self, how: str, kv_heads: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 32), nn.Linear(32, 31)
        self.layers = nn.ModuleList([Attention(how, kv_heads)])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None, None] * torch.tensor([1.0, 0.1], dtype=self.head.weight.dtype)
        turn = torch.polar(torch.ones_like(angles), angles)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(x)


@functools.cache
def between(how: str, kv_heads: int) -> Captured:
    torch.manual_seed(0)
    return take(Model(how, kv_heads), losses.causal_lm, tokens(31, 8, 5, 12))


@pytest.mark.parametrize(
    ("how", "kv_heads"), thinned(itertools.product(["bias", "norm", "complex"], [1, 2]), [("norm", 2), ("complex", 1)])
)
def test_what_is_done_to_keys_stays_on_the_ranks_of_their_head(how, kv_heads):
    assert traffic(between(how, kv_heads), "tp4") == traffic(between("complex", 8), "tp4")
    result = between(how, kv_heads).check("tp4")
    assert result.ok, result


# ------------------------------------------------------------------------------------ nothing depends on the widths
@functools.cache
def wide(kv_heads: int) -> Captured:
    """One layer of a 70B Llama in bf16, on no device."""
    with torch.device("meta"):
        model = Llama(LlamaOptions(1, 8192, 64, kv_heads, 28672, 128256)).bfloat16()
    row = torch.zeros(1, 64, dtype=torch.int64)
    batch = {"input_ids": row, "labels": row, "position_ids": row}
    return Captured(capture(model, losses.causal_lm, batch), {}, {}, ())


@pytest.mark.parametrize(
    ("strategy", "kv_heads"),
    thinned(itertools.product(["tp8", "tp8+sp", "tp16"], [1, 2, 4]), [("tp8", 2)]),
)
def test_wide_models_lie_so_too(strategy, kv_heads):
    """Heads decide, not how bytes of weights compare with those of activations."""
    enough = few(HEADS) if strategy == "tp8" else wide(64)  # with sp, widths decide ties
    assert traffic(wide(kv_heads), strategy) == traffic(enough, strategy)
    lies = "[128, 8192]" if kv_heads == 1 else f"[{kv_heads * 128}@tp:(1){kv_heads}, 8192]"
    assert stored(wide(kv_heads), strategy)["attention.k_proj"] == lies
