"""Attention of torchtitan's models as fxpar captures it, and one that stock torchtitan can train on CPU.

Each is activated by its path in `override.imports`, torchtitan's own mechanism; `to_fxpar` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import fxpar.ops  # noqa: F401 - registers torch.ops.fxpar
from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes.torchtitan_api import (
    FlexAttention,
    Module,
    ScaledDotProductAttention,
    VarlenAttention,
    derive,
    override,
)


class FxparAttention(Module):
    """`fxpar::attention`, causal, over packed documents.

    Takes q [B, S, H, E], k and v [B, S, Hkv, E]; returns [B, S, H, E]. Documents are those of the surrounding
    `fxpar.tracer.documents.packed`, as the loss function names them; or `attention_masks` are their ids [B or 1, S].
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
        _check_plain(score_mod, out_transform, is_causal)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if attention_masks is None:
            if self.window:  # documents of `packed` do not reach the operator
                raise UnsupportedRecipeError("model_spec", "its attention has a window", "Use full causal attention")
            # A capture, which knows the documents, makes fxpar::attention of this.
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            out, _ = torch.ops.fxpar.attention(q, k, v, attention_masks, None, True, self.window, scale, 0.0)
        return out.transpose(1, 2)


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
        _check_plain(score_mod, out_transform)
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = _written_out(attention_masks, q.shape[0], q.shape[-2], k.shape[-2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


def _check_plain(score_mod: Any, out_transform: Any, is_causal: bool = True) -> None:
    """Raises UnsupportedRecipeError for attention that is more than a causal softmax over documents."""
    whys = {
        "changes scores (score_mod)": score_mod is not None,
        "changes the result by its log-sum-exp (out_transform, as attention sinks do)": out_transform is not None,
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


@override(target=FlexAttention.Config, exact=True, description="dense attention that trains on CPU")
def dense_attention(config: FlexAttention.Config) -> DenseAttention.Config:
    """For stock torchtitan on CPU."""
    return derive(config, DenseAttention.Config)  # with its sharding, which tensor parallelism needs


FOR_FXPAR = tuple(f"{__name__}.{f.__name__}" for f in (flex, varlen, sdpa))
FOR_STOCK_ON_CPU = f"{__name__}.{dense_attention.__name__}"
