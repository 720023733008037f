"""Training in bf16 and fp16 over fp32 masters, loss scaling, deterministic mode: on forked gloo ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import ParallelizeError
from fxpar.models.builtin import packed_lm_loss
from fxpar.precision import Precision
from fxpar.runtime.forked import run_forked
from fxpar.runtime.loss_scaler import LossScaler, overflows_anywhere
from fxpar.runtime.task import CompiledModel
from fxpar.torch_api.threaded import run_threads
from tests.runtime import hot
from tests.runtime.hot import World, adamw, one_device, sequences

STRATEGIES = {64: "dp2", 512: "pp2"}
ONE = {512: "tp2+sp"}
WIDE = {64: "dp2.pp2", 512: "tp2.cp2"}
BATCHES = [sequences(seed) for seed in (5, 6)]


class Normed(nn.Module):
    """Two layers for two stages, and a norm, whose weights stay single. Its tokens do not meet: test_accuracy.py in
    tests/precision has attention.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.layers = nn.Embedding(131, 16), nn.ModuleList(hot.Residual() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 131, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(position_ids)[..., None]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(dtype: torch.dtype) -> nn.Module:
    return Normed().to(dtype)


def make_single() -> nn.Module:
    return make(torch.float32)


def compiled(precision: str, strategies: dict[int, str] = STRATEGIES) -> CompiledModel:
    return hot.compiled(make_single, strategies.values(), precision)


def parallel(text: str, strategies: dict[int, str] = STRATEGIES, **options: Any) -> Any:
    return fxpar.parallelize(
        make_single(),
        strategies=strategies,
        compiled=compiled(text, strategies),
        loss=packed_lm_loss,
        merge=False,
        monitor=False,
        **options,
    )


def train(model: Any, batches: list[list[Tensor]] = BATCHES) -> list[Any]:
    optimizer, reports = adamw(model, lr=1e-3), []
    for batch in batches:
        reports.append(model.train_step(batch))
        optimizer.step()
        optimizer.zero_grad()
    return reports


@functools.cache
def truth() -> list[float]:
    return one_device(make(torch.float64), BATCHES, clip=None, lr=1e-3)["losses"]


def held_out(batch: list[Tensor]) -> float:
    return one_device(make(torch.float64), [batch], clip=None)["losses"][0]


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def prepare() -> None:
    for text in ("bf16", "bf16+reduce=bf16", "captured", "fp16"):
        compiled(text)
    compiled("bf16", ONE)


WORLD = World(2, prepare)
TEXTS = ("bf16", "bf16+reduce=bf16", "captured")


def follow(strategies: dict[int, str]) -> dict[str, Any]:
    found = {}
    for text in TEXTS:
        model = parallel(text, strategies)
        reports = train(model)
        found[text] = {
            "losses": [r.loss for r in reports],
            "switched": sum(g.switch_bytes for g in reports[0].groups),
            "reduced": sum(g.reduce_bytes for g in reports[0].groups),
            "dtypes": {p.dtype for p in model.parameters()},
        }
    return found


@WORLD.case
def followed(rank: int) -> dict[str, Any]:
    return follow(STRATEGIES)


def test_bf16_travels_and_masters_stay_single():
    saves_half(followed())
    assert set(compiled("bf16").programs) == set(STRATEGIES.values())


@pytest.mark.nightly
def test_bf16_travels_between_four():
    for text in TEXTS:
        compiled(text, WIDE)
    saves_half(run_forked(4, lambda rank: follow(WIDE)))


def saves_half(ranks: list[dict[str, Any]]) -> None:
    """Half the bytes of a switch and, if asked for, of the reductions; the loss follows that of float64."""
    (found, *others) = ranks
    assert all(other == found for other in others)
    assert found["captured"]["losses"] == pytest.approx(truth(), rel=1e-5)
    for text in TEXTS[:2]:
        assert found[text]["losses"] == pytest.approx(truth(), rel=2e-3)
        assert found[text]["dtypes"] == {torch.float32}
    # Weights of norms stay single: a little more than half.
    assert found["captured"]["switched"] * 0.5 <= found["bf16"]["switched"] < found["captured"]["switched"] * 0.52
    assert found["bf16"]["reduced"] == found["captured"]["reduced"] == 2 * found["bf16+reduce=bf16"]["reduced"]


@WORLD.case
def evaluated(rank: int) -> float:
    return parallel("bf16", ONE).evaluate(BATCHES[0])


def test_bf16_evaluates():
    assert evaluated() == pytest.approx([held_out(BATCHES[0])] * 2, rel=2e-3)


@pytest.mark.nightly
def test_bf16_evaluates_through_stages():
    compiled("bf16", WIDE)
    found = run_forked(4, lambda rank: parallel("bf16", WIDE).evaluate(BATCHES[0]))
    assert found == pytest.approx([held_out(BATCHES[0])] * 4, rel=2e-3)


@WORLD.case
def overflowed(rank: int) -> dict[str, Any]:
    model = parallel("fp16")
    calm = [(r.loss, r.skipped) for r in train(model)]
    wild = parallel("fp16", loss_scale=2.0**24)
    start, seen = whole(wild), []
    optimizer = adamw(wild, lr=1e-3)
    for _ in range(12):
        report = wild.train_step(BATCHES[0])
        same = all(p.grad is None for p in wild.parameters())
        seen.append((report.loss, report.skipped, same, wild.engine_state()["loss_scaler"]["scale"]))
        if not report.skipped:
            break
        optimizer.step()
    unchanged = all(torch.equal(start[name], value) for name, value in whole(wild).items())
    grads = {name: p.grad.full_tensor() for name, p in wild.named_parameters()}
    fresh = parallel("fp16")
    fresh.load_engine_state(wild.engine_state())
    return {
        "calm": calm,
        "seen": seen,
        "unchanged": unchanged,
        "grads": grads,
        "loaded": fresh.engine_state()["loss_scaler"],
    }


def test_an_overflow_anywhere_leaves_the_mini_batch_out_everywhere():
    """The factor falls until nothing overflows; skipped mini-batches change no weight."""
    found = overflowed()
    first = found[0]
    assert [loss for loss, _ in first["calm"]] == pytest.approx(truth(), rel=2e-3)
    assert not any(skipped for _, skipped in first["calm"])
    assert all(other["seen"] == first["seen"] for other in found)
    losses, skipped, without, scales = zip(*first["seen"], strict=True)
    assert skipped[0]
    assert not skipped[-1]
    assert without == skipped
    assert losses == pytest.approx([truth()[0]] * len(losses), rel=2e-3)  # reported without the factor
    assert scales[:-1] == tuple(2.0 ** (23 - i) for i in range(len(scales) - 1))
    assert first["unchanged"]
    assert first["loaded"]["scale"] == scales[-1]
    expected = one_device(make(torch.float64), BATCHES[:1], clip=None)["grads"]
    for name, grad in first["grads"].items():
        assert (grad - expected[name]).norm() <= 0.05 * expected[name].norm(), name


@WORLD.case
def scaled_once(rank: int) -> float:
    model = parallel("fp16")
    model.train_step(BATCHES[0])
    once = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.train_step(BATCHES[0])
    return max(
        float((p.grad.full_tensor() - 2 * once[name]).abs().max() / once[name].abs().max())
        for name, p in model.named_parameters()
    )


def test_gradients_of_earlier_mini_batches_are_not_scaled_twice():
    assert max(scaled_once()) <= 1e-6


@WORLD.case
def same_bits(rank: int) -> bool:
    runs = []
    for _ in range(2):
        model = parallel("bf16", deterministic=True)
        losses = [r.loss for r in train(model)]
        runs.append((losses, whole(model)))
    (a, first), (b, second) = runs
    assert not torch.are_deterministic_algorithms_enabled()
    return a == b and all(torch.equal(first[name], second[name]) for name in first)


def test_the_same_bits_every_time():
    assert all(same_bits())


@WORLD.case
def other_precision(rank: int) -> str:
    with pytest.raises(ParallelizeError) as caught:
        parallel("bf16", precision="bf16+reduce=bf16")
    parallel("bf16", precision=Precision(torch.bfloat16))
    return str(caught.value)


def test_another_precision_than_was_compiled():
    (message, *_) = other_precision()
    assert "compiled is for precision bf16, not bf16+reduce=bf16" in message


def test_the_factor_grows_after_steps_without_overflow():
    scaler = LossScaler(scale=8.0, interval=3)
    for overflow in (False, False, True, False, False, False):
        scaler.update(overflow)
    assert scaler.scale == 8.0
    scaler = LossScaler(scale=2.0)
    scaler.update(True)
    assert scaler.is_exhausted
    scaler.update(True)
    assert scaler.scale == scaler.least


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_an_overflow_on_one_rank_is_every_ranks(bad):
    def work(rank: int) -> bool:
        return overflows_anywhere(
            [torch.tensor([1.0, float("inf") if rank == bad else 0.0])], None, torch.device("cpu")
        )

    assert run_threads(2, work) == [bad is not None] * 2
