"""Means in the place of experts' rows: results and gradients are autograd's over the same clusters, on any ranks."""

from __future__ import annotations

import functools
import re

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, losses
from fxpar.checking import assign, check, run_world
from fxpar.errors import ExpertRowsError, LossyProgramError, NothingToCompressError, VerifyError
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.strategy import Strategy
from fxpar.lowering import graphs_after, lower
from fxpar.lowering.needs import verify_needs
from fxpar.ops import compress
from fxpar.passes.compress_dispatch import CompressDispatch, most_clusters
from tests.captured import Captured, lowered, squared, take, vectors

own = torch.ops.fxpar
D, HIDDEN, E, VOCAB, RATE = 8, 6, 4, 29, 0.03
OPTIONS = CompressDispatch()
LEAST = E * 2  # ceil(64 * 0.03) per expert
assert compress


class Experts(nn.Module):
    """Top-2 of four gated experts with biases. With a `rate` it computes with means itself."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        widths = (2 * HIDDEN,) if fused else (HIDDEN, HIDDEN)
        self.up = nn.ParameterList(nn.Parameter(torch.randn(E, D, width) / 3) for width in widths)
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(E, n) / 3) for n in (2 * HIDDEN, D))
        self.down = nn.Parameter(torch.randn(E, HIDDEN, D) / 3)
        self.rate: float | None = None

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        made = torch.cat([expert_mm(x, up, ids) for up in self.up], -1)
        made = made + F.embedding(ids if self.rate is None else ids.clamp(min=0), self.up_bias)
        gate, up = made.chunk(2, -1)
        return expert_mm(F.silu(gate) * up, self.down, ids)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        x = tokens[:, None].expand(-1, 2, -1)
        if self.rate is None:
            made = self.experts(x, ids)
        else:
            codes = own.hash_rows.default(x.detach(), OPTIONS.hashes, OPTIONS.columns, 0)
            budget = (E, 2 * OPTIONS.columns, OPTIONS.hashes, self.rate, LEAST)
            cluster, sizes, ids_of = own.cluster_rows.default(codes, ids, *budget)
            means = own.cluster_mean.default(x, cluster, sizes)
            made = own.cluster_restore.default(self.experts(means, ids_of), x, means, cluster, sizes)
        return ((made + F.embedding(ids, self.down_bias)) * weights[..., None]).sum(1)


class Model(nn.Module):
    """No attention: what is done with a token depends on its cluster alone."""

    def __init__(self, *layers: Experts) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).view(-1, D)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (D,)))
        return self.head(x).view(*input_ids.shape, VOCAB)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return losses.cross_entropy_sum(model(batch["input_ids"]), batch["labels"])


def batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, 1, length))
    return {"input_ids": ids[0], "labels": ids[1]}


@functools.cache
def captured() -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Model(Experts(), Experts(fused=False))
    return model, take(model, loss, [batch(96), batch(96)])


def truth(model: nn.Module, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Loss and gradients, summed, of autograd over means of the rows of each batch."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in experts:
        layer.rate = RATE
    model.zero_grad()
    total = sum(loss(model, row) for row in rows)
    total.backward()  # type: ignore[union-attr]
    for layer in experts:
        layer.rate = None
    return {"loss": total.detach(), **{name: p.grad for name, p in model.named_parameters()}}  # type: ignore[union-attr, dict-item]


def parts(rows: tuple[dict[str, Tensor], ...], count: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(row, piece, strict=True))
        for row in rows
        for piece in zip(*(t.chunk(count, 1) for t in row.values()), strict=True)
    ]


def differs(found: Captured, strategy: str | Strategy, expected: dict[str, Tensor]) -> float:
    """The largest relative error of loss and gradients."""
    program = lowered(found, strategy)
    ranks = run_world(program, found.params, found.buffers, found.batches, assign(program.strategy, 2), 1.0)
    worst = max(float((rank["loss"] / expected["loss"] - 1).abs()) for rank in ranks)
    seen = set()
    for part in program.placed:
        for info, stored in zip(part.outputs, part.stored_outputs, strict=True):
            for rank in stored.dist.mesh.ranks if info.kind == "grad" else ():
                piece, whole = stored.dist.take(expected[info.fqn], rank), expected[info.fqn]
                worst = max(worst, float((ranks[rank]["grads"][info.fqn] - piece).abs().max() / whole.abs().max()))
                seen.add(info.fqn)
    assert seen == set(found.params)
    return worst


# ------------------------------------------------------------------------------------------------------------ results
@pytest.mark.parametrize(
    "strategy", ["dp1", "dp2+zero3", "tp2", "tp2+sp+remat", "pp2+cut(layers.1)", "dp1+chunks(4)+offload"]
)
def test_as_autograd_over_the_same_clusters(strategy: str) -> None:
    model, found = captured()
    axes, flags, *_ = [*strategy.split("+", 1), ""]
    assert differs(found, f"{axes}+lsh({RATE})" + f"+{flags}" * bool(flags), truth(model, [*found.batches])) < 1e-10


def test_rows_that_tensor_parallelism_cuts_in_width() -> None:
    """Behind the experts of one layer, before those of the other: ranks agree on clusters."""
    model, found = captured()
    overrides = {"layers.0.down": "S(2)", "layers.1.up.*": "S(1)"}
    strategy = Strategy.parse(f"tp2+sp+lsh({RATE})", overrides=overrides)
    assert differs(found, strategy, truth(model, [*found.batches])) < 1e-10


@pytest.mark.parametrize("strategy", ["cp2"])
def test_ranks_with_other_tokens_make_clusters_of_their_own(strategy: str) -> None:
    model, found = captured()
    assert differs(found, f"{strategy}+lsh({RATE})", truth(model, parts(found.batches, 2))) < 1e-10


def test_a_budget_for_all_rows_is_exact() -> None:
    result = captured()[1].check("tp2+sp+lsh(1)")
    assert result.ok, result


# -------------------------------------------------------------------------------------------------------- the program
def products(strategy: str) -> list[int]:
    """How many rows the products of the forward and the backward see, with the dims of the example."""
    program = lowered(captured()[1], strategy)
    assert isinstance(program, ExecGraph)
    dims = {dim.symbol: dim.example for dim in program.dims}
    nodes = program.body.graph.find_nodes(op="call_function", target=own.grouped_mm.default)
    return [local_tensor(node).sizes(dims)[0] for node in nodes]


def test_products_see_the_budget_and_the_report_says_what_that_saves() -> None:
    assert products(f"dp1+lsh({RATE})") == [LEAST] * 10  # of 192 rows, 3 % of which are less than 2 per expert
    assert products("dp1[layers.1: +lsh(0.5)]") == [192] * 2 + [128] * 6 + [192] * 2
    (note,) = lowered(captured()[1], f"dp1+lsh({RATE})").notes
    work = sum(2 * 2 * 2 * D * HIDDEN * n for n in (2, 1)) * 3 // 2 * (192 - LEAST)
    assert "experts of 2 layers see at most 16 of 384 rows" in note
    assert f"saves {work / 1e9:.3g} GFLOP" in note


def test_clusters_are_made_once() -> None:
    for strategy in (f"dp1+lsh({RATE})", f"dp1+remat+lsh({RATE})"):
        body = lowered(captured()[1], strategy).body  # type: ignore[attr-defined]
        assert len(body.graph.find_nodes(op="call_function", target=own.cluster_rows.default)) == 2


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 100, 1024])
@pytest.mark.parametrize("rate", [0.2, 0.35, 1.0])
def test_the_budget_of_a_graph_is_that_of_the_op(rows: int, rate: float) -> None:
    assert most_clusters(sympy.Integer(rows), rate, 5) == compress.most_clusters(rows, rate, 5)


def test_a_second_time_is_refused() -> None:
    (graph,) = graphs_after(captured()[1].graph, Strategy.parse(f"dp1+lsh({RATE})"), CompressDispatch.name)
    with pytest.raises(VerifyError, match="compress_dispatch has run"):
        verify_needs(graph, CompressDispatch.name)


# ------------------------------------------------------------------------------------------------------------- checks
def test_a_check_is_of_the_same_passes_with_all_rows() -> None:
    result = captured()[1].check(f"dp2+lsh({RATE})")
    assert result.ok, result
    assert result.grad_max_rel_err < 1e-10
    off = re.fullmatch(
        r"lossy: compared as dp2\+lsh\(1\).* loss by (\S+), gradients by up to (\S+) .*", result.notes[0]
    )
    assert off is not None
    assert min(map(float, off.groups())) > 1e-3


def test_a_program_is_not_checked() -> None:
    found = captured()[1]
    program = lowered(found, f"dp1+lsh({RATE})")
    with pytest.raises(LossyProgramError, match="lets experts see means of rows"):
        check(found.graph, [program], found.params, found.buffers, found.batches)


# ---------------------------------------------------------------------------------------------------------- bad input
def test_a_model_without_experts() -> None:
    with pytest.raises(NothingToCompressError, match=r"strategy 'dp1\+lsh\(0.2\)'.* 'Linear' has none"):
        lower(take(nn.Linear(3, 2), squared, vectors(3, 2, 4)).graph, "dp1+lsh(0.2)")


def test_a_rule_without_experts() -> None:
    with pytest.raises(NothingToCompressError, match=r"rule 'head: \+lsh\(0.2\)'"):
        lower(captured()[1].graph, "dp1[head: +lsh(0.2)]")


class Scaled(Experts):
    """Rows get another factor each between two products; with `mixed` their mean."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        made = expert_mm(x, self.up[0], ids)[..., :HIDDEN]
        made = made - made.mean(0) if self.mixed else made * ids[..., None]
        return expert_mm(made, self.down, ids)


class Widened(Experts):
    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        return expert_mm(x, self.up[0], ids)[..., :D]


@functools.cache
def others() -> Captured:
    return take(Model(Scaled(False), Scaled(True), Widened()), loss, [batch(32)])


@pytest.mark.parametrize(
    ("layer", "why"),
    [*enumerate(["has values of its own for each row", "moves rows, or adds them up", "makes rows of another width"])],
)
def test_rows_that_are_not_treated_each_by_itself(layer: int, why: str) -> None:
    with pytest.raises(ExpertRowsError, match=rf"in 'layers.{layer}' of model 'Model' .*{why}"):
        lower(others().graph, f"dp1[layers.{layer}: +lsh(0.2)]")
