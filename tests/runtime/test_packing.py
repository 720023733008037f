"""What shares a row in training, what runs alone, and under which strategy a length that cannot be padded runs."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar import losses
from fxpar.errors import LengthMultipleError, LimitBranchError, ModelLengthError, ParallelizeError, muted_warnings
from tests.runtime.hot import World, largest_error, sequences

VOCAB, DIM, LONGEST = 131, 8, 40
BATCH = sequences(3, (9, 30, 5, 17, 7, 2))


class Plain(nn.Module):
    """A language model that knows nothing of documents; `mix` puts a causal convolution over tokens in it."""

    def __init__(self, mix: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        self.kernel = nn.Parameter(torch.randn(DIM, 1, 3)) if mix else None
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        if self.kernel is not None:
            x = x + F.conv1d(F.pad(x.mT, (2, 0)), self.kernel, groups=DIM).mT
        q, k, v = (y.unflatten(-1, (2, DIM // 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


def make(mix: bool, strategies: dict[int, str], **options):
    words = {"loss": losses.causal_lm, "monitor": False, "merge": False, **options}
    return fxpar.parallelize(Plain(mix), strategies=strategies, **words)


def alone(mix: bool) -> dict[str, Tensor]:
    """Gradients by plain torch, sequence after sequence."""
    model, count = Plain(mix), sum(len(ids) - 1 for ids in BATCH)
    for ids in BATCH:
        row = {"input_ids": ids[None], "labels": losses.next_token_labels(ids[None])}
        (losses.causal_lm(model, row) / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradients(model) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


WORLD = World(2, lambda: None)


@WORLD.case
def packed(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = make(False, {8: "dp2", LONGEST: "cp2"})
    assert not said
    report = model.train_step(BATCH)
    assert report.packed
    with pytest.raises(ModelLengthError) as caught:
        model.train_step([torch.zeros(LONGEST + 1, dtype=torch.int64)])
    assert str(caught.value).startswith(
        "sequence 0 of the mini-batch has 41 tokens, but the model takes at most 40 tokens (it has no more positions "
        "in the table of 'positions'). Cut it"
    )
    return gradients(model), [(g.strategy, g.sequences, g.micro_batches) for g in report.groups], model.evaluate(BATCH)


def test_a_model_that_knows_nothing_of_documents_is_packed():
    grads, groups, loss = packed()[0]
    assert largest_error(grads, alone(False)) < 1e-10
    assert sorted(groups) == [("cp2", 3, 2), ("dp2", 3, 1)]
    assert abs(loss - packed()[1][2]) < 1e-12


@WORLD.case
def mixing(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = make(True, {32: "cp2", LONGEST: "dp2"})
    report = model.train_step(BATCH)
    assert not report.packed
    groups = [(g.strategy, g.sequences, g.micro_batches) for g in report.groups]
    with pytest.raises(ParallelizeError, match=r"not a multiple of 2 cannot run under cp2: .*length_multiple=2"):
        make(True, {8: "dp2", LONGEST: "cp2"}, packed=False)
    promised = make(True, {8: "dp2", LONGEST: "cp2"}, packed=False, length_multiple=2)
    with pytest.raises(LengthMultipleError, match=r"sequence 1 .* 9 tokens, .* multiple of .* 2 up to 40 tokens"):
        promised.train_step([torch.zeros(4, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)])
    return gradients(model), groups, [str(w.message) for w in said if "alone" in str(w.message)]


def test_a_model_that_mixes_tokens_runs_each_sequence_alone():
    """Even lengths under cp2, odd ones under the next strategy that does not cut tokens."""
    (grads, groups, said), (_, _, nothing) = mixing()
    assert not nothing
    assert re.fullmatch(
        r"Plain: each sequence runs alone, since aten.* at .*test_packing.py:\d+ mixes.*", "".join(said)
    )
    assert largest_error(grads, alone(True)) < 1e-10
    assert sorted(groups) == [("cp2", 2, 2), ("dp2", 4, 2)]


@WORLD.case
def beyond(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make(False, {8: "dp2", LONGEST: "tp2", LONGEST + 1: "cp2", 128: "dp2"})
    return [str(w.message) for w in said]


def test_limits_beyond_the_positions_of_the_model_are_named():
    (said,), nothing = beyond()
    assert not nothing
    assert said == (
        "strategies: 41 (cp2), 128 (dp2) promises more than can run, as the model takes at most 40 tokens (it has no "
        "more positions in the table of 'positions'). A longer sequence is an error in train_step; write 40 as the "
        "last limit"
    )


class Branching(Plain):
    """Another computation for more than 16 tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (2 if input_ids.shape[1] > 16 else 1)


EXAMPLE = {"input_ids": torch.zeros(1, 13, dtype=torch.int64), "labels": torch.zeros(1, 13, dtype=torch.int64)}


@WORLD.case
def on_both_sides(rank):
    said = []
    for strategies, example in (({8: "dp2", LONGEST: "cp2"}, None), ({16: "dp2", 17: "cp2"}, EXAMPLE)):
        with pytest.raises(LimitBranchError) as caught, muted_warnings():
            fxpar.parallelize(Branching(), strategies=strategies, example=example, loss=losses.causal_lm, monitor=False)
        said.append(str(caught.value))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fxpar.parallelize(Branching(), strategies={LONGEST: "dp2"}, loss=losses.causal_lm, monitor=False)
    return said, [str(w.message) for w in warned]


def test_limits_on_the_other_side_of_a_branch_are_refused():
    """The range that works, and the line of the `if`; a limit above the branch may be meant for long ones alone."""
    (((long, short), warned), (_, nothing)) = on_both_sides()
    at = r"its code branches on the length at \S*test_packing\.py:\d+\)"
    assert re.match(r"strategies has the limit 8 \(dp2\), but captured with 40 tokens .* at least 17 and", long)
    assert re.match(
        rf"strategies has the limit 17 \(cp2\), .* 13 tokens the model takes at most 16 tokens \({at}", short
    )
    assert any(re.match(r"sequences of fewer than 17 tokens are an error in train_step", text) for text in warned)
    assert not nothing


@WORLD.case
def without_tokens(rank):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()
    example = {"input": torch.randn(3, 6).double(), "y": torch.randn(3, 4).double()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = fxpar.parallelize(
            model,
            strategies={1: "dp2", 2: "pp2+cut(2)"},
            loss=lambda model, batch: losses.mse_sum(model(batch["input"]), batch["y"]),
            example=example,
            monitor=False,
        )
    with made.using("dp2"):
        made(example["input"]).sum().backward()
    return [str(w.message) for w in warned]


def test_stages_of_a_model_without_tokens_are_told_of_at_once():
    said, nothing = without_tokens()
    assert said[1:] == [
        "Sequential: plain calls do not run under pp2+cut(2), and train_step does not take its batch. Give it "
        "strategies without pp"
    ]
    assert "train it by plain calls" in said[0]
    assert not nothing


@WORLD.case
def forced(rank):
    model = make(True, {LONGEST: "dp2"}, packed=True)
    model.train_step(BATCH)
    return gradients(model)


def test_packing_without_a_proof_is_wrong_where_tokens_mix():
    assert largest_error(forced()[0], alone(True)) > 1e-3
