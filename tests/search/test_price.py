"""Prices of deep models from shallow ones, against the whole model lowered."""

from __future__ import annotations

import functools
from fractions import Fraction

import pytest
import torch
from torch import nn

from fxpar.cost.cluster import usual_cluster
from fxpar.cost.group import group_cost
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.search.price import Candidate, Depth, Memory, anchors_of, candidate, extrapolated
from fxpar.tracer import capture
from tests.repeat import thinned
from tests.search.shallow import shallow, stack_rows

LAYERS, STAGED_LAYERS = 4, 8
CLUSTER = usual_cluster(4)


@functools.cache
def lowered(strategy: Strategy, layers: int):
    return lower(stack_rows(layers), strategy, for_store=True)


def depth(text: str, whole: bool) -> Depth:
    """More than the shallow models have."""
    return Depth(STAGED_LAYERS if Strategy.parse(text).pipeline_size > 1 else LAYERS, whole=whole)


def priced(text: str, whole: bool) -> Candidate:
    return candidate(lowered, Strategy.parse(text), CLUSTER, depth(text, whole), (64, 512, 4096))


FLAT = ["dp4", "dp2.tp2+sp", "cp4", "dp4+zero3", "dp2.tp2+sp+remat", "dp4+remat+chunks(4)"]


@pytest.mark.parametrize("text", thinned(FLAT, ["dp4", "dp4+zero3", "dp2.tp2+sp+remat"]))
def test_two_shallow_models_say_what_a_deep_one_takes(text):
    """Exactly: each layer adds the same calls."""
    shallow, whole = priced(text, False), priced(text, True)
    assert shallow.samples == (2, 3)
    assert whole.samples == (LAYERS,)
    assert shallow.cost.per_token_s == pytest.approx(whole.cost.per_token_s, rel=1e-9)
    assert shallow.cost.per_square_s == pytest.approx(whole.cost.per_square_s, rel=1e-9)
    assert shallow.cost.fixed_s == pytest.approx(whole.cost.fixed_s, rel=1e-2)  # buckets of collectives
    assert whole.cost == group_cost(lowered(Strategy.parse(text), LAYERS), CLUSTER)
    assert [one.inside.c1 for one in shallow.sent] == [one.inside.c1 for one in whole.sent]
    few, all_ = shallow.memory(512), whole.memory(512)
    assert few.weight_bytes == pytest.approx(all_.weight_bytes, rel=1e-3)
    assert few.stays_bytes == pytest.approx(all_.stays_bytes, rel=1e-3)
    assert few.peak_bytes == pytest.approx(all_.peak_bytes, rel=0.03)


@pytest.mark.parametrize("text", thinned(["pp2.tp2+sp", "dp2.pp2", "pp4"], ["pp2.tp2+sp"]))
def test_stages_of_a_deep_model(text):
    """Layers go where they make the slowest stage least slow, which is how stages are cut."""
    shallow, whole = priced(text, False), priced(text, True)
    assert shallow.cost.per_token_s == pytest.approx(whole.cost.per_token_s, rel=0.02)
    assert shallow.memory(512).peak_bytes == pytest.approx(whole.memory(512).peak_bytes, rel=0.02)


DEEP = [(60, 4, 4 << 20), (1200, 4, 64 << 20), (1200, 2, 128 << 20)]


@pytest.mark.parametrize(("layers", "devices", "staging"), DEEP)
def test_messages_of_a_deep_model_are_capped(layers, devices, staging):
    """Two buckets, as the engine reserves for the weights of all layers; as much again for sums inside of nodes."""
    deep = candidate(lowered, Strategy.parse("dp4"), usual_cluster(4, devices), Depth(layers), (64, 512)).at(512)
    assert deep.weight_bytes > layers * (128 << 10)
    assert deep.staging_bytes == staging


def test_reductions_of_a_deep_model():
    for text in ("dp4", "dp2.tp2+sp"):
        assert priced(text, False).reduce_s == pytest.approx(priced(text, True).reduce_s, rel=0.05)
        few, whole = priced(text, False).reduced, priced(text, True).reduced
        assert few.intra_node == pytest.approx(whole.intra_node, rel=1e-9)


GROWING = ["pp2.tp2+sp+remat(selective|redo_comm)", "pp2.tp2+sp", "dp4+remat(selective)"]


@pytest.mark.parametrize("text", thinned(GROWING, GROWING[2:]))
def test_memory_grows_with_layers(text):
    """Also where logits fill another stage of the shallow models, and recomputation chooses otherwise in each."""

    def wide(strategy: Strategy, layers: int):
        return lower(stack_rows(layers, 4096), strategy, for_store=True)

    shallow, whole = (
        candidate(wide, Strategy.parse(text), CLUSTER, depth(text, whole), (64, 512)) for whole in (False, True)
    )
    for tokens in (64, 512):
        first = max(one.peak_bytes for one in shallow._of_program(shallow.programs[0], tokens))
        assert shallow.predicted(tokens).peak_bytes >= first
    assert shallow.predicted(512).peak_bytes == pytest.approx(whole.predicted(512).peak_bytes, rel=0.15)


def test_the_fullest_position_may_be_another_one_with_all_layers():
    """The last stage has the logits, and the first keeps more micro-batches; what shrinks is taken as it is."""
    one = Candidate(Strategy.parse("pp2"), CLUSTER, (64, 512), (2, 4), Fraction(10), ())
    steps = ((10, 50), (30, 45))
    one._samples[64] = [[Memory(0, 0, 0, step, 0, 0) for step in sample] for sample in steps]
    assert one.predicted(64).step_bytes == 10 + 10 * 20
    one._samples[512] = [[Memory(0, 0, 0, step, 0, 0) for step in sample] for sample in ((10, 50), (9, 45))]
    assert one.predicted(512).step_bytes == 50


@pytest.mark.parametrize("room_share", [1.0, 1.5, 3.7, 100.0])
def test_the_most_tokens_fit_and_more_do_not(room_share):
    one = priced("dp2.tp2+sp", True)
    least = one.memory(64).beside_bytes
    room = int(least * room_share)
    tokens = one.most_tokens(64, room, 4096)
    assert tokens is not None
    assert one.memory(tokens).beside_bytes <= room
    assert tokens == 4096 or one.memory(tokens + 1).beside_bytes > room


@pytest.mark.parametrize("text", thinned(["dp4", "dp2.tp2+sp+remat", "pp2.tp2+sp"], ["dp2.tp2+sp+remat"]))
def test_between_its_anchors_memory_is_about_what_is_predicted(text):
    given = depth(text, True)
    one = candidate(shallow("llama", given.layers).lower, Strategy.parse(text), CLUSTER, given, (64, 512, 4096))
    for tokens in (64, 96, 256, 512, 1000, 3000):
        exact, guess = one.predicted(tokens), one.memory(tokens)
        assert exact.step_bytes * 0.99 <= guess.step_bytes <= exact.step_bytes * 1.1
        assert (guess.weight_bytes, guess.stays_bytes) == (exact.weight_bytes, exact.stays_bytes)


class WrittenOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)

    def forward(self, input_ids):
        x = self.table(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (q @ k.transpose(1, 2)).masked_fill(later, float("-inf")).softmax(-1) @ v


def test_attention_that_is_written_out_has_more_anchors():
    # It keeps matrices of tokens by tokens, of which a straight line over a wide gap says many times too much.
    ids = torch.zeros(1, 40, dtype=torch.long)
    graph = packed_if_proved(
        capture(WrittenOut(), lambda model, batch: model(batch["input_ids"]).sum(), {"input_ids": ids})
    )[0]
    strategy, whole = Strategy.parse("dp4"), Depth(1, whole=True)
    one = candidate(lambda strategy, _: lower(graph, strategy, for_store=True), strategy, CLUSTER, whole, (256, 4096))
    assert one.memory(640).step_bytes > 4 * one.predicted(640).step_bytes
    one.anchors = anchors_of(one)
    for tokens in (33, 100, 256, 640, 1500, 4096):
        exact = one.predicted(tokens).step_bytes
        assert exact * 0.99 <= one.memory(tokens).step_bytes <= exact * 1.06
    straight = priced("dp4", True)
    assert anchors_of(straight) == straight.anchors


def test_a_sequence_that_does_not_fit():
    one = priced("dp4", True)
    assert one.most_tokens(64, one.memory(64).beside_bytes - 1, 4096) is None


def test_samples_by_period_and_stages():
    assert Depth(80).samples(1) == (2, 3)
    assert Depth(80).samples(4) == (8, 12)
    assert Depth(60, period=6).samples(2) == (24, 36)
    assert Depth(4).samples(2) == (4,)
    assert Depth(9, whole=True).samples(1) == (9,)
    assert Depth(80).beyond((8, 12)) == 18
    assert extrapolated([3.0, 5.0], 4.0) == 11.0
