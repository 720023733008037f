"""Weights and gradients travel beside the groups: the same bits as one after the other, whatever comes in between."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import RankError
from fxpar.models import load
from fxpar.runtime.forked import run_forked
from fxpar.schedule import mini_batch as schedule
from tests.runtime.delays import LIMIT, drawn, error_of
from tests.runtime.hot import World, make_llama, parallel, precompile, sequences, shallow, small, stacked

ORDER = ["dp2.tp2+sp", "dp4", "cp2.tp2"]
# On two of four ranks a quarter lies outside of the half that the rank holds, so the two take more than one.
TAKING_TURNS = {16: "dp2.tp2", 512: "tp4"}
DENSE = {16: "dp4", 64: "dp2.tp2", 512: "tp4"}
PIPELINES = {16: "dp2.pp2+zb_h1", 64: "pp4", 512: "tp2.pp2+gpipe"}
STAGES_AND_CHUNKS = {16: "dp2.pp2+interleaved_1f1b(2)", 64: "pp4+zb_h1", 512: "tp2.pp2+gpipe"}
CHUNKS = {16: "dp2.pp2+interleaved_1f1b(2)", 64: "pp2.tp2+zb_h1", 512: "tp4"}
ZERO = {16: "dp4+zero3", 64: "dp4+zero2", 512: "dp2.tp2+zero1"}
ALONE = {512: "dp4"}
SLOW_NETWORK = ClusterSpec(2, 2, intra_gb_per_s=200, inter_gb_per_s=0.01, latency_us=0)


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


def tied() -> nn.Module:
    """What the embedding and the head share is on the first and the last stage."""
    return make_llama(layers="4", dim="16", heads="4", kv_heads="4", ffn="16", tied="true")


def returning() -> nn.Module:
    """Layers 0 and 2 share a weight: with two chunks a rank has it in both of its stages, and adds up its gradients."""
    model = tied()
    model.layers[2].attention.o_proj.weight = model.layers[0].attention.o_proj.weight
    return model


CASES = {
    "stages and chunks": (stacked, {"strategies": STAGES_AND_CHUNKS, "order": list(STAGES_AND_CHUNKS.values())}),
    "taking turns": (
        small,
        {"strategies": TAKING_TURNS, "order": list(TAKING_TURNS.values()), "resident": []},
    ),
    "buffers": (normed, {"strategies": DENSE, "order": list(DENSE.values())}),
    "one strategy": (small, {"strategies": ALONE, "order": None, "cluster": SLOW_NETWORK}),
}
NIGHTLY = {
    "stages": (tied, {"strategies": PIPELINES, "order": list(PIPELINES.values())}),
    # Those above in models with attention.
    "stages and chunks, llama": (
        returning,
        {"strategies": STAGES_AND_CHUNKS, "order": list(STAGES_AND_CHUNKS.values())},
    ),
    "taking turns, llama": (
        shallow,
        {"strategies": TAKING_TURNS, "order": list(TAKING_TURNS.values()), "resident": []},
    ),
    "one strategy, llama": (shallow, {"strategies": ALONE, "order": None, "cluster": SLOW_NETWORK}),
    "chunks": (returning, {"strategies": CHUNKS, "order": list(CHUNKS.values())}),
    "stages, arena, through nodes": (
        tied,
        {"strategies": PIPELINES, "order": list(PIPELINES.values())[::-1], "resident": [], "cluster": SLOW_NETWORK},
    ),
    "stages, chain": (tied, {"strategies": PIPELINES, "order": list(PIPELINES.values()), "gradients": "chain"}),
    "chain": (shallow, {"gradients": "chain"}),
    "through nodes": (shallow, {"cluster": SLOW_NETWORK}),
    "dropout, arena": (dropping, {"resident": []}),
    "one strategy, ZeRO": (shallow, {"strategies": {512: "dp4+zero2"}, "order": None, "cluster": SLOW_NETWORK}),
    "idle replicas": (shallow, {"strategies": ZERO, "order": list(ZERO.values())}),
}
LENGTHS = (5, 60, 130, 8, 33)  # a single token has no variance


def prepare() -> None:
    for make, options in CASES.values():
        precompile(make, options.get("strategies"))
    precompile(small)
    precompile(stacked, STAGES)


WORLD = World(4, prepare)


def delayed(owner, name, delays):
    method = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(delays.choice((0, 0, 0.002, 0.02)))
        return method(*args, **kwargs)

    setattr(owner, name, slow)


class Counted:
    """Channels that count what they send."""

    def __init__(self, channels):
        self.sent, self.receive, self._send = 0, channels.receive, channels.send

    def send(self, tensor, to):
        self.sent += 1
        return self._send(tensor, to)


def unchanged(bound):
    """What a run has handed over stays as it is until the run ends."""
    run_all = bound.run_all
    if hasattr(bound, "stages"):
        bound._channels = Counted(bound._channels)

    def watched(micro_batches, spans, made):
        left, names, messages = [], set(), []

        def seen(gradients):
            names.update(gradients)
            messages.append(bound._channels.sent if hasattr(bound, "stages") else 0)
            left.extend((gradient, gradient.clone()) for gradient in gradients.values())
            made(gradients)

        run_all(micro_batches, spans, seen)
        own = getattr(bound, "stages", {0: bound}).values()
        given = Counter(out.fqn for one in own for out in one.program.outputs if out.kind == "grad")
        assert {fqn for fqn, count in given.items() if count == 1} <= names
        assert len(set(messages)) == 1  # none is sent any more
        assert all(torch.equal(gradient, copy) for gradient, copy in left)

    bound.run_all = watched


def opened(make, overlap, rank, **options):
    """A session whose ranks and streams drift apart, and that moves what it moves in several buckets."""
    schedule.BUCKET_BYTES = 1 << 12  # of this forked rank
    model = parallel(make, **{"order": ORDER, "overlap": overlap, **options})
    engine, delays = model._session().engine, random.Random(rank)
    assert engine.options.overlap == overlap
    # What is added up waits for the end.
    late = {"dp2.pp2+interleaved_1f1b(2)"} if make in (returning, stacked) else set()
    assert set(engine.flowing()) == (set(engine.bound) - late if engine.gradients.mode == "home" else set())
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
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", [*CASES, *NIGHTLY])
def test_the_same_bits_of_more(name, between):
    """Also with plain calls and evaluation between the steps, where there is a strategy for plain calls: these do not
    run in stages."""
    if between and name.startswith("stages"):
        pytest.skip("no strategy without stages")
    make, options = {**CASES, **NIGHTLY}[name]
    precompile(make, options.get("strategies"))
    for blocking, overlapping in run_forked(4, lambda rank: trained(rank, name, between=between), timeout_s=300):
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
    model = opened(small, True, rank)
    return {(where, turn): steps_with_fault(model, where, turn, ORDER[-1]) for where, turn in FAULTS}


STAGES = {16: "dp2.pp2+zb_h1", 512: "tp2.pp2+gpipe"}


@WORLD.case
def faults_of_stages(rank):
    """Before a rank has sent or received anything, and when all gradients have been handed over."""
    order = list(STAGES.values())
    model = opened(stacked, True, rank, strategies=STAGES, order=order)
    return {(where, 1): steps_with_fault(model, where, 1, order[-1]) for where in ("none", "_batch", "finish")}


def steps_with_fault(model, where, turn, last):
    """Of one session, fault after fault: its weights stay, as no optimizer has them."""
    engine, seen = model._session().engine, []
    if where in ("run_all", "_batch", "finish"):
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
    return seen


def test_a_step_after_an_error_of_all_ranks_is_like_any_other():
    for found in (*faults(), *faults_of_stages()):
        for seen in found.values():
            assert_same_bits(seen, found["none", 1])


@pytest.mark.nightly
def test_a_stage_that_fails_alone_raises():
    """In its last backward: nothing of it has left that others would have to answer."""
    precompile(tied, STAGES)
    order = list(STAGES.values())

    def work(rank):
        model = opened(tied, True, rank, strategies=STAGES, order=order)
        (stage,) = model._session().engine.bound[order[-1]].stages.values()
        backward, turns = stage.backward, []

        def fails(*args):
            made = backward(*args)
            turns.append(None)
            if rank == 3 and len(turns) == 1:  # the lengths fit into one micro-batch
                raise Fault("alone")
            return made

        stage.backward = fails
        model.train_step(sequences(0, LENGTHS))
        assert len(turns) == 1

    with pytest.raises(RankError, match="Fault: alone"):
        run_forked(4, work, timeout_s=60)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_nothing(seed):
    """`python -m tests.runtime.delays 20` runs more and longer ones."""
    assert error_of(drawn(seed), steps=4) <= LIMIT
