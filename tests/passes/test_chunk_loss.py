"""The loss in chunks of tokens: the gradients of the whole, without logits of all tokens."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fxpar import losses
from fxpar.checking import assign, run_world
from fxpar.errors import ChunkedLossError, ChunkedRuleError, ChunkedTokensError, NoVocabularyLossError
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, is_gradient, local_meta
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.lowering import lower, lower_forward
from fxpar.memory.parts import accumulating_graph
from fxpar.ops.traits import ADDED_PRODUCTS, MATRIX_PRODUCTS
from tests.captured import Captured, gpt, llama, lowered, mlp, odd, take, tokens
from tests.chunks import losses as own
from tests.forwards import case
from tests.repeat import thinned

aten = torch.ops.aten


def largest_over(program: ExecGraph | PipelineGraph, vocab: int, tokens_: int) -> int:
    """Most elements of a value of tokens by (a rank's part of) the vocabulary."""
    found = 0
    for part in program.parts.values():
        for node in part.graph.nodes:
            meta = local_meta(node)
            for one in meta if isinstance(meta, tuple) else (meta,):
                if isinstance(one, TensorMeta) and vocab in one.shape[1:] and not isinstance(one.shape[-2], int):
                    found = max(found, one.numel({dim.symbol: tokens_ for dim in program.dims}))
    return found


STRATEGIES = ("dp1+chunks(2)", "tp2+sp+chunks(3)", "cp2+chunks(64)", "tp2+sp[head: cp2+chunks(2)]")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_to_one_device(strategy):
    result = llama().check(strategy, 1e-10)
    assert result.ok, result


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (lambda: llama(tied=True), "tp2+sp+chunks(3)"),
        (gpt, "tp2+chunks(2)"),  # with a bias and dropout
        (lambda: odd("experts"), "cp2+chunks(2)"),
        (lambda: odd("adapted"), "dp2+zero3+remat+chunks(2)"),
    ],
    ids=["tied", "bias", "experts", "frozen"],
)
def test_models(make, strategy):
    result = make().check(strategy, 1e-10)
    assert result.ok, result


LOSSES = {f.__name__: f for f in (own.smoothed, own.z_loss, own.focal, own.capped, own.written)}
PLACES = [(1, "tp2+sp+chunks(3)"), (2, "tp2+sp+chunks(2)"), (1, "cp2+chunks(2)")]


@pytest.mark.parametrize(
    ("loss", "place"),
    thinned(
        itertools.product(LOSSES, PLACES),
        [*zip(LOSSES, PLACES, strict=False), ("capped", PLACES[0]), ("written", PLACES[2])],
    ),
)
def test_losses(loss, place):
    """Under tp most of these swap a part of the vocabulary for a part of the tokens first, which the chunks follow."""
    rows, strategy = place
    captured = own.with_loss(LOSSES[loss], rows)
    result = captured.check(strategy, 1e-10)
    assert result.ok, result
    parts = 4 if strategy == "cp2+chunks(2)" else 2  # at least: under tp logits have a part of the vocabulary or tokens
    assert largest_over(lowered(captured, strategy), own.VOCAB, 24) <= rows * 24 * own.VOCAB // parts


@pytest.mark.parametrize("strategy", ["dp1+chunks(2)", "tp2+chunks(3)"])
@pytest.mark.parametrize("loss", [own.mixed, own.widened])
def test_logits_of_logits(loss, strategy):
    """What the product that begins the chunks is made of stands before all of them, wide or not."""
    result = own.with_loss(loss).check(strategy, 1e-10)
    assert result.ok, result


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([own.z_loss, own.focal, own.capped]),
    st.sampled_from([1, 2]),
    st.sampled_from(["dp1", "dp2+zero2", "cp2", "tp2", "tp2+sp", "cp2.tp2+sp", "tp4+sp"]),
    st.integers(2, 7),
)
@pytest.mark.nightly
def test_many(loss, rows, strategy, chunks):
    """Where cp and tp both cut tokens of the loss, a swap of vocabulary for tokens packs them, which is refused."""
    try:
        result = own.with_loss(loss, rows).check(f"{strategy}+chunks({chunks})", 1e-10)
    except ChunkedLossError as error:
        if strategy == "cp2.tp2+sp" and "pack" in str(error):
            return
        raise
    assert result.ok, result


# ----------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(("strategy", "parts", "chunks"), [("dp1", 1, 4), ("tp2+sp", 2, 4), ("cp2", 2, 3)])
def test_logits_never_stand_whole(strategy, parts, chunks):
    """Two rows of 24 tokens by 97 classes, of which tp has 49 each."""
    vocab = 49 if strategy.startswith("tp") else 97
    whole = largest_over(lowered(llama(), strategy), vocab, 24)
    assert whole == 2 * 24 * vocab // (1 if vocab == 49 else parts)
    assert largest_over(lowered(llama(), f"{strategy}+chunks({chunks})"), vocab, 24) == whole // chunks


def test_one_chunk_after_the_other():
    """All of a chunk is done before the next one begins, and the backward of the model comes behind."""
    nodes = list(lowered(llama(), "dp1+chunks(3)").body.graph.nodes)
    numbers = [n.meta["chunk"] for n in nodes if "chunk" in n.meta]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2}
    last = max(i for i, n in enumerate(nodes) if "chunk" in n.meta)
    assert not any(is_backward(n) for n in nodes[:last])
    products = [is_gradient(n) for n in nodes if "chunk" in n.meta and n.target in MATRIX_PRODUCTS | ADDED_PRODUCTS]
    assert sorted(products) == [False] * 3 + [True] * 6  # of a chunk: the head, and its two gradients


STAGED = ["dp2.pp2+chunks(2)", "pp2+chunks(3)+zb_h1", "pp2.tp2+sp+chunks(2)+gpipe"]


@pytest.mark.parametrize("strategy", thinned(STAGED, STAGED[1:2]))
def test_a_pipeline_keeps_no_logits_for_its_backward(strategy):
    captured = llama(layers=2)
    result = captured.check(strategy, 1e-10)
    assert result.ok, result
    program = lowered(captured, strategy)
    for stage in program.stages:
        assert not any(97 in local_meta(n).shape[1:] for n in stage.forward.results if local_meta(n))
    assert largest_over(program.stages[0], 97, 24) == 0


class Scaled(nn.Module):
    """Its last gain is written out: its gradient and that of its operand read the same gradient of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gain = nn.Parameter(torch.randn(8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.gain)


def test_nothing_writes_over_the_gradient_that_both_halves_of_a_backward_read():
    """The chunks are part of the forward, so under zb_h1 what they hand to the backward is read twice."""
    torch.manual_seed(0)
    batches = [{key: batch[key] for key in ("input_ids", "labels")} for batch in tokens(31, 12, 8)]
    result = take(Scaled(), losses.causal_lm, batches).check("pp2+chunks(2)+zb_h1", 1e-10)
    assert result.ok, result


def test_weights_are_gathered_once():
    """The chunks read what ZeRO-3 has gathered of the head."""

    def gathers(strategy: str) -> int:
        return lowered(gpt(), strategy).collectives()["all_gather"]

    assert gathers("dp2+zero3+chunks(2)") <= gathers("dp2+zero3")
    result = gpt().check("dp2+zero3+chunks(2)", 1e-10)
    assert result.ok, result


def test_gradients_add_up_over_chunks_and_micro_batches():
    """In place, and straight into the gradient of the micro-batches before."""
    body = lowered(llama(), "dp1+chunks(3)").body.graph
    head = [n for n in body.nodes if fqn_of(n) == "head" and n.target is aten.addmm_.default]
    assert len(head) == 2
    later = accumulating_graph(body)
    first, *others = [n for n in later.nodes if fqn_of(n) == "head" and n.target is aten.addmm_.default]
    assert first.args[0].op == "placeholder"
    assert [n.args[0] for n in others] == [first, others[0]]
    assert not any(n.args[1] is others[-1] for n in later.nodes if n.target is aten.add_.Tensor)


def test_low_precision_is_added_up_in_fp32():
    """Each product rounds once, and the sum does not."""
    captured = own.with_loss(own.z_loss, dtype=torch.bfloat16)
    same = {name: value.double() for name, value in captured.params.items()}
    wide = own.with_loss(own.z_loss)
    exact = gradient(Captured(wide.graph, same, wide.buffers, wide.batches), "dp1")
    whole, chunked = ((gradient(captured, s).double() - exact).norm() for s in ("dp1", "dp1+chunks(12)"))
    assert chunked <= 1.25 * whole
    sums = [n for n in lowered(captured, "dp1+chunks(12)").body.graph.nodes if n.target is aten.add_.Tensor]
    assert {local_meta(n).dtype for n in sums if fqn_of(n) == "head"} == {torch.float32}


def test_low_precision_for_a_store():
    """The sum in fp32 is the gradient, and on the last stage all of it is made in the forward."""
    captured = own.with_loss(own.z_loss, dtype=torch.bfloat16)
    program = lower(captured.graph, "dp2+zero2+chunks(4)", for_store=True)
    (gradient,) = (
        s.meta for o, s in zip(program.outputs, program.stored_outputs, strict=True) if o.fqn == "head.weight"
    )
    assert gradient.dtype == torch.float32
    assert [
        n for n in program.body.graph.nodes if fqn_of(n) == "head" and is_backward(n) and n.target is aten.mm.default
    ] == []
    two = llama(layers=2, dtype=torch.bfloat16)
    last = lower(two.graph, "pp2.tp2+chunks(4)", for_store=True).stages[-1]
    assert [local_meta(n).shape for n in last.forward.results if local_meta(n)].count((49, 32)) == 1
    assert last.given("grad")["head.weight"].meta == TensorMeta((97, 32), torch.float32)


def gradient(captured: Captured, strategy: str) -> torch.Tensor:
    program = lower(captured.graph, strategy)
    (found,) = run_world(program, captured.params, captured.buffers, captured.batches, assign(program.strategy, 2), 1.0)
    return found["grads"]["head.weight"]


def test_tokens_are_padded_for_all_chunks():
    assert lowered(llama(), "cp2.tp2+sp+chunks(5)").divisors == {"T": 20}
    assert lowered(llama(), "dp1+chunks(1)").divisors == {"T": 1}


# ----------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (own.shifted, r"%slice\w* \(aten.slice.Tensor.*\) is not known to treat tokens one by one"),
        (own.centered, r"%mean\w* \(aten.mean.dim.*\) is not known to treat tokens one by one"),
        (own.scaled_by_all, r"needs %\w+, a sum over all tokens, before the gradient of the first one"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_losses_that_mix_tokens(loss, words):
    with pytest.raises(ChunkedLossError, match=rf"chunks\(2\) of strategy 'dp1\+chunks\(2\)' on Llama: .*{words}"):
        lower(own.with_loss(loss).graph, "dp1+chunks(2)")


def test_a_model_without_classes():
    with pytest.raises(
        NoVocabularyLossError, match=r"no matrix product of model 'Mlp' makes logits .* Leave the flag out"
    ):
        lower(mlp().graph, "dp1+chunks(2)")


def test_a_forward_whose_loss_is_outside():
    """A plain call of the model gives logits whole, also under a strategy that trains in chunks."""
    graph = lower_forward(case("llama").graph, "dp1+chunks(2)")
    assert any("chunks(...) has no effect here" in note for note in graph.notes)
    assert not any("chunk" in node.meta for part in graph.parts.values() for node in part.graph.nodes)


def test_a_rule_for_another_module():
    with pytest.raises(ChunkedRuleError, match=r"rule 'layers.0: \+chunks\(2\)' wants chunks.*in module 'head'"):
        lower(llama().graph, "dp1[layers.0: +chunks(2)]")
    same = lower(llama().graph, "dp1+chunks(2)[head: +chunks(1)]")
    assert largest_over(same, 97, 24) == 2 * 24 * 97


def test_a_fixed_number_of_tokens():
    graph = fixed()
    words = r"12 tokens per rank, which do not divide by chunks\(5\). Write chunks\(4\)"
    with pytest.raises(ChunkedTokensError, match=words):
        lower(graph.graph, "dp1+chunks(5)")
    result = graph.check("dp1+chunks(4)", 1e-10)
    assert result.ok, result


@functools.cache
def fixed() -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 31))
    (batch,) = tokens(31, 12)
    batch = {key: batch[key] for key in ("input_ids", "labels")}
    return take(model, losses.causal_lm, [batch], dynamic=None)
