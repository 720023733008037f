"""`fxpar.parallelize` as users meet it: decorator, DTensors outside, plain calls, copies."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpar
from fxpar import losses
from fxpar.errors import PackedCallError, ParallelizeError
from fxpar.losses import next_token_labels
from fxpar.models import load
from fxpar.models.builtin import packed_lm_loss
from fxpar.runtime.forked import run_forked
from fxpar.runtime.options import ParallelizeOptions
from fxpar.tracer.documents import packed
from tests.runtime.hot import (
    World,
    adamw,
    largest_error,
    one_device,
    parallel,
    precompile,
    sequences,
    small,
)

POSITIONS = torch.arange(40)[None]


def test_every_option_stands_in_the_signature_and_in_the_docstring():
    found = inspect.signature(fxpar.parallelize).parameters
    assert list(found) == ["target", *inspect.signature(ParallelizeOptions).parameters]
    assert found["strategies"].default is found["plan"].default is None  # one of them is given
    assert (found["target"].default, found["staging_bytes"].default) == (..., 64 << 20)
    about = inspect.getdoc(fxpar.parallelize)
    undocumented = [name for name in found if f"`{name}" not in about]
    assert not undocumented


def row(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5 + replica)
    return tuple(torch.randint(0, 131, (1, 40), generator=generator) for _ in range(2))


def plain_loss(model: nn.Module, replica: int) -> torch.Tensor:
    ids, labels = row(replica)
    return F.cross_entropy(model(ids, POSITIONS).view(-1, 131), labels.view(-1))


PACKING = {512: "dp2.tp2"}
HELD_OUT = (5, 60, 33, 17, 130, 8, 90, 12, 45)  # the shortest, which idle replicas run as well, has a loss


def prepare():
    precompile(small)
    precompile(small, PACKING)


WORLD = World(4, prepare)
TWO = {64: "dp2", 512: "tp2+sp"}
PAIR = World(2, lambda: precompile(small, TWO))


@PAIR.case
def outside(rank):
    shapes = {name: tuple(p.shape) for name, p in small().named_parameters()}
    model = parallel(small, strategies=TWO)
    plain = type(small())
    assert isinstance(model, plain)
    assert isinstance(model, fxpar.ParallelModule)
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param.data, DTensor)
        assert tuple(param.shape) == shapes[name]
        assert param.placements == (Shard(0),)
        assert param.to_local().shape[0] <= -(-shapes[name][0] // 2)
    model.train_step(sequences(1))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    state = model.state_dict()
    assert list(state) == list(small().state_dict())
    for kind in ("fused", "foreach"):
        optimizer = adamw(model, **{kind: True})
        optimizer.step()
    model.load_state_dict(state)
    return float(norm.full_tensor())


def test_the_model_looks_like_a_sharded_one_from_outside():
    want = one_device(small(), [sequences(1)], clip=None)["grads"]
    norm = float(torch.stack([g.norm() for g in want.values()]).norm())
    assert all(abs(found - norm) < 1e-12 * norm for found in outside())


@PAIR.case
def averaged(rank):
    model = parallel(small, strategies=TWO)
    optimizer = adamw(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    kept = copy.deepcopy(model)
    for seed in range(2):
        model.train_step(sequences(seed))
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    with pytest.raises(ParallelizeError, match="this is a copy"):
        kept.train_step(sequences(1))
    average = {name: p.detach().full_tensor() for name, p in ema.module.named_parameters()}
    first = {name: p.detach().full_tensor() for name, p in kept.named_parameters()}
    return average, first, {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_an_average_of_the_weights_can_be_kept():
    average, first, last = averaged()[0]
    assert largest_error(first, dict(small().named_parameters())) == 0
    name = "up_proj.weight"
    assert not torch.equal(average[name], last[name])
    low, high = torch.minimum(first[name], last[name]), torch.maximum(first[name], last[name])
    assert ((average[name] >= low - 0.02) & (average[name] <= high + 0.02)).all()


def test_the_decorator_makes_a_class_whose_instances_train():
    @fxpar.parallelize(strategies={32: "dp2", 128: "tp2"}, loss=losses.causal_lm, merge=False, monitor=False)
    class Tiny(nn.Module):
        """A bag of two layers."""

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.embed = nn.Embedding(131, width)
            self.head = nn.Linear(width, 131)

        def forward(self, input_ids):
            return self.head(torch.tanh(self.embed(input_ids)))

    class Further(Tiny):
        pass

    assert Tiny.__name__ == "Tiny"
    assert Tiny.__doc__ == "A bag of two layers."

    def work(rank):
        torch.manual_seed(3)
        model = Tiny(width=24)
        reference = nn.Module.__new__(nn.Module)
        assert isinstance(model, Tiny)
        assert model.embed.embedding_dim == 24
        batch = sequences(2, (20, 100, 7))
        assert model._session().engine.options.packed  # it is proved that nothing mixes tokens
        report = model.train_step(batch)
        plain = Further()
        assert not isinstance(plain, fxpar.ParallelModule)
        del reference
        return report.loss, {n: p.grad.full_tensor() for n, p in model.named_parameters()}

    found = run_forked(2, work)
    torch.manual_seed(3)
    embed, head = nn.Embedding(131, 24), nn.Linear(24, 131)
    batch, total = sequences(2, (20, 100, 7)), 0
    for ids in batch:
        logits = head(torch.tanh(embed(ids)))
        total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / 124
    total.backward()
    assert abs(found[0][0] - total.item()) < 1e-5
    assert torch.allclose(found[1][1]["embed.weight"], embed.weight.grad, rtol=1e-5, atol=1e-7)


@PAIR.case
def called(rank):
    model = parallel(small, strategies=TWO)
    with model.using("dp2"):
        loss = plain_loss(model, rank)
        loss.backward()
    grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    adamw(model).step()
    model.zero_grad()
    stepped = plain_loss(model, 0)  # under the strategy of the longest sequences, with the new weights
    model.train_step(sequences(1))  # leaves other weights in the arena; the calls after it must not mind
    model.eval()
    with torch.no_grad():
        again = plain_loss(model, 0)
    return loss.item(), grads, stepped.item(), again.item()


def test_plain_calls_train_under_a_chosen_strategy():
    """Each rank captures the calls itself, as their arguments are known to it alone."""
    model, want_losses = small(), []
    for replica in range(2):
        loss = plain_loss(model, replica)
        (loss / 2).backward()
        want_losses.append(loss.item())
    want = {name: p.grad for name, p in model.named_parameters()}

    results = called()
    assert [abs(r[0] - want_losses[i]) < 1e-12 for i, r in enumerate(results)] == [True] * 2
    assert largest_error(results[0][1], want) <= 1e-12
    for param, grad in zip(model.parameters(), want.values(), strict=True):
        param.grad = grad
    adamw(model).step()
    assert abs(results[0][2] - plain_loss(model, 0).item()) < 1e-10
    assert results[0][2] == results[0][3]


def one_row():
    ids = sequences(1, (40,))[0][None]
    return {"input_ids": ids, "labels": next_token_labels(ids), "position_ids": POSITIONS, "unknown": ids}


@PAIR.case
def seen_by_a_loss(rank):
    return losses.causal_lm(parallel(small, strategies=TWO), one_row()).item()


def test_the_loss_functions_see_the_arguments_of_the_model():
    """`losses.causal_lm` reads the signature of the forward; a parallel model must show the one of its class."""
    want = losses.causal_lm(small(), one_row()).item()
    assert all(abs(found - want) < 1e-9 for found in seen_by_a_loss())


@WORLD.case
def held_out_losses(rank):
    held_out = sequences(5, HELD_OUT)
    model = parallel(small)
    packing = parallel(small, strategies=PACKING, merge=True)
    assert packing._session().engine.options.packed
    found = [model.evaluate(held_out), packing.evaluate(held_out)]
    assert model.training
    ids = torch.arange(20)[None]
    with packed(torch.tensor([[1] * 12 + [2] * 8])), pytest.raises(PackedCallError):
        packing(ids, torch.arange(20)[None])
    return found


def test_held_out_loss_is_that_of_one_device_under_any_strategies():
    held_out = sequences(5, HELD_OUT)
    count, total = sum(len(ids) - 1 for ids in held_out), 0.0
    model = small()
    for ids in held_out:
        positions = torch.arange(len(ids))[None]
        row = {"input_ids": ids[None], "labels": next_token_labels(ids[None]), "position_ids": positions}
        total += packed_lm_loss(model, row).item() if len(ids) > 1 else 0.0
    for found in held_out_losses():
        assert all(abs(value - total / count) < 1e-12 * total / count for value in found)


@PAIR.case
def staged(rank):
    model = parallel(small, strategies=TWO)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    pieces = stager.stage({name: p.detach() for name, p in model.named_parameters()})
    pairs = [(pieces[name].to_local(), p.to_local()) for name, p in model.named_parameters()]
    return all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs if b.numel())


def test_weights_are_staged_for_an_asynchronous_checkpoint():
    """DCP's stager copies storages; it must meet each piece as one of its own."""
    assert all(staged())


def test_tied_weights_stay_tied():
    def make():
        return load("gpt", dtype=torch.float64, seed=2, options={"tied": "true", "dropout": "0.0"}).model

    model = make()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) == len(dict(model.named_parameters())):
        pytest.fail("the example has no tied weight")
    want = one_device_gpt(model)
    precompile(make, {32: "dp2", 128: "tp2"})

    def work(rank):
        model = parallel(make, strategies={32: "dp2", 128: "tp2"})
        report = model.train_step(sequences(2, (20, 100)))
        return report.loss, {n: p.grad.full_tensor() for n, p in model.named_parameters()}

    loss, grads = run_forked(2, work)[0]
    assert abs(loss - want[0]) < 1e-12
    assert largest_error(grads, want[1]) <= 1e-12


def one_device_gpt(model):
    batch, total = sequences(2, (20, 100)), 0.0
    for ids in batch:
        positions = torch.arange(len(ids))[None]
        data = {"input_ids": ids[None], "labels": next_token_labels(ids[None]), "position_ids": positions}
        loss = losses.causal_lm(model, data) / 118
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


MISUSE = [
    (lambda: fxpar.parallelize(3, strategies={8: "dp2"}), "neither an nn.Module"),
    (lambda: fxpar.parallelize(None, strategies={8: "dp2"}), "the target is None, neither an nn.Module"),
    (lambda: fxpar.parallelize(parallel(small), strategies={8: "dp4"}), "parallel already"),
    (lambda: parallel(small, plain="tp2"), "plain='tp2' is none"),
    (lambda: parallel(small).using("dp2.tp2").__enter__(), r"was parallelized with dp4, dp2.tp2\+sp, cp2.tp2"),
]


@WORLD.case
def misused(rank):
    for act, text in MISUSE:
        with pytest.raises(ParallelizeError, match=text):
            act()
    return True


def test_misuse_is_one_clear_error():
    assert all(misused())
