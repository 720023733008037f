"""Equality of every strategy with a single device, end to end: capture, annotate, lower, run all ranks, compare."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import capture
from fxpar.batching.documents import cut_in_documents
from fxpar.checking import CheckResult, assign, check, relative_error
from fxpar.errors import CheckedLengthError
from fxpar.ir.graph import Input, TensorMeta, dim_symbol
from fxpar.ir.strategy import Strategy
from fxpar.models import load
from fxpar.runtime.micro import as_one_sequence
from tests.captured import Captured, fused, gpt, llama, mlp, odd, tokens
from tests.repeat import crossed, thinned

# All with unequal lengths, five micro-batches, and so unequal numbers of them on 2, 3 and 4 replicas.
STRATEGIES = [
    "dp2",
    "dp3",
    "tp2",
    "tp3",
    "tp4",
    "tp2+sp",
    "tp3+sp",
    "cp2",
    "cp3",
    "cp4",
    "dp2.tp2",
    "tp2.dp2",
    "dp2.cp2",
    "cp2.tp2+sp",
    "tp2.cp2+sp",
    "dp4+zero1",
    "dp4+zero2",
    "dp4+zero3",
    "dp2.tp2+sp+zero3",
    "dp2.cp2+zero3",
    "dp2.tp3+zero2",
]
EVERY_RUN = ["tp3+sp", "cp3", "cp2.tp2+sp", "dp4+zero1", "dp2.cp2+zero3"]
FEW = ["dp3", "tp2", "tp3", "tp2+sp", "cp2", "dp2.cp2+zero1", "dp2.tp2+sp+zero3"]


def assert_exact(result: CheckResult) -> None:
    assert result.ok, result
    assert result.loss_rel_err <= 1e-10
    assert result.grad_max_rel_err <= 1e-10


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, EVERY_RUN))
def test_llama(strategy):
    assert_exact(llama().check(strategy))


@pytest.mark.parametrize("strategy", thinned([*FEW, "cp4", "cp2.tp2+sp", "dp2.tp3+zero2"], ["dp2.tp3+zero2"]))
def test_gpt_with_dropout(strategy):
    """Fused q, k, v, LayerNorm, biases, tied head, and the same dropout masks on any mesh."""
    assert_exact(gpt().check(strategy))


@pytest.mark.parametrize(
    ("strategy", "kv_heads"),
    thinned(itertools.product(["tp2", "tp4", "tp2+sp", "cp2", "dp2.cp2+zero1"], [1, 4]), [("tp2+sp", 1)]),
)
def test_key_value_heads(kv_heads, strategy):
    assert_exact(llama(kv_heads=kv_heads, layers=1).check(strategy))


@pytest.mark.parametrize("strategy", thinned(["tp3", "tp2+sp", "cp2", "dp2.tp2+sp+zero3"], ["dp2.tp2+sp+zero3"]))
def test_tied_embeddings(strategy):
    assert_exact(llama(tied=True).check(strategy))


@pytest.mark.parametrize(
    ("strategy", "name"),
    crossed(
        ["dp3", "tp2", "tp3", "cp2", "dp2.tp3", "dp4+zero3", "dp2.cp2+zero2"], ["norms", "counter", "shared", "sizes"]
    ),
)
def test_odd_modules(name, strategy):
    """BatchNorm, a buffer that the next forward reads, frozen and unused parameters, gradients that share memory, tiny
    parameters.
    """
    assert_exact(odd(name).check(strategy))


@pytest.mark.parametrize(
    ("strategy", "name"),
    crossed(["dp3", "tp2", "tp3", "tp2+sp", "cp2", "dp2.tp2+sp+zero3"], ["adapted", "experts", "routed"]),
)
def test_odd_models_on_tokens(name, strategy):
    """Frozen weights with adapters in recomputed blocks; a batch of expert products; tokens routed to experts."""
    assert_exact(odd(name).check(strategy))


MIXTURES = [
    *itertools.product(
        ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe"], ["tp2+sp", "cp2", "pp2", "dp2.tp2+zero3+remat"]
    )
]


@pytest.mark.parametrize(("name", "strategy"), thinned(MIXTURES, [("deepseek_v3", "dp2.tp2+zero3+remat")]))
def test_mixtures_of_experts(name, strategy):
    pytest.importorskip("transformers")
    model = load(f"hf:{name}", dtype="float64", tokens=(31, 22))
    graph = capture(model.model, model.loss_fn, model.example_batch)
    (result,) = check(graph, [strategy], model.params(), model.buffers(), model.batches, scale=model.scale())
    assert_exact(result)


ORDERS = ["tp2.dp2", "cp3.tp2", "dp2.cp2.tp2+sp+zero3"]
IN_PLACES = [
    "dp2.cp2.dp2+zero3",
    "dp2.cp2.dp2+zero2",
    "tp2.dp2.tp2+sp+zero1",
    "cp2.tp2.cp2+sp",
    "ring2.dp2.ring2",
]


@pytest.mark.parametrize("strategy", thinned([*ORDERS, *IN_PLACES], ["cp3.tp2", "dp2.cp2.dp2+zero3"]))
def test_rank_orders_and_three_axes(strategy):
    assert_exact(fused("split", 6, 3).check(strategy))
    assert_exact(mlp("sigmoid").check(strategy))


@pytest.mark.parametrize("strategy", thinned(["dp2", "tp2", "cp2.tp2+sp", "dp2.tp2+zero3"], ["cp2.tp2+sp"]))
def test_single_precision(strategy):
    result = llama(dtype=torch.float32).check(strategy)
    assert result.ok, result
    assert result.grad_max_rel_err <= 1e-5


def test_one_micro_batch_for_many_replicas():
    """Replicas without a micro-batch of their own get one that is used twice."""
    captured = llama()
    alone = Captured(captured.graph, captured.params, captured.buffers, captured.batches[:1])
    assert_exact(alone.check("dp4+zero2"))


def test_scale_multiplies_loss_and_gradients():
    captured = llama(layers=1)
    (result,) = check(captured.graph, ["tp2"], captured.params, captured.buffers, captured.batches, scale=1e-3)
    assert_exact(result)


def test_shortest_and_longest_lengths():
    """One token; a length that is a multiple of everything; one that is far from the example's."""
    torch.manual_seed(0)
    rows, inputs = tokens(97, 6, 1, 12, 97, rows=2), llama().graph.inputs
    captured = replace(llama(), batches=tuple(as_one_sequence(inputs, row, i) for i, row in enumerate(rows)))
    for strategy in ("tp2+sp", "cp4"):
        assert_exact(captured.check(strategy))


# ------------------------------------------------------------------------------------------------ check itself
@pytest.mark.parametrize(
    ("strategy", "count", "plan"),
    [
        ("dp2", 5, [[0, 2, 4], [1, 3]]),
        ("tp4", 3, [[0, 1, 2]]),
        ("dp4.tp2", 2, [[0], [1], [2], [3]]),
        ("tp2.dp3", 3, [[0], [1], [2]]),
    ],
)
def test_micro_batches_are_dealt_out(strategy, count, plan):
    assert assign(Strategy.parse(strategy), count) == plan


def test_relative_error():
    truth = torch.tensor([1.0, -4.0])
    assert relative_error(truth + 0.4, truth) == pytest.approx(0.1)
    assert relative_error(truth[:1], truth) == float("inf")
    assert relative_error(truth * float("nan"), truth) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) > 0


def test_a_wrong_program_is_found(monkeypatch):
    """A gradient that is off by one part in a million on one rank."""
    import fxpar.checking.driver as module

    original = module.run_world

    def tampered(*args, **kwargs):
        ranks = original(*args, **kwargs)
        ranks[1]["grads"]["norm.weight"] *= 1 + 1e-6
        return ranks

    monkeypatch.setattr(module, "run_world", tampered)
    result = llama(layers=1).check("tp2")
    assert not result.ok
    assert result.worst_param == "norm.weight"
    assert 0.9e-6 < result.grad_max_rel_err < 1.1e-6


def test_a_wrong_loss_is_found(monkeypatch):
    import fxpar.checking.driver as module

    original = module.run_world

    def tampered(*args, **kwargs):
        ranks = original(*args, **kwargs)
        ranks[-1]["loss"] = ranks[-1]["loss"] * 1.001
        return ranks

    monkeypatch.setattr(module, "run_world", tampered)
    result = llama(layers=1).check("dp2")
    assert not result.ok
    assert result.loss_rel_err == pytest.approx(1e-3)


def test_a_batch_that_cannot_be_padded_is_an_error_in_the_result():
    """x has no rule for its padding; the other strategies are still checked."""
    captured = mlp("relu")
    odd_rows = Captured(
        captured.graph, captured.params, captured.buffers, ({k: v[:5] for k, v in captured.batches[0].items()},)
    )
    results = check(odd_rows.graph, ["cp2", "tp2"], odd_rows.params, odd_rows.buffers, odd_rows.batches)
    assert [r.ok for r in results] == [False, True]
    assert "batch key 'x' cannot be padded: B=5 must be a multiple of 2" in results[0].error


class OwnSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, ids):
        x = self.table(ids)
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = (x @ x.mT).masked_fill(~past, float("-inf")).softmax(-1) @ x
        return x @ self.table.weight.mT


def test_what_stops_packing_is_said_where_it_is_what_stops_padding():
    """The softmax would be masked in a packed row; the loss, which nothing is known of, is what to change."""
    batch = {"input_ids": torch.arange(7)[None], "labels": torch.arange(1, 8)[None]}

    def loss(model, batch):
        wanted = F.one_hot(batch["labels"][0], 11).float()
        return F.binary_cross_entropy_with_logits(model(batch["input_ids"])[0], wanted, reduction="sum")

    model = OwnSoftmax()
    graph, values = capture(model, loss, batch), dict(model.named_parameters())
    (result,) = check(graph, ["cp2"], values, {}, [batch])
    assert re.search(
        r"aten\._softmax\.default .* \(and rows are not packed, since aten\.binary_cross_entropy_with_logits",
        result.error,
    )


def test_smoothed_and_weighted_losses_are_packed_and_not_padded():
    """Label smoothing and class weights are sums over tokens; what padding would add is not known."""

    def loss(model, batch):
        logits, weights = model(batch["input_ids"])[0], torch.arange(1.0, 12.0)
        return F.cross_entropy(logits, batch["labels"][0], weights, label_smoothing=0.1, reduction="sum")

    even, odd = ({"input_ids": torch.arange(n)[None], "labels": torch.arange(n)[None]} for n in (8, 7))
    even["labels"] = torch.tensor([[1, 2, -100, 4, 5, 6, -100, 0]])
    model = OwnSoftmax()
    graph, values = capture(model, loss, even), dict(model.named_parameters())
    (result,) = check(graph, ["cp2"], values, {}, [even])
    assert result.ok, result
    assert result.documents == "in rows"
    (refused,) = check(graph, ["cp2"], values, {}, [odd])
    assert "nll_loss_forward" in refused.error
    assert "padding included" in refused.error


def test_a_document_that_the_model_does_not_take():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 3)

        def forward(self, input_ids):
            return self.embed(input_ids)[:, 4:] + torch.zeros(1, input_ids.shape[1] - 4, 3)

    model, short = Late(), {"input_ids": torch.arange(3)[None]}
    graph = capture(model, lambda m, b: m(b["input_ids"]).sum(), {"input_ids": torch.arange(8)[None]})
    with pytest.raises(CheckedLengthError, match=r"a document of .* has 3 tokens, and the model takes at least"):
        check(graph, ["dp1"], dict(model.named_parameters()), {}, [short])


def test_results_are_plain_data():
    import json

    data = json.loads(json.dumps(llama(layers=1).check("tp2+sp").to_json()))
    assert data["strategy"] == "tp2+sp"
    assert data["ok"] is True
    assert data["world"] == 2
    assert data["collectives"]["reduce_scatter"] > 0


def test_what_prints_errors_is_left_as_it_was():
    """Each process group of torch puts its rank before what is printed."""
    hook, captured = sys.excepthook, llama()
    check(captured.graph, ["tp2"], captured.params, captured.buffers, captured.batches)
    assert sys.excepthook is hook


@pytest.mark.parametrize("length", [2, 3, 4, 12, 15, 16])
def test_an_unmarked_row_is_cut_where_no_rank_is(length):
    """Ranks with half a row each would keep its halves apart, whatever a rule says of the op."""
    row = {"input_ids": torch.zeros(1, length, dtype=torch.int64)}
    inputs = [Input("batch", "input_ids", TensorMeta((1, dim_symbol("T")), torch.int64))]
    first = int((cut_in_documents(inputs, row)["document_ids"] == 1).sum())
    assert 0 < first < length
    assert length < 4 or first not in {length * part // degree for degree in (2, 3) for part in (1, 2) if part < degree}
