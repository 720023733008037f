"""Programs of strategies that climb the ladder together are those of `lower`."""

from __future__ import annotations

import functools
import re

import pytest

from fxpar.errors import NoExpertsError, NothingToCompressError, NothingToOffloadError, RematGlobError
from fxpar.ir.strategy import Strategy
from fxpar.lowering import LowerAlike, default_passes, lower
from fxpar.models import load
from fxpar.passes.chunk_loss import ChunkLoss
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.tracer import capture

TEXTS = [
    "dp2.tp2+sp",
    "dp2.tp2+sp+remat(selective)",
    "dp2.tp2+sp+remat+chunks(2)",
    "dp4+zero3+remat",
    "dp4+zero3",
    "dp4+chunks(4)",
]
STAGED = [
    "pp2.tp2+sp",
    "pp2.tp2+sp+remat(selective|redo_comm)",
    "pp2.tp2+sp+zb_h1",
    "pp2.tp2+sp+remat+chunks(2)+zb_h1",
    "pp2.dp2+zero3+cut(layers.1)",
    "tp2+sp+cut(layers.1) > cp2+remat",
    "pp2+remat(layers.0)",
]


@functools.cache
def rows():
    model = load("llama", options={"layers": "2", "vocab": "131"}, device="meta")
    return packed_if_proved(capture(model.model, model.loss_fn, model.example_batch))[0]


@functools.cache
def alike() -> LowerAlike:
    return LowerAlike(rows(), default_passes(for_store=True))


@pytest.mark.parametrize("text", [*TEXTS, "ring4", *STAGED])
def test_equals_lower(text):
    strategy = Strategy.parse(text)
    assert alike()(strategy).fingerprint() == lower(rows(), strategy, for_store=True).fingerprint()


@pytest.mark.parametrize("text", ["dp2+remat(layers.9)", "pp2+remat(layers.0|layers.9)", "dp1+remat(layers.9) > tp2"])
def test_modules_of_no_stage_are_told_as_by_lower(text):
    strategy = Strategy.parse(text)
    with pytest.raises(RematGlobError) as told:
        lower(rows(), strategy, for_store=True)
    with pytest.raises(RematGlobError) as again:
        alike()(strategy)
    assert str(again.value) == str(told.value)


def test_the_first_passes_run_once_for_what_differs_in_recomputation_and_chunks():
    """And a program does not change with those lowered behind it."""
    runs = []

    class Counted:
        name, tier = "counted", "exact"

        def __call__(self, graph):
            runs.append(str(graph.strategy))

    passes = default_passes(for_store=True)
    place = [step.name for step in passes].index(ChunkLoss.name)
    mine = LowerAlike(rows(), [*passes[:place], Counted(), *passes[place:]])
    first = mine(Strategy.parse("dp2.tp2+sp"))
    before = first.fingerprint()
    for text in TEXTS[1:]:
        mine(Strategy.parse(text))
    assert first.fingerprint() == before
    assert runs == ["dp2.tp2+sp", "dp4+zero3", "dp4"]
    runs.clear()
    staged = [mine(Strategy.parse(text)) for text in STAGED[:4]]
    assert runs == ["tp2+sp"] * 2  # one for each stage
    assert [str(one.strategy) for one in staged] == STAGED[:4]
    assert staged[2].stages == staged[0].stages  # a schedule changes none


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ep4", NoExpertsError),
        ("cp4+capacity(1.5)", NothingToCompressError),
        ("cp4+lsh(0.5)", NothingToCompressError),
        ("dp4[head: +offload]", NothingToOffloadError),
    ],
)
def test_what_lower_refuses_is_refused(text, error):
    with pytest.raises(error, match=re.escape(text)):
        alike()(Strategy.parse(text))
