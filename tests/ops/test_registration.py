"""The contract of every fxpar op: schema, fake kernel, gradient, and capture with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar.ops  # noqa: F401  registers the ops
from fxpar.ops.cross_entropy import cross_entropy_loss
from fxpar.ops.dropout import dropout

own = torch.ops.fxpar

SCHEMAS = [
    "fxpar::attention(Tensor q, Tensor k, Tensor v, Tensor? document_ids, Tensor? mask, bool causal, int window, "
    "float scale, float softcap, Tensor? sinks=None) -> (Tensor out, Tensor lse)",
    "fxpar::attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? document_ids, Tensor? mask, bool causal, int window, float scale, float softcap) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    "fxpar::attention_sinks_backward(Tensor dout, Tensor out, Tensor lse, Tensor sinks) -> Tensor dsinks",
    "fxpar::cross_entropy(Tensor logits, Tensor target, Tensor class_ids) -> (Tensor lse, Tensor picked)",
    "fxpar::cross_entropy_backward(Tensor dlse, Tensor dpicked, Tensor logits, Tensor target, Tensor class_ids, "
    "Tensor lse) -> Tensor dlogits",
    "fxpar::dropout(Tensor x, Tensor seed, Tensor[] offsets, float p, int salt) -> Tensor",
    "fxpar::embedding(Tensor weight, Tensor ids, Tensor row_ids) -> Tensor",
    "fxpar::from_host(Tensor x, *, Device? device=None) -> Tensor",
    "fxpar::to_host(Tensor x) -> Tensor",
    "fxpar::embedding_backward(Tensor grad, Tensor ids, Tensor row_ids, int padding_idx) -> Tensor",
    "fxpar::expert_mm(Tensor x, Tensor weight, Tensor ids) -> Tensor",
    "fxpar::expert_mm_backward(Tensor grad, Tensor x, Tensor ids, int experts) -> Tensor",
    "fxpar::weighted_sum(Tensor rows, Tensor weights) -> Tensor",
    "fxpar::weighted_sum_backward(Tensor grad, Tensor rows, Tensor weights) -> (Tensor drows, Tensor dweights)",
    "fxpar::route_rows(Tensor ids, int experts) -> (Tensor order, Tensor counts)",
    "fxpar::dispatch(Tensor tokens, Tensor order, Tensor ids) -> Tensor",
    "fxpar::place_rows(Tensor rows, Tensor order, Tensor ids) -> Tensor",
    "fxpar::grouped_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    "fxpar::grouped_mm_backward(Tensor grad, Tensor rows, Tensor counts) -> Tensor",
    "fxpar::combine(Tensor rows, Tensor? weights, Tensor order, Tensor ids) -> Tensor",
    "fxpar::combine_backward(Tensor grad, Tensor rows, Tensor weights, Tensor order) -> "
    "(Tensor drows, Tensor dweights)",
    "fxpar::hash_rows(Tensor x, int hashes, int columns, int seed) -> Tensor",
    "fxpar::cluster_rows(Tensor codes, Tensor ids, int experts, int buckets, int hashes, float rate, int least, "
    "int rank=0, int places=1) -> (Tensor cluster, Tensor sizes, Tensor ids_of)",
    "fxpar::cluster_mean(Tensor x, Tensor cluster, Tensor sizes) -> Tensor",
    "fxpar::cluster_mean_backward(Tensor dmeans, Tensor cluster, Tensor sizes) -> Tensor",
    "fxpar::cluster_restore(Tensor made, Tensor x, Tensor means, Tensor cluster, Tensor sizes, float share=1.) "
    "-> Tensor",
    "fxpar::cluster_restore_backward(Tensor grad, Tensor cluster, Tensor sizes) -> Tensor",
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schema_is_what_graphs_were_captured_with(schema):
    name = schema.split("(")[0].split("::")[1]
    assert str(getattr(own, name).default._schema) == schema


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A [B, H, S, E] tensor laid out as models make it, [B, S, H, E]."""
    B, H, S, E = shape
    return torch.randn(B, S, H, E, dtype=dtype).transpose(1, 2).requires_grad_()


def attention_samples() -> list[tuple[Any, ...]]:
    q, k, v = heads(2, 4, 7, 8), heads(2, 2, 7, 8), heads(2, 2, 7, 8)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2]])
    wide, half = heads(2, 2, 7, 6), [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    mask = torch.rand(2, 1, 7, 7) > 0.3
    return [
        (q, k, v, None, None, True, 0, 0.3, 0.0),
        (q, k, v, ids, None, True, 3, 0.3, 0.0),
        (q, k, wide, None, mask, False, 0, 0.3, 5.0),
        (*half, ids, None, True, 0, 0.3, 0.0),
        (q.detach().contiguous(), k, v, None, None, True, 0, 0.3, 0.0),
        (q, k, v, ids, None, True, 0, 0.3, 0.0, torch.randn(1, 4, 1, requires_grad=True)),
    ]


def expert_samples() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Four tokens, three experts, two for each token; one slot goes to none."""
    chosen = torch.tensor([[0, 2], [2, 0], [-1, 2], [0, 2]])
    order, counts = own.route_rows(chosen, 3)
    x, rows, w, p = (torch.randn(*s, requires_grad=True) for s in ((4, 2, 5), (8, 5), (3, 5, 6), (4, 2)))
    grad, wide = torch.randn(4, 2, 6), torch.randn(8, 6)
    return [
        (own.expert_mm.default, (x, w, chosen)),
        (own.expert_mm_backward.default, (grad, x.detach(), chosen, 3)),
        (own.weighted_sum.default, (x, p)),
        (own.weighted_sum_backward.default, (torch.randn(4, 5), x.detach(), p.detach())),
        (own.route_rows.default, (chosen, 3)),
        (own.dispatch.default, (x, order, chosen)),
        (own.place_rows.default, (rows, order, chosen)),
        (own.grouped_mm.default, (rows, w, counts)),
        (own.grouped_mm_backward.default, (wide, rows.detach(), counts)),
        (own.combine.default, (rows, p, order, chosen)),
        (own.combine_backward.default, (torch.randn(4, 5), rows.detach(), p.detach(), order)),
    ]


def cluster_samples() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Rows of six tokens, in half as many clusters."""
    x, chosen = torch.randn(6, 2, 5, requires_grad=True), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]])
    codes = own.hash_rows(x.detach(), 2, 2, 0)
    budget = (2, 4, 2, 0.5, 3)
    cluster, sizes, _ = own.cluster_rows(codes, chosen, *budget)
    made, means = (torch.randn(6, 1, 5, requires_grad=True) for _ in range(2))
    return [
        (own.hash_rows.default, (x.detach(), 2, 2, 0)),
        (own.cluster_rows.default, (codes, chosen, *budget)),
        (own.pack_rows.default, (x.detach(),)),
        (own.unpack_rows.default, (own.pack_rows(x.detach()), torch.float32)),
        (own.cluster_mean.default, (x, cluster, sizes)),
        (own.cluster_mean_backward.default, (means.detach(), cluster, sizes)),
        (own.cluster_restore.default, (made, x, means, cluster, sizes, 0.5)),
        (own.cluster_restore_backward.default, (x.detach(), cluster, sizes)),
    ]


def samples() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    found: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for args in attention_samples():
        found.append((own.attention.default, args))
        q, k, v, *rest = (a.detach() if isinstance(a, Tensor) else a for a in args)
        out, lse = own.attention(q, k, v, *rest)
        dout = torch.randn_like(out)
        found.append((own.attention_backward.default, (dout, q, k, v, out, lse, *rest[:6])))
        found += [(own.attention_sinks_backward.default, (dout, out, lse, sinks)) for sinks in rest[6:]]
    ids = torch.tensor([[1, 4, 2], [3, 9, -1]])
    rows = torch.tensor([2, 3, 4, 5, 0])
    found.append((own.embedding.default, (torch.randn(5, 3, requires_grad=True), ids, rows)))
    found.append((own.embedding_backward.default, (torch.randn(2, 3, 3), ids, rows, 2)))
    target, classes = torch.tensor([0, 3, -100, 7]), torch.tensor([3, 4, 5, 0])
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(4, 4, dtype=dtype)
        lse, picked = own.cross_entropy(logits, target, classes)
        backward = (torch.randn_like(lse), torch.randn_like(picked), logits, target, classes, lse)
        found.append((own.cross_entropy.default, (logits.detach().requires_grad_(), target, classes)))
        found.append((own.cross_entropy_backward.default, backward))
    found += expert_samples() + cluster_samples()
    offsets = [torch.arange(2) * 12, torch.arange(4) * 3, torch.arange(3)]
    x = torch.randn(2, 3, 4).transpose(1, 2).requires_grad_()
    found.append((own.dropout.default, (x, torch.tensor(5), offsets, 0.4, 1)))
    return found


@pytest.mark.parametrize("number", range(len(samples())))
def test_opcheck(number):
    op, args = samples()[number]
    torch.library.opcheck(op, args)


def check_capture(step: Callable[..., Any], make: Callable[[int], list[Tensor]], names: set[str]) -> None:
    """Capture step at size 6 with all sizes symbolic: the graph has just these fxpar ops, and is right at size 11."""
    graph = make_fx(step, tracing_mode="symbolic")(*make(6))
    targets = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert {t for t in targets if t.startswith("fxpar")} == {f"fxpar.{n}.default" for n in names}
    assert not {t for t in targets if "scaled_dot" in t or "softmax" in t or "embedding_dense" in t}
    args = make(11)
    for got, want in zip(graph(*args), step(*args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("documents", [False, True])
def test_attention_captures_with_symbolic_batch_and_length(documents):
    def step(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, _ = own.attention(q, k, v, ids if documents else None, None, True, 0, 0.3, 0.0)
        flat = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)
        return flat, *torch.autograd.grad(flat.square().sum(), (q, k, v))

    def make(S: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(S)
        q = torch.randn(S // 3, 4, S, 8, generator=g)
        k, v = (torch.randn(S // 3, 2, S, 8, generator=g) for _ in range(2))
        return [q, k, v, torch.arange(S)[None] // 4]

    check_capture(step, make, {"attention", "attention_backward"})


def test_cross_entropy_captures_with_symbolic_tokens():
    def step(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = logits.detach().requires_grad_()
        loss = cross_entropy_loss(logits, target).sum()
        return loss, *torch.autograd.grad(loss, (logits,))

    def make(N: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(N)
        return [torch.randn(N, 9, generator=g), torch.randint(0, 9, (N,), generator=g)]

    check_capture(step, make, {"cross_entropy", "cross_entropy_backward"})


def test_dropout_captures_with_symbolic_tokens():
    def step(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = dropout(x, 0.3, seed, 7)
        return y, *torch.autograd.grad(y.square().sum(), (x,))

    def make(N: int) -> list[Tensor]:
        return [torch.ones(2, N, 5), torch.tensor(3)]

    check_capture(step, make, {"dropout"})


def test_embedding_captures_with_symbolic_tokens():
    def step(weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        weight = weight.detach().requires_grad_()
        out = own.embedding(weight, ids, torch.arange(1, weight.shape[0] + 1))
        return out, *torch.autograd.grad(out.square().sum(), (weight,))

    def make(N: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(N)
        return [torch.randn(7, 3, generator=g), torch.randint(0, 7, (2, N), generator=g)]

    check_capture(step, make, {"embedding", "embedding_backward"})
