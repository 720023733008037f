"""Experts on several ranks: what travels, where what is computed, and gradients that are those of one device."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, losses, weighted_sum
from fxpar.annotate.experts import check_experts
from fxpar.checking import check
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import (
    ExpertIdsError,
    ExpertsDivideError,
    ExpertsOrderError,
    ExpertWeightsError,
    NoExpertsError,
    VerifyError,
)
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.counts import RunCount
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, lower
from fxpar.models import load
from fxpar.ops import copies
from fxpar.passes.pack_documents import pack_documents
from fxpar.tracer import capture
from tests.captured import Captured, llama, take, tokens
from tests.repeat import thinned

own = torch.ops.fxpar
WIDTH, SLOTS, EXPERTS = 16, 2, 4


class Experts(nn.Module):
    """A router and gated experts. `kind` is what is unusual about them."""

    def __init__(self, kind: str, slots: int) -> None:
        super().__init__()
        self.kind, self.slots = kind, slots
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH) / 3)
        self.b1 = nn.Parameter(torch.randn(EXPERTS, 12)) if kind == "biased" else None
        self.b2 = nn.Parameter(torch.randn(EXPERTS, WIDTH)) if kind == "biased" else None
        if kind == "all to one":  # rank 0 gets every token, the others none
            nn.init.constant_(self.router.bias[:slots], 1e3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(self.slots, -1)
        weights = weights / weights.sum(-1, keepdim=True) * 2 if self.slots > 1 else weights
        made = expert_mm(flat.unsqueeze(1).expand(*ids.shape, -1), self.w1, ids)
        made = made if self.b1 is None else made + F.embedding(ids, self.b1)
        gate, up = made.chunk(2, -1)
        if self.kind == "biased":  # ones of zeros: another rank's rows are not zeros any more
            made = torch.sigmoid(gate) * (up + 1)
        else:
            made = F.silu(gate) * up
        made = expert_mm(made, self.w2, ids)
        made = made if self.b2 is None else made + F.embedding(ids, self.b2)
        if self.kind == "ones behind":  # rows that are not zeros must not be added up
            made = torch.cos(made)
        if self.kind == "biased":
            return (made * weights.unsqueeze(-1)).sum(1).view_as(x)
        return weighted_sum(made, weights).view_as(x)


class Model(nn.Module):
    def __init__(self, kind: str = "usual", slots: int = SLOTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31)
        self.layers = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(WIDTH, 48), "experts": Experts(kind, slots)})])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in layer["qkv"](x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            made = layer["experts"](x)
            x = made if layer["experts"].kind == "alone" else x + made
        return self.head(x)


@functools.cache
def moe(kind: str = "usual", slots: int = SLOTS, **options: Any) -> Captured:
    return take(Model(kind, slots), losses.causal_lm, tokens(31, 9, 14), **options)


def sliced() -> Captured:
    """With room in a parameter for experts that there are not."""
    model = Model()
    experts: Any = model.layers[0]["experts"]
    experts.w1 = nn.Parameter(torch.randn(EXPERTS + 2, WIDTH, 12) / 4)
    experts.forward = functools.partial(_first_experts, experts)
    return take(model, losses.causal_lm, tokens(31, 9))


def _first_experts(experts: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weights, ids = experts.router(flat).softmax(-1).topk(SLOTS, -1)
    made = expert_mm(flat.unsqueeze(1).expand(*ids.shape, -1), experts.w1[:EXPERTS], ids)
    return weighted_sum(expert_mm(made[..., :6], experts.w2, ids), weights).view_as(x)


@functools.cache
def program(strategy: str) -> ExecGraph:
    found = lower(pack_documents(moe().graph), strategy)
    assert isinstance(found, ExecGraph)
    return found


@pytest.mark.parametrize(
    ("kind", "slots", "strategy"),
    [
        ("usual", 2, "dp2.ep2+zero3"),
        ("usual", 2, "ep2.tp2+sp"),
        ("usual", 2, "ep2.pp2+cut(layers.0.experts)"),
        ("usual", 2, "cp2.ep2+remat"),
        ("usual", 2, "tp4+sp[*.experts: ep2.tp2]"),
        ("usual", 2, "ep2.cp2[*.experts: ep4]"),
        ("usual", 2, "ep2.tp2+sp+lsh(0.5)"),
        ("all to one", 1, "ep4"),
        ("biased", 4, "ep2+zero2"),
        ("ones behind", 2, "ep2"),
        ("alone", 2, "ep2+zero2"),  # a weight is gathered right behind the experts, before all micro-batches
    ],
)
def test_gradients_are_those_of_one_device(kind: str, slots: int, strategy: str) -> None:
    result = moe(kind, slots).check(strategy)
    assert result.ok, result
    assert result.collectives["all_to_all"] >= 6


# With another route, gradients would not be those of one device. The two that run by day have one layer.
TYPES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe", "granitemoe", "jamba"),
    *("ernie4_5_moe", "phimoe", "flex_olmo", "qwen3_next", "dbrx", "jetmoe"),
)


@pytest.mark.parametrize(
    ("name", "strategy"),
    thinned(
        itertools.product(TYPES, ("ep2", "ep4", "dp2.ep2", "ep2.tp2+sp")),
        [("mixtral", "ep2.tp2+sp"), ("gpt_oss", "ep4")],
    ),
)
def test_types_of_transformers(name: str, strategy: str) -> None:
    result = hosted(name).check(strategy)
    assert result.ok, result
    assert result.collectives["all_to_all"] >= 6


@functools.cache
def hosted(name: str) -> Captured:
    pytest.importorskip("transformers")
    one_layer = {"num_hidden_layers": "1"} if name in ("mixtral", "gpt_oss") else {}
    found = load(f"hf:{name}", dtype="float64", tokens=(14,), options=one_layer)
    graph = capture(found.model.eval(), found.loss_fn, found.example_batch, name=found.name)
    return Captured(graph, found.params(), found.buffers(), tuple(found.batches))


def test_each_token_travels_once_to_a_rank() -> None:
    """There and back in both directions, with a number for each slot: its ids, its weights, and their gradients."""
    sent = [c for c in program("ep4").communications() if any(isinstance(size, RunCount) for size in c.sent.shape)]
    widths = {side: [int(torch.Size(c.sent.shape[1:]).numel()) for c in sent if c.backward == side] for side in (0, 1)}
    assert sorted(widths[False]) == sorted([SLOTS, SLOTS, WIDTH, WIDTH])
    assert sorted(widths[True]) == sorted([SLOTS, WIDTH, WIDTH])
    assert {c.axis for c in sent} == {"ep"}


def test_products_in_between_run_where_the_experts_are() -> None:
    """No rows of the width between two products travel, and no wider ones than copies have."""
    graph = program("ep4").body.graph
    products = [n for n in graph.nodes if n.target is own.grouped_mm.default]
    assert len(products) == 4
    assert {str(n.meta["local"].shape[0]) for n in products} == {"count2"}
    counted = [n for n in graph.nodes if n.target is copies.copies]
    assert len(counted) == 1  # for forward and backward


# Links between nodes a tenth as fast as inside of them.
TWO_NODES = ClusterSpec(2, 2, 100.0, 10.0, 0.0)


def test_tokens_go_to_a_node_once() -> None:
    """Between nodes as many rows as tokens have nodes, in each direction; results are what they were."""
    rows = pack_documents(moe().graph)
    found = lower(rows, "ep4", cluster=TWO_NODES)
    (result,) = check(rows, [found], moe().params, moe().buffers, moe().batches)
    assert result.ok, result
    sent = [c for c in found.communications() if any(isinstance(size, RunCount) for size in c.sent.shape)]
    assert {c.axis for c in sent} == {"ep:(1)2", "ep:(2)2"}
    tokens = found.dims[0].symbol / 4
    for axis, ranks in (("ep:(1)2", 2), ("ep:(2)2", 4)):
        hop = [c for c in sent if c.axis == axis]
        mean = copies.mean_copies(SLOTS, EXPERTS, ranks)
        assert {c.sent.shape[0].args[0] / tokens for c in hop} == {sympy.Rational(mean.numerator, mean.denominator)}
        widths = {
            side: sorted(math.prod(c.sent.shape[1:]) for c in hop if c.backward == side) for side in (False, True)
        }
        assert widths == {False: [SLOTS, SLOTS, WIDTH, WIDTH], True: [SLOTS, WIDTH, WIDTH]}


def test_routes_are_told_once_under_recomputation() -> None:
    def told(strategy: str) -> int:
        sent = (c.sent for c in program(strategy).communications() if c.kind == "all_to_all")
        return sum(not meta.dtype.is_floating_point for meta in sent)

    assert told("ep4") == told("ep4+remat") == 2  # counts, and ids


def test_sizes_in_the_mean_and_at_most() -> None:
    (size,) = {s for c in program("ep2").communications() for s in c.sent.shape if str(s) == "count0"}
    T = program("ep2").dims[0].symbol
    assert int(size.subs({T: 32})) == 26  # of 16 tokens, each to 5/3 ranks
    assert size.bound.subs({T: 32}) == 32


def test_graph_files(tmp_path: Path) -> None:
    save_graph(tmp_path / "program.fxgraph", program("ep4"))
    found = load_graph(tmp_path / "program.fxgraph")
    assert found.fingerprint() == program("ep4").fingerprint()


@pytest.mark.parametrize(
    ("captured", "strategy", "error", "says"),
    [
        (moe, "ep3", ExpertsDivideError, "4 experts of 'layers.0.experts' do not divide over 3 ranks. Write ep2"),
        (moe, "rows2[embedding: ep2]", NoExpertsError, "rule 'embedding: ep2'.*its modules have none"),
        (llama, "dp2.ep2", NoExpertsError, "model 'Llama' has none.*Write rows"),
        (moe, "ep2[*.experts: tp2]", NoExpertsError, "all experts of model 'Model' are in .* other roles. Write rows"),
        (
            moe,
            "cp2.tp2.cp2[*.experts: cp2.ep4]",
            ExpertsOrderError,
            r"lie over cp:\(2\)2\.tp, .* place, as in cp4\.tp2",
        ),
        (sliced, "ep2", ExpertWeightsError, r"of 'layers.0.experts' are made by %slice_\w+ = aten.slice.Tensor"),
    ],
)
def test_what_cannot_be(captured, strategy: str, error: type[Exception], says: str) -> None:
    assert "the experts of the model itself are" in str(ExpertWeightsError("ep2", "", "a", "b"))
    with pytest.raises(error, match=says):
        lower(pack_documents(captured().graph), strategy)


def test_a_fixed_number_of_tokens() -> None:
    with pytest.raises(ExpertIdsError, match=r"of 'layers.0.experts' are .*\[tokens, slots\]"):
        check_experts(moe(dynamic=None).graph, Strategy.parse("ep2"))


def test_a_ladder_without_the_pass() -> None:
    """Each rank would compute with experts that it does not have."""
    ladder = [step for step in default_passes() if step.name != "exchange_tokens"]
    with pytest.raises(VerifyError, match="'sort_rows' needs tokens at their experts"):
        lower(pack_documents(moe().graph), "ep2", passes=ladder)


def test_what_travels_starts_before_the_products() -> None:
    """In the forward the weights of slots too, which are read behind the last product; and nobody waits for what comes
    back before it is read.
    """
    order = list(program("ep4").body.graph.nodes)
    products = [n for n in order if n.target in (own.grouped_mm.default, own.grouped_mm_backward.default)]
    travels = [n for n in order if n.target is copies.exchange and not n.meta.get("backward")]
    assert [n < products[0] for n in travels] == [True, True, True, False]  # ids, tokens, weights; results
    summed = [n for n in order if n.target is copies.sum_copies]
    assert all(min(n.users) is n.next for n in summed)
