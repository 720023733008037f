"""torchtitan's mixture of experts, captured: its numbers, and those of one device under strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.feed_forward import FeedForward

from fxpar import losses
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.experts import FOR_FXPAR, FxparMoE, moe
from tests.captured import take, tokens

D, F, E, K = 16, 24, 4, 2
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router asks for float32


def config(**routing: Any) -> titan.MoE.Config:
    """Sigmoid scores, top-2 of 4 experts and one that all tokens share, unless `routing` says otherwise."""
    normal = partial(nn.init.normal_, std=0.3)
    linear = partial(titan.Linear.Config, bias=False, param_init={"weight": normal})
    return make_moe_config(
        num_experts=E,
        router=make_router_config(dim=D, num_experts=E, gate_param_init={"weight": normal}, top_k=K, **routing),
        routed_experts=make_routed_experts_config(
            dim=D,
            hidden_dim=F,
            num_experts=E,
            top_k=K,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal),
            comm_backend="standard",
        ),
        shared_experts=FeedForward.Config(
            w1=linear(in_features=D, out_features=F),
            w2=linear(in_features=F, out_features=D),
            w3=linear(in_features=D, out_features=F),
        ),
        load_balance_coeff=None,
    )


def built(given: titan.MoE.Config) -> titan.MoE:
    torch.manual_seed(0)
    module = given.build()
    for param in module.parameters():
        nn.init.normal_(param, std=0.3)
    return module


class Routed(nn.Module):
    def __init__(self, given: titan.MoE.Config) -> None:
        super().__init__()
        self.moe = built(given)
        self.embedding, self.head = nn.Embedding(31, D), nn.Linear(D, 31)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(position_ids[..., None] * 0.1)
        return self.head(x + self.moe(x))


@pytest.mark.parametrize("routing", [{}, {"score_func": "softmax", "route_norm": True, "route_scale": 2.0}])
def test_numbers_are_those_of_torchtitan(routing: dict[str, Any]) -> None:
    """In bfloat16, in which experts compute on both sides."""
    theirs, ours = built(config(**routing)), built(moe(config(**routing)))
    assert type(ours) is FxparMoE
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    x = torch.randn(2, 9, D)
    for want, got in zip(_out_and_grads(theirs, x), _out_and_grads(ours, x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def _out_and_grads(module: nn.Module, x: Tensor) -> list[Tensor]:
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def test_strategies() -> None:
    """In float64, bfloat16 too: a check widens it."""
    found = take(Routed(moe(config())), losses.causal_lm, tokens(31, 12, 10))
    for strategy in ("ep2.tp2+sp", "dp2.ep2+zero3"):
        result = found.check(strategy)
        assert result.ok, result


def test_torchtitan_finds_the_override_by_name() -> None:
    (path,) = FOR_FXPAR
    assert path == f"{moe.__module__}.moe"
