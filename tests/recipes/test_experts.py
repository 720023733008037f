"""torchtitan's mixture of experts, captured: its numbers, and those of one device under strategies."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.feed_forward import FeedForward

from fxpar import losses
from fxpar.batching import MicroBatch
from fxpar.checking import assign, run_world
from fxpar.errors import UnsupportedRecipeError
from fxpar.ir.graph import IS_TOKEN
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.experts import FOR_FXPAR, FxparMoE, count_tokens, gpt_oss_moe, moe, without_padding
from fxpar.runtime.micro import row_of
from fxpar.runtime.report import ExpertLoad, StepReport
from tests.captured import Captured, take, tokens

D, F, E, K = 16, 24, 4, 2
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router asks for float32


def config(coeff: float | None = None, **routing: Any) -> titan.MoE.Config:
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
        load_balance_coeff=coeff,
    )


def of_gpt_oss(coeff: float | None = None) -> titan.GptOssMoE.Config:
    """Biases behind the router and both products, top-2 of 4 experts."""
    given = titan.stock_recipe("gpt_oss", "gpt_oss_debugmodel").model_spec.model.layers[0].moe
    gate = replace(given.router.gate, in_features=D, out_features=E)
    routed, kinds = given.routed_experts, {"num_experts": E, "top_k": K}
    return replace(
        given,
        num_experts=E,
        load_balance_coeff=coeff,
        router=replace(given.router, gate=gate, **kinds),
        routed_experts=replace(
            routed,
            inner_experts=replace(routed.inner_experts, dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=replace(routed.token_dispatcher, **kinds),
        ),
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


CASES: dict[str, tuple[titan.MoE.Config, Any]] = {
    "plain": (config(), moe),
    "softmax": (config(score_func="softmax", route_norm=True, route_scale=2.0), moe),
    "gpt_oss": (of_gpt_oss(), gpt_oss_moe),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_torchtitan(case: str) -> None:
    """In bfloat16, in which experts compute on both sides."""
    given, replaced = CASES[case]
    theirs, ours = built(given), built(replaced(given))
    assert type(ours) is FxparMoE
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    dtype = torch.bfloat16 if case == "gpt_oss" else torch.float32  # which stock gpt_oss does not take
    theirs, ours, x = theirs.to(dtype), ours.to(dtype), torch.randn(2, 9, D, dtype=dtype)
    for want, got in zip(_out_and_grads(theirs, x), _out_and_grads(ours, x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def _out_and_grads(module: nn.Module, x: Tensor) -> list[Tensor]:
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with without_padding(model, batch):
        return losses.causal_lm(model, {key: value for key, value in batch.items() if key != IS_TOKEN})


@functools.cache
def routed(gpt_oss: bool) -> tuple[Captured, Routed]:
    """With a bias of the router, captured on rows of tokens alone."""
    model = Routed(gpt_oss_moe(of_gpt_oss(1e-3)) if gpt_oss else moe(config(1e-3)))
    with torch.no_grad():
        cast(Tensor, model.moe.expert_bias_E).copy_(torch.tensor([0.1, -0.2, 0.0, 0.1]))
    rows = [{**row, IS_TOKEN: torch.ones_like(row["input_ids"])} for row in tokens(31, 12, 10)]
    return take(model, loss, rows), model


@pytest.mark.parametrize(("gpt_oss", "strategy"), [(False, "ep2.tp2+sp"), (False, "dp2.ep2+zero3"), (True, "ep2")])
def test_strategies(gpt_oss: bool, strategy: str) -> None:
    """In float64, bfloat16 too: a check widens it. Rows of ten tokens are padded."""
    result = routed(gpt_oss)[0].check(strategy)
    assert result.ok, result


def report(load: ExpertLoad) -> StepReport:
    """Of a step that is about its experts alone."""
    return StepReport(1, 0.0, 2, 22, 20, 0.0, 0.0, (), experts=(load,))


def test_tokens_per_expert_are_torchtitans() -> None:
    """Without padding, and as its optimizer's hook reads them."""
    found, model = routed(False)
    theirs = Routed(config(1e-3)).double()
    theirs.load_state_dict(model.state_dict())
    program = lower(pack_documents(found.graph), "ep2.tp2+sp")
    documents = [{key: row[key][0] for key in ("input_ids", "labels")} for row in found.batches]
    row = row_of(program, documents, MicroBatch((0, 1), 22, (1, 1)))
    assert row[IS_TOKEN].tolist() == [[1] * 12 + [1] * 10 + [0] * 2]
    ranks = run_world(program, found.params, found.buffers, [row], assign(program.strategy, 1), 1.0)
    mixed = sum(rank["experts"]["moe"] for rank in ranks)
    for given in found.batches:
        theirs(given["input_ids"], given["position_ids"])
    count_tokens(model, report(ExpertLoad("moe", tuple(mixed[:E].tolist()), ())))
    assert model.moe.tokens_per_expert_E.tolist() == theirs.moe.tokens_per_expert_E.tolist()
    limited = report(ExpertLoad("moe", (1.0,) * E, (), wanted=(0.0, 1.0, 2.0, 2.999999)))
    count_tokens(model, limited)
    count_tokens(model, replace(limited, skipped=True))
    more = theirs.moe.tokens_per_expert_E + torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert model.moe.tokens_per_expert_E.tolist() == more.tolist()


def test_torchtitan_finds_the_overrides_by_name() -> None:
    assert (f"{moe.__module__}.moe", f"{moe.__module__}.gpt_oss_moe") == FOR_FXPAR


class Fused(titan.GroupedExperts):
    """As of an override of the user's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        pass


def test_experts_of_another_override_are_refused() -> None:
    given = config()
    experts = titan.derive(given.routed_experts.inner_experts, Fused.Config)
    given = replace(given, routed_experts=replace(given.routed_experts, inner_experts=experts))
    with pytest.raises(
        UnsupportedRecipeError, match=r"override.imports: experts are a Fused, .* Leave out the override"
    ):
        moe(given).build()
