"""What a forward keeps from call to call outside of buffers: told and put back, unless it is made once and kept."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparWarning, UnsupportedOpError
from fxpar.tracer import capture, capture_forward
from tests.captured import tokens

WIDTH = 8
total: Any = torch.zeros(())
seen: dict[str, Any] = {}
tables: dict[str, Tensor] = {}
calls = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.kept(self.embedding(input_ids)))

    def kept(self, x: Tensor) -> Tensor:
        return x


class Keeping(Model):
    """Changes something of each kind in every call."""

    of_class: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.sum, self.before = torch.zeros(()), 0, None
        self.sizes, self.inner, self.pair = [], {"k": []}, (torch.zeros(WIDTH), "x")
        self.tokens, self.odd = 0, False

    def kept(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        self.plain.add_(1)
        self.sum = self.sum + x.sum()
        x = x if self.before is None else x + self.before
        self.before = x.mean((0, 1), keepdim=True)
        self.sizes.append(x.shape[1])
        self.inner["k"].append(x.detach())
        self.pair = (self.pair[0] + x.detach().mean((0, 1)), "x")
        self.tokens += x.shape[1]
        self.odd = not self.odd
        type(self).of_class += 1
        note(x)
        return x + self.sum + self.plain + self.pair[0] + len(self.sizes)


def note(x: Tensor) -> None:
    global total, calls
    total = total + x.detach().sum()
    seen["x"] = [x.detach()]
    calls += 1


class Caching(Model):
    """Makes in its first call what later ones find."""

    def __init__(self) -> None:
        super().__init__()
        self.cos, self.longest, self.ready, self.by_dtype = None, 0, False, {}

    def kept(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        if self.cos is None or self.longest < T:
            self.cos, self.longest = torch.arange(T, dtype=x.dtype).cos(), T
        if not self.ready:
            self.scale, self.ready = torch.ones(WIDTH), True
        if x.dtype not in self.by_dtype:
            self.by_dtype[x.dtype] = torch.arange(T, dtype=x.dtype).sin()
        if "x" not in tables:
            tables["x"] = torch.arange(T, dtype=x.dtype)
        return x * self.scale + (self.cos + self.by_dtype[x.dtype] + tables["x"])[:T, None]


def _said(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found if issubclass(one.category, FxparWarning)]


def said_of(model: Model, loss: Any = fxpar.losses.causal_lm) -> list[str]:
    (batch,) = tokens(13, 6)
    return _said(lambda: capture(model, loss, batch))


KEPT = {
    "plain": "to other values, []",
    "sum": "from 0 to a tensor []",
    "before": "from None to a tensor [1, 1, 8]",
    "sizes": "from a list of 0 to a list of 1",
    "inner['k']": "from a list of 0 to a list of 1",
    "pair[0]": "to other values, [8]",
    "tokens": "from 0 to T",
    "odd": "from False to True",
}
SHARED = {
    "total": (f"the code in {__file__}", "to other values, []"),
    "calls": (f"the code in {__file__}", "from 0 to 1"),
    "of_class": ("the code of class Keeping", "from 0 to 1"),
}


@pytest.fixture(scope="module")
def told():
    model = Keeping()
    kept = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    said = said_of(model)
    now = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return SimpleNamespace(said=[text.partition(": captured")[0] for text in said], kept=kept, now=now)


@pytest.mark.parametrize("name", KEPT)
def test_what_a_forward_keeps_is_told(told, name):
    assert f"the forward of the model sets {name} {KEPT[name]}" in told.said


@pytest.mark.parametrize("name", SHARED)
def test_what_is_kept_in_a_class_or_file_is_told(told, name):
    where, change = SHARED[name]
    assert f"{where} sets {name} {change}" in told.said


def test_each_is_told_once_and_put_back(told):
    assert len(told.said) == len(KEPT) + len(SHARED)
    assert told.now.keys() == told.kept.keys()
    assert all(told.now[name] is value for name, value in told.kept.items())
    assert (told.now["sizes"], told.now["inner"], seen) == ([], {"k": []}, {})
    assert type(total) is Tensor
    assert total.item() == 0.0


def test_what_is_made_once_is_no_state():
    model = Caching()
    assert said_of(model) == []
    assert model.cos is None
    assert (model.by_dtype, tables) == ({}, {})
    assert not hasattr(model, "scale")


def test_a_captured_forward_tells_too():
    said = _said(lambda: capture_forward(Keeping(), (torch.arange(6)[None],), gradients=False))
    assert any("sets before from None" in text for text in said)
    assert _said(lambda: capture_forward(Caching(), (torch.arange(6)[None],))) == []


def test_a_second_call_leaves_no_trace():
    class Branching(Model):
        def __init__(self) -> None:
            super().__init__()
            self.kept_at = None

        def kept(self, x: Tensor) -> Tensor:
            if self.kept_at is not None and x.shape[1] != 1 and x.shape[1] == 6:  # not asked by the first call
                x = x * 2
            self.kept_at = x.detach()
            return x

    (batch,) = tokens(13, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(Branching(), fxpar.losses.causal_lm, batch)
    assert [(dim.name, dim.minimum, dim.maximum) for dim in graph.dims] == [("T", 1, None)]


class Loss:
    def __init__(self) -> None:
        self.steps, self.losses = 0, []

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.steps += 1
        return self.by_method(model, batch)

    def by_method(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.losses.append(fxpar.losses.causal_lm(model, batch))
        return self.losses[-1]


class LossModule(nn.Module):
    kept = None

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = fxpar.losses.causal_lm(model, batch)
        self.kept = loss.detach() if self.kept is None else 0.9 * self.kept + 0.1 * loss.detach()
        return loss / self.kept


def test_a_loss_module_that_keeps_something():
    loss = LossModule()
    scale, said = said_of(Model(), loss)
    assert "`div` at" in scale
    assert "a LossModule, sets kept to a tensor []" in said
    assert loss.kept is None


class Listing(Model):
    listed: ClassVar[list[int]] = []

    def kept(self, x: Tensor) -> Tensor:
        self.listed.append(1)
        return x * len(self.listed)


class Holder:
    calls = 0

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Holding(Model):
    """Keeps things where they are looked for last."""

    def __init__(self) -> None:
        super().__init__()
        self.holder, self.space, self.many = Holder(), SimpleNamespace(n=0), [0] * 300

    def kept(self, x: Tensor) -> Tensor:
        self.holder.calls += 1
        self.holder.last = x
        self.holder.seen.append(x.detach())
        self.space.n += 1
        self.many[0] += 1
        return self.by_default(x) * self.holder.calls * counted(x)

    def by_default(self, x: Tensor, found: list[int] = []) -> Tensor:  # noqa: B006
        found.append(1)
        return x * len(found)


def counted(x: Tensor) -> int:
    counted.calls = getattr(counted, "calls", 0) + 1
    return counted.calls


def test_objects_functions_and_long_lists_are_looked_at():
    model, losses = Holding(), []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses.append(fxpar.losses.causal_lm(model, batch))
        return losses[-1]

    said = " ".join(said_of(model, loss))
    for words in (
        "the model (in self.holder) sets calls to 1",
        "the model (in self.holder) sets seen from a list of 0",
        "the model (in self.space) sets n from 0 to 1",
        "the model sets many[0] from 0 to 1",
        "Holding.by_default sets found from a list of 0",
        "the code of counted sets calls to 1",
        "loss sets losses from a list of 0",
    ):
        assert words in said
    assert counted.calls == 1  # the second call counts for nothing
    assert vars(model.holder) == {"seen": []}
    assert (model.space.n, model.many[0], losses) == (0, 0, [])


def making(model: Model, x: Tensor) -> Tensor:
    if not hasattr(model, "late"):
        model.late = nn.Parameter(torch.ones(WIDTH))
    return x * model.late


def replacing(model: Model, x: Tensor) -> Tensor:
    model.head.bias = nn.Parameter(torch.ones(13))
    return x


@pytest.mark.parametrize(("kept", "name"), [(making, "late"), (replacing, "head.bias")])
def test_a_parameter_that_a_forward_makes_is_refused(kept, name):
    model = type("Making", (Model,), {"kept": kept})()
    (batch,) = tokens(13, 6)
    with pytest.raises(UnsupportedOpError, match=f"parameter '{name}', which the forward makes, cannot be captured"):
        capture(model, fxpar.losses.causal_lm, batch)
    assert sorted(dict(model.named_parameters())) == ["embedding.weight", "head.bias", "head.weight"]


def test_a_list_of_a_class_is_told_once():
    (said,) = said_of(Listing())
    assert said.startswith("the code of class Listing sets listed from a list of 0 to a list of 1")


@pytest.mark.parametrize("wrap", [lambda one: one, functools.partial, lambda one: one.by_method])
def test_a_loss_function_that_keeps_something(wrap):
    loss = Loss()
    said = said_of(Model(), wrap(loss))
    assert any("a Loss, sets losses from a list of 0 to a list of 1" in text for text in said)
    assert loss.losses == []
