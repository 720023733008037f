"""Attention of torchtitan's models as fxpar captures it, and one that stock torchtitan can train on CPU.

Each is activated by its path in `override.imports`, torchtitan's own mechanism; `to_fxpar` lists them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes.torchtitan_api import (
    FlexAttention,
    GptOssAttention,
    Module,
    ScaledDotProductAttention,
    VarlenAttention,
    derive,
    override,
    sinks_of,
)
from fxpar.tracer.attention import AttentionRule, attend
from fxpar.tracer.documents import surrounding_documents


class FxparAttention(Module):
    """`fxpar::attention`, causal, over packed documents.

    Takes q and k [B, S, H or Hkv, E], v [B, S, Hkv, Ev]; returns [B, S, H, Ev]. Documents are those of the surrounding
    `fxpar.tracer.documents.packed`, as the loss function names them; or `attention_masks` are their ids [B or 1, S].
    An `out_transform` is the one of gpt_oss alone, whose sinks are a score per head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int = 0
        """Tokens that a query sees, itself included; 0 for all before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window = config.window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        score_mod: Any = None,
        out_transform: Any = None,
        is_causal: bool = True,
        **_: Any,
    ) -> Tensor:
        sinks = None if out_transform is None else sinks_of(out_transform)
        _check_plain(score_mod, out_transform if sinks is None else None, is_causal)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        documents = surrounding_documents() if attention_masks is None else attention_masks
        scores = None if sinks is None else sinks.view(1, -1, 1)
        rule = AttentionRule(True, self.window, scale=scale, document_ids=documents, sinks=scores)
        return attend(q, k, v, rule).transpose(1, 2)


class DenseAttention(FlexAttention):
    """FlexAttention through `scaled_dot_product_attention` with its mask written out: it has a backward on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,  # torchtitan's sharding of attention goes by these names
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        score_mod: Any = None,
        out_transform: Any = None,
        **_: Any,
    ) -> Tensor:
        _check_plain(score_mod, None)
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = _written_out(attention_masks, q.shape[0], q.shape[-2], k.shape[-2])
        if out_transform is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(1, 2)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~mask, -math.inf)
        out = scores.softmax(-1) @ v
        return out_transform(out.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))


def _check_plain(score_mod: Any, out_transform: Any, is_causal: bool = True) -> None:
    """Raises UnsupportedRecipeError for attention that is more than a causal softmax over documents."""
    whys = {
        "changes scores (score_mod)": score_mod is not None,
        "changes the result by its log-sum-exp (out_transform)": out_transform is not None,
        "is not causal (is_causal)": not is_causal,
    }
    for why, found in whys.items():
        if found:
            raise UnsupportedRecipeError("model_spec", f"its attention {why}", "Use another model")


def _written_out(block_mask: Any, batch: int, queries: int, keys: int) -> Tensor:
    """The dense mask [B, 1, Sq, Skv] of a BlockMask; kept on it, since all layers use the same."""
    known = getattr(block_mask, "fxpar_dense", None)
    if known is None:
        known = create_mask(block_mask.mask_mod, batch, 1, queries, keys, device=block_mask.kv_num_blocks.device)
        block_mask.fxpar_dense = known
    return known


@override(target=FlexAttention.Config, exact=True, description="fxpar::attention over packed documents")
def flex(config: FlexAttention.Config) -> FxparAttention.Config:
    """FlexAttention with torchtitan's causal mask of packed documents."""
    return FxparAttention.Config()


@override(target=VarlenAttention.Config, exact=True, description="fxpar::attention over packed documents")
def varlen(config: VarlenAttention.Config) -> FxparAttention.Config:
    """Varlen attention, causal, with its window."""
    left, right = config.window_size
    if right != 0:
        raise UnsupportedRecipeError(
            "model_spec: VarlenAttention.Config.window_size", f"{config.window_size} is not causal", "Use (-1, 0)"
        )
    return FxparAttention.Config(window=left + 1 if left >= 0 else 0)


@override(target=ScaledDotProductAttention.Config, exact=True, description="fxpar::attention over packed documents")
def sdpa(config: ScaledDotProductAttention.Config) -> FxparAttention.Config:
    """Causal scaled_dot_product_attention; documents, which it ignores, are kept apart as the other backends do."""
    return FxparAttention.Config()


@override(target=GptOssAttention.Config, exact=True, description="fxpar::attention with windows and sinks")
def gpt_oss(config: GptOssAttention.Config) -> GptOssAttention.Config:
    """gpt_oss's attention with its layer's window, which FlexAttention gets by a mask."""
    return replace(config, inner_attention=FxparAttention.Config(window=config.sliding_window_size or 0))


@override(target=FlexAttention.Config, exact=True, description="dense attention that trains on CPU")
def dense_attention(config: FlexAttention.Config) -> DenseAttention.Config:
    """For stock torchtitan on CPU."""
    return derive(config, DenseAttention.Config)  # with its sharding, which tensor parallelism needs


FOR_FXPAR = tuple(f"{__name__}.{f.__name__}" for f in (flex, varlen, sdpa))
FOR_GPT_OSS = (f"{__name__}.{gpt_oss.__name__}",)
FOR_STOCK_ON_CPU = f"{__name__}.{dense_attention.__name__}"
