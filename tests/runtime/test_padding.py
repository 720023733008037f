"""Padding a batch: to the end, or that of each bin, as a document of its own, without a trace in loss or gradients."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpar import losses
from fxpar.errors import PadError
from fxpar.ir.graph import Dim, Input, TensorMeta, dim_symbol
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from fxpar.runtime.padding import batch_dims, pad, pad_batch
from tests.captured import Captured, llama, take, tokens
from tests.repeat import crossed, thinned

T, C = dim_symbol("T"), dim_symbol("C")
DIMS = (Dim("T", 8, maximum=64), Dim("C", 3))


def inputs(**shapes: tuple) -> tuple[Input, ...]:
    return tuple(Input("batch", key, TensorMeta(shape, torch.int64)) for key, shape in shapes.items())


def test_rules_by_key():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "labels": torch.tensor([[6, 7, -100]]),
        "position_ids": torch.tensor([[4, 5, 6]]),
        "document_ids": torch.tensor([[2, 2, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1]]),
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0]]),
        "idx": torch.tensor([[3, 1, 2]]),
        "weights": torch.tensor([[0.5, 2.0, 1.0]]),
        "targets": torch.tensor([[0.5, 2.0, 1.0]]),
    }
    padded = pad_batch(inputs(**dict.fromkeys(batch, (1, T))), DIMS, {"T": 4}, batch)
    assert {key: value[0, 3:].tolist() for key, value in padded.items()} == {
        "input_ids": [0],
        "labels": [-100],
        "position_ids": [0],
        "document_ids": [10],
        "attention_mask": [0],
        "loss_mask": [0.0],
        "idx": [0],
        "weights": [0.0],
        "targets": [0.0],
    }
    assert all(torch.equal(padded[key][:, :3], value) for key, value in batch.items())
    assert all(padded[key].dtype == value.dtype for key, value in batch.items())


def test_both_dims_of_a_mask():
    """A tensor that has the token dim twice is padded in both."""
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    padded = pad_batch(inputs(attention_mask=(2, 1, T, T)), DIMS, {"T": 4}, {"attention_mask": mask})["attention_mask"]
    assert padded.shape == (2, 1, 4, 4)
    assert padded.dtype == torch.bool
    assert padded[:, :, :3, :3].all()
    assert not padded[:, :, 3].any()
    assert not padded[..., 3].any()


def test_positions_restart_with_the_padding():
    padded = pad_batch(inputs(position_ids=(2, T)), DIMS, {"T": 8}, {"position_ids": torch.arange(5).expand(2, 5)})
    assert padded["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2


def test_each_row_gets_a_document_of_its_own():
    ids = torch.tensor([[0, 0, 1], [0, 3, 3]])
    padded = pad_batch(inputs(document_ids=(2, T)), DIMS, {"T": 5}, {"document_ids": ids})
    assert padded["document_ids"].tolist() == [[0, 0, 1, 2, 2], [0, 3, 3, 4, 4]]


def test_nothing_to_pad():
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    for divisors in ({"T": 4}, {"T": 1}, {}, {"C": 5}):
        assert pad_batch(inputs(input_ids=(1, T)), DIMS, divisors, batch)["input_ids"] is batch["input_ids"]


def test_what_the_graph_does_not_read_is_left_alone():
    batch = {"input_ids": torch.zeros(1, 7, dtype=torch.int64), "names": torch.zeros(3)}
    padded = pad_batch(inputs(input_ids=(1, T)), DIMS, {"T": 4}, batch)
    assert padded["names"] is batch["names"]
    assert batch["input_ids"].shape == (1, 7), "the given batch is not changed"


def test_sizes_of_a_batch():
    batch = {"x": torch.zeros(2, 7), "y": torch.zeros(5)}
    assert batch_dims(inputs(x=(2, T), y=(C,)), DIMS, batch) == {"T": 7, "C": 5}


def test_a_model_that_sees_padding_is_an_error():
    batch = {"pixels": torch.zeros(1, 7)}
    with pytest.raises(PadError, match="batch key 'pixels' cannot be padded: T=7 must be a multiple of 4; conv at x"):
        pad_batch(inputs(pixels=(1, T)), DIMS, {"T": 4}, batch, hazard="conv at x")


def test_padding_beyond_what_the_model_allows():
    batch = {"input_ids": torch.zeros(1, 63, dtype=torch.int64)}
    with pytest.raises(PadError, match="padding T=63 to 65 exceeds 64"):
        pad_batch(inputs(input_ids=(1, T)), DIMS, {"T": 5}, batch)
    assert pad_batch(inputs(input_ids=(1, T)), DIMS, {"T": 8}, batch)["input_ids"].shape == (1, 64)


@pytest.mark.parametrize(
    "strategy",
    thinned(["cp2", "cp4", "tp3+sp", "cp3.tp2+sp", "dp2.cp2.tp2+sp+zero3"], ["cp4", "tp3+sp", "dp2.cp2.tp2+sp+zero3"]),
)
def test_padded_tokens_leave_no_trace(strategy):
    captured = llama()
    lengths = [batch["input_ids"].shape[1] for batch in captured.batches]
    assert any(length % 4 and length % 6 for length in lengths)
    result = captured.check(strategy)
    assert result.ok, result


class Mixed(nn.Module):
    """Tokens see each other, padding included, unless somebody forbids it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.qkv, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (p.view(*x.shape[:2], 4, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        causal = self.how != "bidirectional"
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(x.shape)
        if self.how == "mean":
            y = y + y.mean(1, keepdim=True)
        if self.how == "softmax":
            y = y * y.softmax(1)
        if self.how == "total":
            y = y + y.sum(1, keepdim=True)
        if self.how == "scalar":
            y = y - y.mean()
        return self.head(y)


@functools.cache
def mixed(how: str) -> Captured:
    torch.manual_seed(0)
    return take(Mixed(how), losses.causal_lm, tokens(31, 8, 4, 12, rows=2))


@pytest.mark.parametrize(("how", "strategy"), crossed(["bidirectional", "mean", "total", "scalar"], ["cp2", "tp2+sp"]))
def test_a_model_that_would_see_padding_is_refused(how, strategy):
    """Lengths that divide are exact; one that needs padding is an error, not a wrong gradient."""
    even = mixed(how)
    result = even.check(strategy)
    assert result.ok, result
    odd = replace(even, batches=tuple(tokens(31, 8, 7, 12, rows=2))).check(strategy)
    assert odd.ok or odd.error, f"gradients are off by {odd.grad_max_rel_err} without a word"


def test_a_softmax_over_tokens_is_taken_to_be_masked():
    """As in attention that is written out. Where it is not, `check` finds it."""
    assert not replace(mixed("softmax"), batches=tuple(tokens(31, 7, rows=2))).check("cp2").ok


class Masked(nn.Module):
    """Attention with a dense mask [B, 1, T, T] out of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (p.view(*x.shape[:2], 4, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.head(y.transpose(1, 2).reshape(x.shape))


@functools.cache
def masked() -> Captured:
    torch.manual_seed(0)
    batches = []
    for batch in tokens(31, 8, 7, 12, rows=2):
        size = batch["input_ids"].shape[1]
        mask = torch.tril(torch.ones(size, size, dtype=torch.bool)).expand(2, 1, size, size).clone()
        batches.append({"input_ids": batch["input_ids"], "labels": batch["labels"], "attention_mask": mask})
    dynamic = {"input_ids": {1: "T"}, "labels": {1: "T"}, "attention_mask": {2: "T", 3: "T"}}
    return take(Masked(), losses.causal_lm, batches, dynamic=dynamic)


@pytest.mark.parametrize("strategy", thinned(["tp2", "tp2+sp", "cp2", "cp2.tp2+sp"], ["tp2", "cp2.tp2+sp"]))
def test_dense_masks_are_padded_and_exact(strategy):
    result = masked().check(strategy)
    assert result.ok, result


@functools.cache
def of_rows(strategy: str) -> TrainGraph:
    return lower(pack_documents(llama().graph), strategy)


def documents(*lengths: int) -> dict[str, Tensor]:
    """A row whose tokens all differ, with the marks of its documents."""
    marks = torch.repeat_interleave(torch.arange(len(lengths)) * 7 + 3, torch.tensor(lengths))[None]
    ids = torch.arange(1, sum(lengths) + 1)[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": ids,
        "labels": ids + 1000,
        "position_ids": positions,
        "document_ids": marks,
        "document_positions": positions,
    }


@given(
    st.sampled_from(["rows2", "rows4", "rows2.cp2", "tp4+sp[*.attention: rows2.tp2]"]),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_a_row_of_rows(strategy, lengths):
    """Each document whole in one bin, with all that belongs to its tokens; bins of one length, which every part of the
    strategy divides; and padding that is a document of its own in each.
    """
    program, row = of_rows(strategy), documents(*lengths)
    found = {key: value[0] for key, value in pad(program, row).items()}
    bins = found["document_ids"].view(program.bins, -1)
    assert bins.numel() % program.strategy.token_parts == 0
    assert len({id for part in bins for id in part.tolist()}) == sum(len(set(part.tolist())) for part in bins)
    real = found["input_ids"] != 0
    assert sorted(found["input_ids"][real].tolist()) == row["input_ids"][0].tolist()
    places = found["input_ids"][real] - 1
    assert all(torch.equal(found[key][real], row[key][0, places]) for key in row)
    assert not set(found["document_ids"][~real].tolist()) & set(row["document_ids"][0].tolist())
    assert set(found["labels"][~real].tolist()) <= {-100}
    assert int(found["position_ids"].max()) < max(lengths)  # a table of positions has no more rows
    for mark in set(found["document_ids"][real].tolist()):
        place = (found["document_ids"] == mark).nonzero().flatten()
        assert torch.equal(found["position_ids"][place], torch.arange(len(place)))
        assert torch.equal(place, torch.arange(len(place)) + place[0])
    fewest = max(max(lengths), -(-sum(lengths) // program.bins))  # longest first is 4/3 of the best at most
    assert bins.shape[1] < fewest * 4 / 3 + program.strategy.token_parts


def test_bins_that_are_given():
    """The planner says how many tokens each has; they follow each other in the row."""
    padded = pad(of_rows("rows2"), documents(2, 3, 1), [2, 4])
    assert padded["input_ids"][0].tolist() == [1, 2, 0, 0, 3, 4, 5, 6]
    assert padded["document_ids"][0].tolist() == [3, 3, 18, 18, 10, 10, 10, 17]
    assert padded["position_ids"][0].tolist() == [0, 1, 0, 1, 0, 1, 2, 0]
    padded = pad(of_rows("rows2"), documents(2, 2, 1), [4, 1])
    assert padded["position_ids"][0].tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    padded = pad(of_rows("rows4"), documents(2, 3), [2, 0, 3, 0])
    assert padded["input_ids"][0].tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5, 0, 0, 0]
    assert padded["document_ids"][0].tolist() == [3, 3, 11, 12, 12, 12, 10, 10, 10, 14, 14, 14]


@given(st.sampled_from(["ring2", "ring4", "cp2.ring2"]), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_a_row_over_a_ring(strategy, lengths):
    """All that belongs to a token goes with it, and nothing is lost."""
    program, row = of_rows(strategy), documents(*lengths)
    found = {key: value[0] for key, value in pad(program, row).items()}
    real = found["input_ids"] != 0
    assert sorted(found["input_ids"][real].tolist()) == row["input_ids"][0].tolist()
    places = found["input_ids"][real] - 1
    assert all(torch.equal(found[key][real], row[key][0, places]) for key in row)
    assert not set(found["document_ids"][~real].tolist()) & set(row["document_ids"][0].tolist())
    assert set(found["labels"][~real].tolist()) <= {-100}


def test_a_long_document_is_cut_in_zigzag():
    found = pad(of_rows("ring4"), documents(16))["document_positions"][0].view(4, 4)
    assert found.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_tokens_stay_where_the_model_goes_by_their_places():
    """Attention that is not over the ring sees keys by their places in the row; so does a graph that is not packed."""
    whole = [
        lower(pack_documents(llama(layers=2).graph), "cp4[layers.0.attention: ring4]"),
        lower(llama().graph, "ring4"),
    ]
    assert [program.spread for program in whole] == [1, 1]
    why = ["some attention is not over the ring", "its rows are one sequence each"]
    assert [program.notes[-1].partition(": ")[2] for program in whole] == why
    stages = [lower(pack_documents(llama(layers=2).graph), text) for text in ("pp2.ring2", "ring2 > tp2")]
    assert [program.spread for program in stages] == [2, 1]
