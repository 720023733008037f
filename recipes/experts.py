"""torchtitan's mixtures of experts as fxpar captures them: products by expert in the place of a sort of tokens.

The routed experts' rows stay in the order of tokens, and no dispatcher moves them: a strategy says where experts are.
Router, shared experts and parameters are torchtitan's own, under their own names; experts compute in bfloat16, as
there. Tokens per expert are not counted, so a recipe that moves a bias by them is refused (`fxpar.recipes.checks`).

Activated by its path in `override.imports`, as attention is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fxpar.recipes.torchtitan_api import GroupedExperts, MoE, derive, override
from fxpar.tracer.experts import expert_mm, weighted_sum


class FxparMoE(MoE):
    """x [B, S, D] -> [B, S, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: Tensor) -> Tensor:
        weights, ids, _ = self.router(x_BLD, self.expert_bias_E)
        tokens, K = x_BLD.flatten(0, 1), ids.shape[-1]
        rows = gated(self.routed_experts.inner_experts, tokens, ids.reshape(-1, K))
        out = weighted_sum(rows, weights.reshape(-1, K)).view_as(x_BLD)
        return out if self.shared_experts is None else out + self.shared_experts(x_BLD)


def gated(experts: GroupedExperts, tokens: Tensor, ids: Tensor) -> Tensor:
    """tokens [N, D] through their experts, ids [N, K] -> rows [N, K, D] in the dtype of the tokens."""
    rows = tokens.bfloat16().unsqueeze(1).expand(-1, ids.shape[1], -1)
    gate, up, down = (weight.bfloat16().transpose(1, 2) for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF))
    made = F.silu(expert_mm(rows, gate, ids)) * expert_mm(rows, up, ids)
    return expert_mm(made, down, ids).to(tokens.dtype)


@override(target=MoE.Config, exact=True, description="fxpar::expert_mm, rows in the order of tokens")
def moe(config: MoE.Config) -> FxparMoE.Config:
    """A mixture of torchtitan's own experts."""
    return derive(config, FxparMoE.Config)


FOR_FXPAR = (f"{__name__}.{moe.__name__}",)
