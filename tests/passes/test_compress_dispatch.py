"""Means in the place of experts' rows: results and gradients are autograd's over the same clusters, on any ranks."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, losses
from fxpar.checking import assign, check, run_world
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ExpertRowsError, LossyProgramError, NothingToCompressError, PassOptionError, VerifyError
from fxpar.ir.counts import RunCount
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, graphs_after, lower
from fxpar.lowering.needs import verify_needs
from fxpar.ops import compress
from fxpar.passes.compress_dispatch import CompressDispatch, most_clusters
from tests.captured import Captured, lowered, squared, take, vectors

own = torch.ops.fxpar
D, HIDDEN, E, VOCAB, RATE = 8, 6, 4, 29, 0.03
OPTIONS = CompressDispatch()
LEAST = E * 2  # ceil(64 * 0.03) per expert
assert compress


class Coded(torch.autograd.Function):
    """Rows as they arrive, and their gradients likewise."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return own.unpack_rows.default(own.pack_rows.default(rows), rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Coded.forward(ctx, grad)


class Experts(nn.Module):
    """Top-2 of four gated experts with biases. With a `rate` it computes with means itself, with a `place` as one of
    two nodes, whose means travel in fp8.
    """

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        widths = (2 * HIDDEN,) if fused else (HIDDEN, HIDDEN)
        self.up = nn.ParameterList(nn.Parameter(torch.randn(E, D, width) / 3) for width in widths)
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(E, n) / 3) for n in (2 * HIDDEN, D))
        self.down = nn.Parameter(torch.randn(E, HIDDEN, D) / 3)
        self.rate: float | None = None
        self.place: int | None = None

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
            least, places = (LEAST, ()) if self.place is None else (2 * E + 1, (self.place, 2))
            budget = (E, 2 * OPTIONS.columns, OPTIONS.hashes, self.rate, least, *places)
            cluster, sizes, ids_of = own.cluster_rows.default(codes, ids, *budget)
            means = own.cluster_mean.default(x, cluster, sizes)
            travels = (lambda rows: rows) if self.place is None else Coded.apply
            made = travels(self.experts(travels(means), ids_of))
            made = own.cluster_restore.default(made, x, means, cluster, sizes)
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


def truth(model: nn.Module, rows: list[dict[str, Tensor]], nodes: int = 0) -> dict[str, Tensor]:
    """Loss and gradients, summed, of autograd over means of the rows of each batch, in turn on each node."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        for layer in experts:
            layer.rate, layer.place = RATE, i % nodes if nodes else None
        total = total + loss(model, row)
    total.backward()
    for layer in experts:
        layer.rate = layer.place = None
    return {"loss": total.detach(), **{name: p.grad for name, p in model.named_parameters()}}  # type: ignore[dict-item]


def parts(rows: tuple[dict[str, Tensor], ...], count: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(row, piece, strict=True))
        for row in rows
        for piece in zip(*(t.chunk(count, 1) for t in row.values()), strict=True)
    ]


def differs(found: Captured, strategy: str | Strategy | TrainGraph, expected: dict[str, Tensor]) -> float:
    """The largest relative error of loss and gradients."""
    program = strategy if isinstance(strategy, TrainGraph) else lowered(found, strategy)
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


NODES = ClusterSpec(2, 1, 10.0, 1e-4, 0.0)
BETWEEN = f"cp2+lsh({RATE})[layers.*: ep2]"


def with_options(strategy: str, cluster: ClusterSpec | None, **options: Any) -> ExecGraph:
    """Lowered with options of the pass."""
    passes: list[GraphPass] = default_passes(cluster=cluster)
    at = [step.name for step in passes].index(CompressDispatch.name)
    passes[at] = CompressDispatch(**options, cluster=cluster)
    program = lower(captured()[1].graph, strategy, passes=passes)
    assert isinstance(program, ExecGraph)
    return program


def test_rows_that_stay_on_a_node_and_those_that_travel_in_fp8() -> None:
    model, found = captured()
    program = with_options(BETWEEN, NODES, codec="fp8", between=True, pool=0)
    assert differs(found, program, truth(model, parts(found.batches, 2), nodes=2)) < 1e-10
    sent = [one.sent for one in program.communications() if any(isinstance(size, RunCount) for size in one.sent.shape)]
    rows = [meta for meta in sent if meta.shape[-1] > 2]  # not ids
    assert [(meta.dtype, meta.shape[-1]) for meta in rows] == [(torch.uint8, D + 4)] * 8  # four for each layer


def test_rows_that_travel_in_bf16() -> None:
    """Of means in fp64 each travels as it is rounded; a codec changes nothing where experts are at home."""
    program = with_options(BETWEEN, None, codec="bf16")
    sent = [one.sent for one in program.communications() if any(isinstance(size, RunCount) for size in one.sent.shape)]
    assert [meta.dtype for meta in sent if meta.shape[-1] > 2] == [torch.bfloat16] * 8
    alone = with_options(f"dp1+lsh({RATE})", None, codec="bf16")
    assert alone.fingerprint() == lowered(captured()[1], f"dp1+lsh({RATE})").fingerprint()


def test_only_where_it_is_predicted_to_pay() -> None:
    """A slow network, links at no cost, and experts that are all on one node."""
    slow, free = with_options(BETWEEN, NODES), with_options(BETWEEN, ClusterSpec(2, 1, 1e6, 1e6, 0.0))
    at_home = with_options(BETWEEN, ClusterSpec(1, 2, 1e-4, 1.0, 0.0), between=True)
    assert re.search(r"2 layers see at most 16 of .* predicted to save \S+ ms of a micro-batch, and to", slow.notes[0])
    assert re.search(r"2 layers see all rows, as means would not pay: .* save (\S+) ms .* take (\S+) ms", free.notes[0])
    assert "2 layers see all rows, which do not leave their node" in at_home.notes[0]
    exact = lowered(captured()[1], "cp2[layers.*: ep2]").parts["body"]
    for program in (free, at_home):
        assert len(program.body.graph.nodes) == len(exact.graph.nodes)


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
    (graph,) = graphs_after(
        captured()[1].graph, Strategy.parse(f"dp1+lsh({RATE})"), CompressDispatch.name, default_passes()
    )
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
def test_options_that_cannot_be() -> None:
    with pytest.raises(PassOptionError, match="'fp4' is none of bf16, fp8"):
        CompressDispatch(codec="fp4")
    with pytest.raises(PassOptionError, match=r"'between'.* needs a cluster"):
        with_options(BETWEEN, None, between=True)


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
