"""Batch keys of any name: a padded row is the row alone where no hazard is seen, and where it is not, one is seen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.flow import padding_hazard
from fxpar.ir.graph import LogicalGraph
from fxpar.runtime.padding import pad_batch
from fxpar.tracer import capture
from tests.flow.layers import VOCAB, WIDTH, Layer, Net, causal, per_token, rotary
from tests.flow.test_pack_documents import distance, run
from tests.repeat import examples

Batch = dict[str, Tensor]
LENGTH, MULTIPLE = 7, 5


def _batch(length: int = LENGTH) -> Batch:
    """No key but `labels` has a name that fxpar knows; no number is what padding has."""
    generator = torch.Generator().manual_seed(3)

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (1, length), generator=generator)

    return {
        "idx": numbers(1, VOCAB),
        "wanted": numbers(1, VOCAB),
        "kind": numbers(1, 4),
        "real": numbers(1, 9) > 3,
        "weight": 0.5 + torch.rand(1, length, generator=generator, dtype=torch.float64),
        "labels": numbers(1, VOCAB),
        "seen": torch.randn(1, length, WIDTH, generator=generator, dtype=torch.float64),
    }


# How a key may change hidden values x [1, T, WIDTH]; all are harmless behind causal layers.
USES: dict[str, Callable[[Net, Tensor, Batch], Tensor]] = {
    "looked up": lambda net, x, b: x + F.embedding(b["kind"], net.positions),
    "a number": lambda net, x, b: x * b["kind"][..., None] + b["wanted"][..., None],
    "chosen by": lambda net, x, b: torch.where(b["real"][..., None], x, x.flip(-1)),
    "features": lambda net, x, b: x + b["seen"] @ net.b,
    "scaled": lambda net, x, b: x * (1 + b["weight"])[..., None],
}
# Losses of the losses of tokens [T], and whether they count padding.
TERMS: dict[str, tuple[Callable[[Tensor, Batch], Tensor], bool]] = {
    "weighted": (lambda each, b: (each * b["weight"][0]).sum(), False),
    "weighted twice": (lambda each, b: (each * b["weight"][0].square() * (1 + b["kind"][0])).sum(), False),
    "chosen": (lambda each, b: each.masked_fill(~b["real"][0], 0.0).sum(), False),
    "by kind": (lambda each, b: (each * (b["kind"][0] > 2)).sum(), False),
    "all": (lambda each, b: each.sum(), True),
    "one more": (lambda each, b: (each * (b["weight"][0] + 1)).sum(), True),
    "all but a kind": (lambda each, b: (each * (b["kind"][0] != 2)).sum(), True),
    "divided": (lambda each, b: (b["weight"][0] * each / b["weight"][0]).sum(), True),
}
# Losses of which padding is the last thing that one thinks of, but whose gradients it makes NaN, or their ops fail.
UNUSABLE: dict[str, tuple[Callable[[Tensor, Tensor, Batch], Tensor], str]] = {
    "division, hidden": (lambda each, w, b: torch.where(w > 0, each / w, 0.0).sum(), "div.Tensor .* divides by"),
    "reciprocal": (lambda each, w, b: (each * w * (1 / w).clamp(max=9)).sum(), "reciprocal.default .* divides by"),
    "logarithm, hidden": (lambda each, w, b: (each + w.log()).masked_fill(w == 0, 0.0).sum(), "log.* no finite number"),
    "logarithm times": (lambda each, w, b: torch.xlogy(each * w, w).sum(), "xlogy.Tensor .* divides by"),
    "root": (lambda each, w, b: (each * w).sqrt().sum(), "div.Tensor .* takes its root"),
    "root of a product": (
        lambda each, w, b: ((each * w)[:, None] @ w.new_ones(1, 2)).sqrt().sum(),
        "div.Tensor .* its root",
    ),
    "power": (lambda each, w, b: ((each * w) ** 0.5).sum(), "pow.Tensor_Scalar .* no finite number"),
    "hypot": (lambda each, w, b: torch.hypot(each * w, w).sum(), "div.Tensor .* divides by"),
    "norm": (lambda each, w, b: torch.stack([each * w, w], -1).norm(dim=-1).sum(), "div.* divides by"),
    "whole division": (lambda each, w, b: (each * w * (6 // b["kind"][0])).sum(), "floor_divide.* divides by"),
    "remainder": (lambda each, w, b: (each * w * (7 % b["kind"][0])).sum(), "remainder.* divides by"),
    "index": (lambda each, w, b: (each * w * _table(w)[b["labels"][0]]).sum(), "negative indices"),
    "selected": (lambda each, w, b: (each * w * _table(w).index_select(0, b["labels"][0])).sum(), "negative indices"),
    "gathered": (
        lambda each, w, b: (each * w * (w[:, None] + _table(w)).gather(1, b["labels"][0][:, None])[:, 0]).sum(),
        "gather.* negative indices",
    ),
}
# Infinite numbers, and divisors, that padding does not make so.
USABLE: dict[str, Callable[[Tensor, Tensor, Batch], Tensor]] = {
    "infinity from the start": lambda each, w, b: (each * torch.where(b["real"][0], 0.0, -torch.inf).exp()).sum(),
    "lowest twice": lambda each, w, b: (each * w * (_lowest(b) + _lowest(b)).exp()).sum(),
    "divisor of more": lambda each, w, b: (each * w / w.clamp(min=0.1) / (1 + w)).sum(),
    "looked up": lambda each, w, b: (each * w * F.embedding(b["labels"][0], _table(w)[:, None])[:, 0]).sum(),  # zeros
    "index of more": lambda each, w, b: (each * w * _table(w)[b["labels"][0].clamp(min=0)]).sum(),
}


def _table(w: Tensor) -> Tensor:
    return torch.linspace(0.0, 1.0, VOCAB, dtype=w.dtype)


def _lowest(batch: Batch) -> Tensor:
    """A mask of attention."""
    return (1 - batch["real"][0].double()) * torch.finfo(torch.float64).min


# Layers that show padding to the tokens before it.
MIXING: dict[str, Layer] = {"mean": lambda net, x, ids: x.mean(1, keepdim=True), "flip": lambda net, x, ids: x.flip(1)}
LAYERS: dict[str, Layer] = {f.__name__: f for f in (causal, rotary, per_token)} | MIXING
# Running ops over what a dim is made of; they see padding where the tokens stand behind another factor.
RUNNING: dict[str, tuple[Layer, bool]] = {
    "tokens": (lambda net, x, ids: x.cumsum(1), False),
    "tokens, then features": (lambda net, x, ids: x.flatten(1).cumsum(1).unflatten(1, (-1, WIDTH)), False),
    "copies": (lambda net, x, ids: torch.stack([x, x], 1).flatten(1, 2).cumsum(1).unflatten(1, (2, -1))[:, 1], True),
    "greatest": (
        lambda net, x, ids: torch.stack([x, x], 1).flatten(1, 2).cummax(1).values.unflatten(1, (2, -1))[:, 1],
        True,
    ),
    "features": (
        lambda net, x, ids: x.transpose(1, 2).flatten(1).cumsum(1).unflatten(1, (WIDTH, -1)).transpose(1, 2),
        True,
    ),
}
STACKED = [*LAYERS]
LAYERS |= {name: layer for name, (layer, _) in RUNNING.items()}


class Keyed(Net):
    """A net that uses further keys before each of its layers."""

    def __init__(self, layers: tuple[str, ...], uses: tuple[str, ...]) -> None:
        super().__init__([LAYERS[name] for name in layers])
        self.uses = uses

    def hidden(self, batch: Batch) -> Tensor:
        x = F.embedding(batch["idx"], self.table)
        for layer, use in zip(self.layers, self.uses, strict=True):
            x = USES[use](self, x, batch).tanh()
            x = x + layer(self, x, batch["idx"]).tanh()
        return F.linear(x, self.head)


def _loss(term: str, model: Keyed, batch: Batch) -> Tensor:
    each = F.cross_entropy(model.hidden(batch)[0], batch["wanted"][0], reduction="none")
    if term in TERMS:
        return TERMS[term][0](each, batch)
    use = UNUSABLE[term][0] if term in UNUSABLE else USABLE[term]
    return use(each, batch["weight"][0], batch)


@functools.cache
def captured(layers: tuple[str, ...], uses: tuple[str, ...], term: str) -> tuple[Keyed, LogicalGraph]:
    model = Keyed(layers, uses)
    return model, capture(model, functools.partial(_loss, term), _batch())


def gap(model: Keyed, logical: LogicalGraph) -> float:
    """How far loss and gradients of the padded row are from those of plain torch for the row alone."""
    batch: Any = _batch()
    row = pad_batch(logical.inputs, logical.dims, {"T": MULTIPLE}, batch)
    assert row["idx"].shape == (1, 10)
    return distance(run(logical, model, row), run(logical, model, batch))


@pytest.mark.parametrize("term", TERMS)
def test_terms(term):
    model, logical = captured((), (), term)
    hazard, counts = padding_hazard(logical), TERMS[term][1]
    assert (hazard is not None) == counts, hazard
    if counts:
        assert hazard is not None
        assert "padding included" in hazard
        assert not gap(model, logical) < 1e-6
    else:
        assert gap(model, logical) < 1e-10


@pytest.mark.parametrize("term", UNUSABLE)
def test_numbers_that_an_op_cannot_use(term):
    """Refused by name of the op and of the line; whatever is made of the result."""
    hazard = padding_hazard(captured((), (), term)[1])
    assert hazard is not None
    assert re.search(rf"{UNUSABLE[term][1]}", hazard), hazard
    assert re.match(r"aten\.\w+\.\w+ at .*test_keys\.py:\d+ ", hazard), hazard


@pytest.mark.parametrize("term", USABLE)
def test_numbers_that_an_op_can_use(term):
    model, logical = captured((), (), term)
    assert padding_hazard(logical) is None
    assert gap(model, logical) < 1e-10


@pytest.mark.parametrize("use", USES)
def test_uses(use):
    """Before a layer that cannot see what is padded; attention is the costliest of these to capture."""
    model, logical = captured(("causal" if use == "features" else "rotary",), (use,), "weighted")
    assert padding_hazard(logical) is None
    assert gap(model, logical) < 1e-10


@pytest.mark.parametrize("name", RUNNING)
def test_running_ops(name):
    """Harmless behind the last token, and nowhere else."""
    model, logical = captured((name,), ("a number",), "weighted")
    hazard = padding_hazard(logical)
    assert (hazard is not None) == RUNNING[name][1], hazard
    if hazard is None:
        assert gap(model, logical) < 1e-10
    else:
        assert re.match(r"aten\.cum.* at .*test_keys\.py:\d+ runs through the tokens more than once", hazard)


@given(
    st.lists(st.tuples(st.sampled_from(STACKED), st.sampled_from([*USES])), min_size=1, max_size=3),
    st.sampled_from([*TERMS]),
)
@settings(max_examples=examples(4), deadline=None)
def test_stacks(stack, term):
    """No hazard: exact. A layer that mixes, a loss that counts padding: a hazard."""
    layers, uses = zip(*stack, strict=True)
    model, logical = captured(layers, uses, term)
    hazard = padding_hazard(logical)
    assert (hazard is not None) == (TERMS[term][1] or any(name in MIXING for name in layers))
    if hazard is None:
        assert gap(model, logical) < 1e-10
