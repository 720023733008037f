"""fxpar::attention and its dense stand-in say what torchtitan's masks say: causal, within a document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_document_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_sliding_window_mask_mod,
)
from torchtitan.protocols.sharding import ShardingConfig

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes import attention
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.attention import FOR_FXPAR, FOR_STOCK_ON_CPU, DenseAttention, FxparAttention
from fxpar.tracer.documents import document_ids_from_positions, packed
from tests.repeat import examples


def positions_of(rows: list[list[int]]) -> Tensor:
    """[B, S] from the lengths of each row's documents."""
    return torch.tensor([[i for length in row for i in range(length)] for row in rows])


def operands(rows: int, length: int, heads: int, kv_heads: int, width: int = 8) -> tuple[Tensor, ...]:
    shapes = ((rows, length, n, width) for n in (heads, kv_heads, kv_heads))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def visible(positions: Tensor, window: int = 0) -> Tensor:
    """Which keys each query sees [B, S, S], as torchtitan's mask functions say it."""
    rows, length = positions.shape
    mask_mod = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    b, q, k = torch.meshgrid(torch.arange(rows), torch.arange(length), torch.arange(length), indexing="ij")
    seen = mask_mod(b, torch.tensor(0), q, k)
    return seen & (q - k < window) if window else seen


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), v)


def assert_same_with_gradients(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, weight, retain_graph=True),
        torch.autograd.grad(expected, inputs, weight, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


ROWS = [[[12]], [[1] * 12], [[5, 7], [3, 9]], [[1, 2, 9], [12], [6, 5, 1]]]
HEADS = [(4, 4), (4, 2), (4, 1)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_fxpar_attention_is_causal_within_documents(rows, heads, kv_heads, scale):
    positions = positions_of(rows)
    q, k, v = operands(*positions.shape, heads, kv_heads)
    module = FxparAttention.Config().build()
    found = module(
        q, k, v, attention_masks=document_ids_from_positions(positions), scale=scale, enable_gqa=heads > kv_heads
    )
    expected = reference(q, k, v, visible(positions), 8**-0.5 if scale is None else scale)
    assert_same_with_gradients(found, expected, (q, k, v))


@pytest.mark.parametrize("rows", [[[12]], [[5, 7], [3, 9]]])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_fxpar_attention_with_a_window(rows, window):
    positions = positions_of(rows)
    q, k, v = operands(*positions.shape, 4, 2)
    module = FxparAttention.Config(window=window).build()
    found = module(q, k, v, attention_masks=document_ids_from_positions(positions))
    assert_same_with_gradients(found, reference(q, k, v, visible(positions, window), 8**-0.5), (q, k, v))


def test_fxpar_attention_without_documents_is_causal():
    q, k, v = operands(2, 6, 4, 2)
    found = FxparAttention.Config().build()(q, k, v, attention_masks=None)
    one_document = torch.arange(6).expand(2, 6)
    assert_same_with_gradients(found, reference(q, k, v, visible(one_document), 8**-0.5), (q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_fxpar_attention_takes_the_documents_of_packed(heads, kv_heads, scale):
    positions = positions_of([[5, 7], [3, 9]])
    q, k, v = operands(*positions.shape, heads, kv_heads)
    with packed(document_ids_from_positions(positions)):
        found = FxparAttention.Config().build()(q, k, v, scale=scale, enable_gqa=heads > kv_heads)
    expected = reference(q, k, v, visible(positions), 8**-0.5 if scale is None else scale)
    assert_same_with_gradients(found, expected, (q, k, v))


def test_windows_and_sinks_of_gpt_oss():
    """Of the documents of `packed`, as torchtitan's own attention with the mask of its layer."""
    positions = positions_of([[5, 7], [3, 9]])
    given = titan.stock_recipe("gpt_oss", "gpt_oss_debugmodel_flex").model_spec.model.layers[0].attention
    ours = attention.gpt_oss(replace(given, sliding_window_size=3)).inner_attention.build()
    assert ours.window == 3
    owner = titan.GptOssAttention.__new__(titan.GptOssAttention)
    nn.Module.__init__(owner)
    owner.sinks = nn.Parameter(torch.randn(4, dtype=torch.float64))
    inputs = (*operands(*positions.shape, 4, 2), owner.sinks)
    with packed(document_ids_from_positions(positions)):
        found = ours(*inputs[:3], scale=0.3, out_transform=owner._apply_sinks)
    mods = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions), get_sliding_window_mask_mod(3))
    mask = create_block_mask(mods, *positions.shape[:1], None, *positions.shape[1:] * 2, device="cpu")
    dense = DenseAttention.Config().build()
    expected = dense(*inputs[:3], attention_masks=mask, scale=0.3, out_transform=owner._apply_sinks)
    assert_same_with_gradients(found, expected, inputs)


def block_mask(positions: Tensor, mask_mod: Any) -> Any:
    rows, length = positions.shape
    mods = and_masks(get_causal_mask_mod(), mask_mod(positions))
    return create_block_mask(mods, rows, None, length, length, device="cpu")


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mask_mod", [get_document_mask_mod, get_efficient_causal_mask_mod_for_packed_document])
def test_dense_attention_reads_torchtitans_mask(rows, heads, kv_heads, mask_mod):
    positions = positions_of(rows)
    q, k, v = operands(*positions.shape, heads, kv_heads)
    module = DenseAttention.Config().build()
    mask = block_mask(positions, mask_mod)
    found = module(q, k, v, attention_masks=mask, enable_gqa=heads > kv_heads)
    assert_same_with_gradients(found, reference(q, k, v, visible(positions), 8**-0.5), (q, k, v))
    again = module(q, k, v, attention_masks=mask, enable_gqa=heads > kv_heads)  # another layer, the same mask
    assert torch.equal(again, found)
    scaled = module(q, k, v, attention_masks=mask, scale=0.3, enable_gqa=heads > kv_heads)
    torch.testing.assert_close(scaled, reference(q, k, v, visible(positions), 0.3), rtol=1e-10, atol=1e-12)


@settings(max_examples=examples(10))
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_both_agree_on_any_packing(rows):
    width = max(map(sum, rows))
    positions = positions_of([[*row, width - sum(row)] for row in rows])
    q, k, v = operands(*positions.shape, 2, 1, width=4)
    ours = FxparAttention.Config().build()(q, k, v, attention_masks=document_ids_from_positions(positions))
    mask = block_mask(positions, get_document_mask_mod)
    dense = DenseAttention.Config().build()(q, k, v, attention_masks=mask, enable_gqa=True)
    assert_same_with_gradients(ours, dense, (q, k, v))


@pytest.mark.parametrize(
    ("unsupported", "said"),
    [
        ({"score_mod": lambda score, *_: score}, "changes scores (score_mod)"),
        ({"out_transform": lambda out, lse: out}, "changes the result by its log-sum-exp (out_transform"),
        ({"is_causal": False}, "is not causal (is_causal)"),
    ],
)
def test_more_than_a_causal_softmax_is_refused(unsupported, said):
    q, k, v = operands(1, 4, 2, 2)
    positions = torch.arange(4)[None]
    with pytest.raises(UnsupportedRecipeError) as error:
        FxparAttention.Config().build()(q, k, v, attention_masks=None, **unsupported)
    assert said in str(error.value)
    if "score_mod" in unsupported:
        mask = block_mask(positions, get_document_mask_mod)
        with pytest.raises(UnsupportedRecipeError) as error:
            DenseAttention.Config().build()(q, k, v, attention_masks=mask, **unsupported)
        assert said in str(error.value)


# ------------------------------------------------------------------------------------------------------------ overrides
def overridden(config: Any, imports: tuple[str, ...]) -> set[type]:
    """The classes of the attention configs of a recipe after torchtitan applied its overrides."""
    config.override.imports = list(imports)
    apply_overrides(config.override, config)
    return {type(layer.attention.inner_attention) for layer in config.model_spec.model.layers}


def recipe(backend: str | None = None) -> Any:
    config = titan.stock_recipe("llama3", "llama3_debugmodel")
    if backend == "varlen":
        config = titan.stock_recipe("llama3", "llama3_debugmodel_varlen_attn")
    if backend == "sdpa":
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
    return config


@pytest.mark.parametrize("backend", ["flex", "varlen", "sdpa"])
def test_torchtitan_finds_the_overrides_by_name(backend):
    assert overridden(recipe(backend), FOR_FXPAR) == {FxparAttention.Config}


def test_torchtitan_finds_the_dense_override_by_name():
    config = recipe()
    before = config.model_spec.model.layers[0].attention.inner_attention
    before.block_size, before.sharding_config = 64, ShardingConfig()
    assert overridden(config, (FOR_STOCK_ON_CPU,)) == {DenseAttention.Config}
    after = config.model_spec.model.layers[0].attention.inner_attention
    assert after.block_size == 64
    assert after.sharding_config is before.sharding_config  # tensor parallelism goes by it


@pytest.mark.parametrize(
    ("window_size", "window"),
    [((-1, 0), 0), ((0, 0), 1), ((7, 0), 8)],  # torchtitan counts the tokens before the query
)
def test_window_of_varlen_attention(window_size, window):
    assert attention.varlen(titan.VarlenAttention.Config(window_size=window_size)).window == window


def test_varlen_attention_that_is_not_causal():
    with pytest.raises(UnsupportedRecipeError, match=r"window_size: \(-1, -1\) is not causal"):
        attention.varlen(titan.VarlenAttention.Config(window_size=(-1, -1)))
