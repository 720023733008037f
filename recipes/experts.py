"""torchtitan's mixtures of experts as fxpar captures them: products by expert in the place of a sort of tokens.

The routed experts' rows stay in the order of tokens, and no dispatcher moves them: a strategy says where experts are.
Router, shared experts and parameters are torchtitan's own, under their own names; experts compute in bfloat16, as
there.

Padding goes to no expert, so the counts of a step's report are those of its tokens; `count_tokens` gives them to the
hook of torchtitan's optimizer, which moves the bias of the router by them (arXiv 2408.15664).

Activated by its path in `override.imports`, as attention is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.errors import UnsupportedRecipeError
from fxpar.ir.graph import IS_TOKEN
from fxpar.recipes.torchtitan_api import (
    GptOssGroupedExperts,
    GptOssMoE,
    GroupedExperts,
    MoE,
    derive,
    gpt_oss_swiglu,
    override,
)
from fxpar.runtime.report import StepReport
from fxpar.tracer.documents import padded, surrounding_tokens
from fxpar.tracer.experts import expert_mm, weighted_sum


class FxparMoE(MoE):
    """x [B, S, D] -> [B, S, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kind = type(self.routed_experts.inner_experts)
        if kind not in _EXPERTS:  # by an override of the user's own, which torchtitan applies once ranks run
            raise UnsupportedRecipeError(
                "override.imports",
                f"experts are a {kind.__qualname__}, of which fxpar knows no products by expert",
                f"Leave out the override that makes them; {' and '.join(k.__qualname__ for k in _EXPERTS)} are known",
            )

    def forward(self, x_BLD: Tensor) -> Tensor:
        weights, ids, _ = self.router(x_BLD, self.expert_bias_E)
        tokens, K = x_BLD.flatten(0, 1), ids.shape[-1]
        ids, is_token = ids.reshape(-1, K), surrounding_tokens()
        if is_token is not None:
            ids = torch.where(is_token.reshape(-1, 1) != 0, ids, -1)
        experts = self.routed_experts.inner_experts
        rows = _EXPERTS[type(experts)](experts, tokens, ids)
        out = weighted_sum(rows, weights.reshape(-1, K)).view_as(x_BLD)
        return out if self.shared_experts is None else out + self.shared_experts(x_BLD)


def gated(experts: GroupedExperts, tokens: Tensor, ids: Tensor) -> Tensor:
    """tokens [N, D] through their experts, ids [N, K] -> rows [N, K, D] in the dtype of the tokens."""
    rows = tokens.bfloat16().unsqueeze(1).expand(-1, ids.shape[1], -1)
    gate, up, down = (weight.bfloat16().transpose(1, 2) for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF))
    made = F.silu(expert_mm(rows, gate, ids)) * expert_mm(rows, up, ids)
    return expert_mm(made, down, ids).to(tokens.dtype)


def gated_with_bias(experts: GptOssGroupedExperts, tokens: Tensor, ids: Tensor) -> Tensor:
    """The same of gpt_oss: gate and up in turns in one product, a bias behind each product."""
    rows = tokens.bfloat16().unsqueeze(1).expand(-1, ids.shape[1], -1)
    first, second = (w.bfloat16().transpose(1, 2) for w in (experts.mlp1_weight_EGD, experts.mlp2_weight_EDF))
    made = expert_mm(rows, first, ids) + F.embedding(ids, experts.mlp1_bias_EG).bfloat16()
    made = expert_mm(gpt_oss_swiglu(made, limit=experts.swiglu_limit), second, ids)
    return (made + F.embedding(ids, experts.mlp2_bias_ED).bfloat16()).to(tokens.dtype)


_EXPERTS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    GroupedExperts: gated,
    GptOssGroupedExperts: gated_with_bias,
}


def without_padding(model: nn.Module, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Inside the block, mixtures of the model send tokens [1, T] alone to experts, as `is_token` of the batch says."""
    has_experts = any(isinstance(module, FxparMoE) for module in model.modules())
    return padded(batch[IS_TOKEN] if has_experts else None)


def count_tokens(model: nn.Module, report: StepReport) -> None:
    """Add the rows of each expert in a step to the counters of the model's mixtures, which torchtitan's optimizer reads
    and sets back. Rows that a capacity leaves out count: the router chose their expert. Those of a mini-batch that is
    left out do not.
    """
    for load in () if report.skipped else report.experts:
        counter = cast(FxparMoE, model.get_submodule(load.module)).tokens_per_expert_E
        counter.add_(torch.tensor(load.wanted or load.experts, dtype=torch.float64).round().to(counter))


@override(target=MoE.Config, exact=True, description="fxpar::expert_mm, rows in the order of tokens")
def moe(config: MoE.Config) -> FxparMoE.Config:
    """A mixture of torchtitan's own experts."""
    return derive(config, FxparMoE.Config)


@override(target=GptOssMoE.Config, exact=True, description="fxpar::expert_mm, rows in the order of tokens")
def gpt_oss_moe(config: GptOssMoE.Config) -> FxparMoE.Config:
    """A mixture of gpt_oss's experts."""
    return derive(config, FxparMoE.Config)


FOR_FXPAR = tuple(f"{__name__}.{f.__name__}" for f in (moe, gpt_oss_moe))
