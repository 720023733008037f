"""No strategy with rules is planned faster than the bound on them, and the programs know nothing of it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU, GPU
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.strategy import Strategy
from fxpar.search.bounds import Intervals, least_mini_batch
from fxpar.search.ideal import COMPUTED, Kernels, ideal_seconds
from fxpar.search.known import KnownModel
from fxpar.search.price import Depth
from fxpar.search.pricing import SetPricer
from tests.search.shallow import shallow

LAYERS, LONGEST = 2, 512
BATCHES = ((512, 100, 90, 80, 60, 50, 40, 30), (300, 300, 200))
CACHED = replace(CPU, cache_mb=1.0, cache_gb_per_s=40.0)
LAYOUTS = ("cp4", "tp4+sp", "cp2.tp2+sp", "rows4", "rows2.tp2+sp")
UNIFORM = ("dp4", "dp4+zero3+remat", "cp4", "tp4+sp", "dp2.pp2")
RULED = (
    "dp4[layers.1: +zero3; head: +chunks(2)]",
    "tp4+sp[*.attention: rows4; *.ffn: cp4]",
    "tp4+sp[*.attention: cp2.tp2+sp; {embedding,head}: cp4]",
    "dp1+cut(layers.1) > cp3",
)


lower = functools.cache(shallow("stack", LAYERS).lower)  # once for both devices


@functools.cache
def known(device: str) -> KnownModel:
    model = shallow("stack", LAYERS)
    cluster = ClusterSpec(1, 4, 100.0, 100.0, 0.0, device={"cached": CACHED, "gpu": GPU}[device])
    return KnownModel(lower, model.outlines, cluster, Depth(LAYERS), (256, 4096))


def priced(device: str, text: str):
    found = known(device).candidate(Strategy.parse(text), lambda _: None)
    assert found is not None, (text, known(device).refused)
    return found


def bound(device: str, text: str) -> float:
    """Of sets of one strategy with as many replicas and stages."""
    kernels, found = Kernels.of(priced(device, "dp4")), Intervals((LONGEST,), BATCHES)
    return least_mini_batch(ideal_seconds(kernels, [priced(device, text)], found, max(map(sum, BATCHES))), 1)


def planned_s(device: str, text: str) -> float:
    model = known(device)
    pricer = SetPricer(model.cluster, model.depth, model.outlines, BATCHES, None)
    found = pricer.price([(LONGEST, priced(device, text))])
    assert found is not None
    return found.predicted_s - found.exposed_s


@pytest.mark.parametrize("device", ["cached", "gpu"])
@pytest.mark.parametrize("text", [*UNIFORM, *RULED])
def test_none_is_planned_faster(device, text):
    assert bound(device, text) <= planned_s(device, text) * (1 + 1e-9)


@pytest.mark.nightly
def test_no_choice_of_roles_is_planned_faster():
    """Every layout of each position: brute force."""
    for attention, ffn, ends in itertools.product(LAYOUTS, repeat=3):
        text = f"tp4+sp[*.attention: {attention}; *.ffn: {ffn}; {{embedding,head}}: {ends}]"
        for device in ("cached", "gpu"):
            assert bound(device, text) <= planned_s(device, text) * (1 + 1e-9), text


@pytest.mark.parametrize("text", ["dp4", "dp4+zero3+remat", "cp4", "tp4+sp", RULED[1]])
def test_no_rank_computes_less(text):
    """Where tensors lie in a cache that is as fast as all memory, term by term."""
    one = priced("gpu", text)
    (program,) = one.programs
    ranks = 4 // one.strategy.replicas
    least = Kernels.of(priced("gpu", "dp4")).cost(4, one.strategy.replicas, 1, 1.0)
    calls = [call.seconds for call in node_costs(program, one.cluster) if call.kind in COMPUTED]
    took = [float(sum(getattr(call, name) for call in calls)) for name in ("c0", "c1", "c2")]
    assert ranks in (1, 4)
    assert np.all(np.array([least.fixed_s, least.per_token_s, least.per_square_s]) <= np.array(took) * (1 + 1e-9))


def test_it_is_met_where_nothing_is_sent():
    """Equal sequences on replicas of one rank, and no cache: only gradients go home."""
    kernels, found = Kernels.of(priced("gpu", "dp4")), Intervals((LONGEST,), ((256,) * 4,))
    least = ideal_seconds(kernels, [priced("gpu", "dp4")], found, 1024)[0, 0, 0]
    assert least == pytest.approx(priced("gpu", "dp4").group_cost.seconds([256]), rel=0.02)


def test_what_cannot_be_lowered_bounds_nothing():
    found = Intervals((LONGEST,), BATCHES)
    assert ideal_seconds(Kernels.of(None), [priced("gpu", "dp4")], found, 2048).max() == 0.0


def test_stages_share_launches():
    """A rank of a pipeline launches the kernels of its own stage, which may be few."""
    kernels = Kernels(Fraction(8), Polynomial(Fraction(4), Fraction(2)))
    costs = [kernels.cost(8, 2, stages, 1.0) for stages in (1, 2)]
    assert [(one.fixed_s, one.per_token_s) for one in costs] == [(8.5, 0.5), (2.5, 0.5)]
