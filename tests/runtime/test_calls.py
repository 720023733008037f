"""Plain calls and evaluation where strategies take turns in the arena: no memory of their own, and no stale weights."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import fxpar
from tests.runtime.hot import (
    Small,
    World,
    adamw,
    largest_error,
    one_device,
    parallel,
    precompile,
    sequences,
    small,
)

TWO = {32: "dp2", 128: "tp2"}
SHARDED = {32: "tp2", 128: "dp2+zero3"}
LENGTHS = (5, 60, 90, 8, 33)


class Tells(nn.Module):
    """Its forward returns a weight as it is, beside logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(131, 16), nn.Linear(16, 131)

    def forward(self, input_ids, position_ids):
        return self.head(self.embed(input_ids)), self.head.bias


def tells() -> nn.Module:
    return Tells().double()


def loss_of_tells(model, batch):
    logits, _ = model(batch["input_ids"], batch["position_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


@functools.cache
def compiled_tells():
    return fxpar.compile_strategies(tells(), TWO, loss_of_tells)


def uneven() -> nn.Module:
    """Its feed-forward layer does not divide by two: a rank of tp2 has a column that is padding."""
    return Small(25).double()


def prepare() -> None:
    precompile(small, TWO)
    precompile(uneven, TWO)
    precompile(uneven, SHARDED)
    compiled_tells()


WORLD = World(2, prepare)


def arena_of(model):
    store = model._session().store
    return {t.untyped_storage().data_ptr() for name in TWO.values() for t in store.compute(name).values()}


def places(model):
    return [place for known in model._session().calls._places.values() for place in known]


@WORLD.case
def evaluated(rank):
    model, batches = parallel(small, strategies=TWO, resident=[]), [sequences(1, LENGTHS), sequences(2, LENGTHS)]
    optimizer = adamw(model)
    found = [model.evaluate(batches[0]), model.evaluate(batches[0])]
    for batch in batches:
        model.train_step(batch)
        found.append(model.evaluate(batches[0]))  # the weights have not changed, but where they lay others do
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.evaluate(batches[0]))
    memory = {t.untyped_storage().data_ptr() for place in places(model) for t in place.tensors.values()}
    assert memory <= arena_of(model)
    return found


def held_out(steps):
    """Loss of the first mini-batch on one device after this many steps."""
    model, batches = small(), [sequences(1, LENGTHS), sequences(2, LENGTHS)]
    optimizer = adamw(model)
    for batch in batches[:steps]:
        grads = one_device_gradients(model, batch)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()
    return one_device(model, [batches[0]], clip=None)["losses"][0]


def one_device_gradients(model, batch):
    copy = small()
    copy.load_state_dict(model.state_dict())
    return one_device(copy, [batch], clip=None)["grads"]


def test_evaluation_takes_no_memory_for_weights_and_no_stale_ones():
    want = [held_out(steps) for steps in (0, 1, 2)]
    for found in evaluated():
        assert found == pytest.approx([want[0]] * 3 + [want[1]] * 2 + [want[2]], rel=1e-11)


@WORLD.case
def padded(rank):
    """In the arena lies what other layouts have left, also where the cut one has padding."""
    model, found = parallel(uneven, strategies=TWO, resident=[], order=["dp2", "tp2"]), []
    ids = torch.arange(60)[None]
    for _ in range(2):
        model.train_step(sequences(1, LENGTHS))
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        model.zero_grad()
        with torch.no_grad():
            calls = []
            for strategy in ("dp2", "tp2"):
                with model.using(strategy):
                    calls.append(model(ids, ids))
        found.append({"logits": calls[1] - calls[0]})
    return found


def test_a_layout_with_padding_in_the_arena():
    model = uneven()
    want = one_device(model, [sequences(1, LENGTHS)], clip=None, lr=0.0)["grads"]
    for grads, logits, again, logits_again in padded():
        assert largest_error(grads, want) <= 1e-12
        assert largest_error(again, want) <= 1e-12
        assert max(float(each["logits"].abs().max()) for each in (logits, logits_again)) <= 1e-12


@WORLD.case
def padded_calls(rank):
    """What is left of padding when plain calls have filled the arena, and before."""
    model, ids = parallel(uneven, strategies=SHARDED, resident=[]), torch.arange(60)[None]
    model.train_step(sequences(1, LENGTHS))
    store = model._session().store
    for tensor in store.compute("tp2").values():
        tensor.detach().fill_(3.0)
    with torch.no_grad(), model.using("dp2+zero3"):
        model(ids, ids)
    assert all(place.in_arena for place in places(model))
    return [float(padding.abs().max()) for padding in store._arena_padding["dp2+zero3"]]


def test_plain_calls_clear_it_too():
    first, second = padded_calls()
    assert first == []
    assert second
    assert set(second) == {0.0}


@WORLD.case
def after_an_error(rank):
    model = parallel(small, strategies=TWO, resident=[], order=["dp2", "tp2"])
    short = sequences(1, (5, 30, 8))  # under the first strategy alone
    before = model.evaluate(short)

    def fails(*args):
        raise ValueError("in the second group")

    model._session().engine.bound["tp2"].run_all = fails
    with pytest.raises(ValueError, match="in the second group"):
        model.train_step(sequences(2, LENGTHS))
    return before, model.evaluate(short)


def test_evaluation_after_a_step_that_failed():
    for before, after in after_an_error():
        assert after == before


@WORLD.case
def gradients_beside(rank):
    """A forward waits for its backward while others fill the arena."""
    model = parallel(small, strategies=TWO, resident=[])
    ids = torch.arange(24)[None]

    def loss():
        return model(ids, torch.arange(24)[None]).square().mean()

    found = []
    for between in (False, True):
        with model.using("tp2"):
            value = loss()
        if between:
            with torch.no_grad(), model.using("dp2"):
                loss()
            model.evaluate(sequences(1, LENGTHS))
            model.train_step(sequences(1, LENGTHS))
            model.zero_grad()
        value.backward()
        found.append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
        model.zero_grad()
    own = [place for place in places(model) if not place.in_arena]
    assert [place.layout.name for place in own] == ["tp2"]
    with torch.no_grad(), model.using("tp2"):
        loss()  # where there is a place that nobody writes over, it serves these calls too
    return found


def test_weights_that_wait_for_a_backward_stay_where_they_are():
    for without, between in gradients_beside():
        assert all(torch.equal(without[name], between[name]) for name in without)


@WORLD.case
def told(rank):
    options = {"loss": loss_of_tells, "compiled": compiled_tells(), "resident": [], "monitor": False}
    model = fxpar.parallelize(tells(), strategies=TWO, **options)
    want, ids = tells().head.bias.detach(), torch.arange(24)[None]
    with torch.no_grad(), model.using("dp2"):
        _, bias = model(ids, torch.arange(24)[None])
    for weight in model._session().store.compute("dp2").values():
        weight.detach().fill_(float("nan"))  # as another layout there would
    return torch.equal(bias, want)


def test_a_weight_that_a_forward_returns_is_a_copy():
    assert told() == [True] * 2


def step(model, kind, **options):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    kind(model.parameters(), lr=0.05, **options).step()
    model.zero_grad()


def in_place(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def of_the_rank(model):
    with torch.no_grad():
        next(model.parameters()).to_local().mul_(1.5)


WRITES = {
    "sgd": lambda model: step(model, torch.optim.SGD),
    "sgd, one by one": lambda model: step(model, torch.optim.SGD, foreach=False),
    "adamw": lambda model: step(model, torch.optim.AdamW),
    "adamw, fused": lambda model: step(model, torch.optim.AdamW, fused=True),
    "state dict": lambda model: model.load_state_dict({n: v * 1.1 for n, v in model.state_dict().items()}),
    "in place": in_place,
    "of the rank": of_the_rank,
}


def whole_loss(model):
    ids = torch.arange(24)[None]
    return model(ids, ids).square().mean()


@WORLD.case
def written(rank):
    model, alone, found = parallel(small, strategies=TWO), small(), []
    for name, write in WRITES.items():
        for gradients in (False, True):  # the second time nothing has to move
            with torch.set_grad_enabled(gradients):
                whole_loss(model)
        write(model)
        with torch.no_grad():
            have, held_out = whole_loss(model), model.evaluate(sequences(1, LENGTHS))
            alone.load_state_dict({n: p.full_tensor() for n, p in model.named_parameters()})
            found.append((name, float(have), float(whole_loss(alone))))
        found.append((name, held_out, one_device(alone, [sequences(1, LENGTHS)], clip=None, lr=0.0)["losses"][0]))
    return found


def test_calls_see_whatever_writes_to_the_weights():
    """Without a training step in between: `train_step` brings the weights anyhow."""
    for rank in written():
        for name, have, want in rank:
            assert have == pytest.approx(want, rel=1e-11), name


class Scans(nn.Module):
    """`cummax` has no sharding rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(131, 16), nn.Linear(16, 131)

    def forward(self, input_ids):
        return self.head(torch.cummax(self.embed(input_ids), -1).values)


@WORLD.case
def warned(rank):
    """What is said by `parallelize`, and then by a plain call and an evaluation."""
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not said:
                model = fxpar.parallelize(Scans(), strategies={128: "tp2"}, monitor=False)
            else:
                model(torch.arange(24)[None])
                model.evaluate(sequences(1, LENGTHS))
        said.append([str(w.message) for w in caught if "sharding rule" in str(w.message)])
    return said


def test_a_missing_rule_is_said_once_by_one_rank():
    first, second = warned()
    assert [len(texts) for texts in first] == [1, 0]
    assert "aten.cummax" in first[0][0]
    assert second == [[], []]
