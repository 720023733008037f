"""Weights and gradients travel beside the groups: the same bits as one after the other, whatever comes in between."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.models import load
from fxpar.runtime.forked import run_forked
from fxpar.schedule import mini_batch as schedule
from tests.runtime.delays import LIMIT, drawn, error_of
from tests.runtime.hot import World, parallel, precompile, sequences, shallow

ORDER = ["dp2.tp2+sp", "dp4", "cp2.tp2"]
# On two of four ranks a quarter lies outside of the half that the rank holds, so the two take more than one.
TAKING_TURNS = {16: "dp2.tp2", 512: "tp4"}
DENSE = {16: "dp4", 64: "dp2.tp2", 512: "tp4"}
ZERO = {16: "dp4+zero3", 64: "dp4+zero2", 512: "dp2.tp2+zero1"}
ALONE = {512: "dp4"}
SLOW_NETWORK = ClusterSpec(2, 2, intra_gb_per_s=200, inter_gb_per_s=0.1, latency_us=0)


def dropping() -> nn.Module:
    return load("gpt", dtype=torch.float64, seed=1, options={"layers": "1", "dropout": "0.1", "positions": "512"}).model


class Normed(nn.Module):
    """A token model with buffers that a training step replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.norm, self.head = nn.Embedding(131, 16), nn.BatchNorm1d(16), nn.Linear(16, 131)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))


def normed() -> nn.Module:
    return Normed().double()


CASES = {
    "taking turns": (
        shallow,
        {"strategies": TAKING_TURNS, "order": list(TAKING_TURNS.values()), "resident": []},
    ),
    "buffers": (normed, {"strategies": DENSE, "order": list(DENSE.values())}),
    "one strategy": (shallow, {"strategies": ALONE, "order": None, "cluster": SLOW_NETWORK}),
}
NIGHTLY = {
    "chain": (shallow, {"gradients": "chain"}),
    "through nodes": (shallow, {"cluster": SLOW_NETWORK}),
    "dropout, arena": (dropping, {"resident": []}),
    "one strategy, ZeRO": (shallow, {"strategies": {512: "dp4+zero2"}, "order": None, "cluster": SLOW_NETWORK}),
    "idle replicas": (shallow, {"strategies": ZERO, "order": list(ZERO.values())}),
}
LENGTHS = (5, 60, 130, 8, 33)  # a single token has no variance


def prepare() -> None:
    for make, strategies in (
        (shallow, None),
        (dropping, None),
        (normed, DENSE),
        (shallow, TAKING_TURNS),
        (shallow, ZERO),
        (shallow, ALONE),
    ):
        precompile(make, strategies)


WORLD = World(4, prepare)


def delayed(owner, name, delays):
    method = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(delays.choice((0, 0, 0.002, 0.02)))
        return method(*args, **kwargs)

    setattr(owner, name, slow)


def unchanged(bound):
    """What a run has handed over stays as it is until the run ends."""
    run_all = bound.run_all

    def watched(micro_batches, spans, made):
        left = []

        def seen(gradients):
            left.extend((gradient, gradient.clone()) for gradient in gradients.values())
            made(gradients)

        run_all(micro_batches, spans, seen)
        assert len(left) >= len(bound.program.params())
        assert all(torch.equal(gradient, copy) for gradient, copy in left)

    bound.run_all = watched


def opened(make, overlap, rank, **options):
    """A session whose ranks and streams drift apart, and that moves what it moves in several buckets."""
    schedule.BUCKET_BYTES = 1 << 12  # of this forked rank
    model = parallel(make, **{"order": ORDER, "overlap": overlap, **options})
    engine, delays = model._session().engine, random.Random(rank)
    assert engine.options.overlap == overlap
    assert engine._borders.flowing == (set(engine.bound) if engine.gradients.mode == "home" else set())
    if overlap:
        delayed(engine.switching, "to", delays)
        delayed(engine.gradients, "add", delays)
        for bound in engine.bound.values():
            unchanged(bound)
            delayed(bound, "run_all", delays)
    return model


def left(model):
    """What a step leaves on this rank."""
    grads = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    return grads, {name: buffer.clone() for name, buffer in model.named_buffers()}


def trained(rank, name, between=False):
    """Blocking, and overlapped. `between`: others use the weights after each step."""
    make, options = {**CASES, **NIGHTLY}[name]
    found = []
    for overlap in (False, True):
        model, seen = opened(make, overlap, rank, **options), []
        for seed in range(2):
            seen.append((model.train_step(sequences(seed, LENGTHS)).loss, *left(model)))
            if between:
                held_out = model.evaluate(sequences(seed + 5, LENGTHS))
                logits = model(torch.arange(12)[None], torch.arange(12)[None])
                logits.square().mean().backward()
                seen.append((held_out, *left(model)))
            model.zero_grad()
        found.append(seen)
    return found


@WORLD.case
def every_run(rank):
    return {name: trained(rank, name) for name in CASES}


def assert_same_bits(found, want):
    assert len(found) == len(want)
    for (loss, *tensors), (other_loss, *others) in zip(found, want, strict=True):
        assert loss == other_loss
        for one, other in zip(tensors, others, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_bits():
    for found in every_run():
        for blocking, overlapping in found.values():
            assert_same_bits(overlapping, blocking)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*CASES, *NIGHTLY])
def test_the_same_bits_with_plain_calls_and_evaluation_between_the_steps(name):
    prepare()
    for blocking, overlapping in run_forked(4, lambda rank: trained(rank, name, between=True), timeout_s=300):
        assert_same_bits(overlapping, blocking)


FAULTS = [("none", 1), ("to", 2), ("add", 1), ("run_all", 2), ("backward", 1)]


class Fault(Exception):
    pass


def failing_once(owner, name, turn):
    """Call number `turn` of a method raises."""
    method, calls = getattr(owner, name), []

    def fails(*args, **kwargs):
        calls.append(None)
        if len(calls) == turn:
            raise Fault(f"{name} {turn}")
        return method(*args, **kwargs)

    setattr(owner, name, fails)


def failing_backward(bound):
    """The first run raises in its backward, when some gradients have left."""
    run_all, runs = bound.run_all, []

    def fails(micro_batches, spans, made):
        left = []

        def some(gradients):
            left.extend(gradients)
            if len(left) == 4:
                raise Fault("backward")
            made(gradients)

        runs.append(None)
        run_all(micro_batches, spans, some if len(runs) == 1 else made)

    bound.run_all = fails


@WORLD.case
def faults(rank):
    """Errors that all ranks raise and the script catches: in each stream, in the first step and in a later one."""
    found, last = {}, ORDER[-1]
    for where, turn in FAULTS:
        model = opened(shallow, True, rank)
        engine, seen = model._session().engine, []
        if where == "run_all":
            failing_once(engine.bound[last], where, turn)
        elif where == "backward":
            failing_backward(engine.bound[last])
        elif where != "none":
            owner = engine.switching if where == "to" else engine.gradients
            failing_once(owner, where, 3 * turn - 1)  # of three in a step: the second one
        for seed in range(2):
            try:
                report = model.train_step(sequences(seed, LENGTHS))
            except Fault:
                assert seed == turn - 1
                assert not [t for t in threading.enumerate() if t.name == "fxpar transfers"]
                model.zero_grad(set_to_none=False)
                report = model.train_step(sequences(seed, LENGTHS))
            seen.append((report.loss, *left(model)))
            model.zero_grad(set_to_none=False)
        found[where, turn] = seen
    return found


def test_a_step_after_an_error_of_all_ranks_is_like_any_other():
    for found in faults():
        for seen in found.values():
            assert_same_bits(seen, found["none", 1])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_nothing(seed):
    """`python -m tests.runtime.delays 20` runs more and longer ones."""
    assert error_of(drawn(seed), steps=4) <= LIMIT
