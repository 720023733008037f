"""Blocks whose backward is copied: the graph is the one that is traced whole, node for node."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpar.tracer import capture, repeats
from tests.repeat import thinned

X = {"x": torch.randn(6, 4, dtype=torch.float64)}


class Block(nn.Module):
    def __init__(self, factor: float = 2.0, wide: bool = False):
        super().__init__()
        self.norm, self.linear, self.factor = nn.LayerNorm(4), nn.Linear(4, 4), factor
        self.more = nn.Linear(4, 4, bias=False) if wide else nn.Identity()

    def forward(self, h, mask=None):
        made = self.linear(self.norm(h)) * self.factor
        return h + self.more(made if mask is None else made * mask)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList(blocks or [Block() for _ in range(6)])

    def forward(self, x):
        h, mask = self.first(x), (x > 0).to(x.dtype)
        for layer in self.layers:
            h = layer(h, mask)
        return self.last(h)


class Frozen(Blocks):
    """The weight of the fourth block has no gradient."""

    def __init__(self):
        super().__init__()
        self.layers[3].linear.weight.requires_grad_(False)


class Skips(Blocks):
    """Each block sees what the first one saw, so its gradient comes from all of them."""

    def forward(self, x):
        h = first = self.first(x)
        for layer in self.layers:
            h = layer(h + first)
        return self.last(h)


class Collects(Blocks):
    """The results of all blocks are in the loss."""

    def forward(self, x):
        h, found = self.first(x), []
        for layer in self.layers:
            h = layer(h)
            found.append(h)
        return self.last(torch.cat(found))


class Shares(Blocks):
    """One weight is in all blocks."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.linear.weight = self.layers[0].linear.weight


class Same(Blocks):
    """One block runs six times."""

    def __init__(self):
        super().__init__(*[Block()] * 6)


class Recomputes(Blocks):
    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.last(h)


class Hooked(Blocks):
    """Code of the model's in the backward of one block."""

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 2:
                h.register_hook(lambda gradient: gradient * 2)
        return self.last(h)


@torch.library.custom_op("test_repeats::passing", mutates_args=())
def passing(h: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return h + made


passing.register_fake(torch.add)
passing.register_autograd(lambda ctx, gradient: (None, gradient))


class OwnFormula(Blocks):
    """An op with a formula of its own, which gives no gradient to what is before it."""

    def __init__(self):
        super().__init__(*[Block() for _ in range(9)])

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            h = passing(h, layer.linear.bias * torch.ones_like(h)) if i == 2 else layer(h)
        return self.last(h)


class NoGrad(Blocks):
    """The same calls in all blocks; in one of them another one of two has no gradient."""

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            h = layer(h, _half_without_gradient(h, i == 2))
        return self.last(h)


def _half_without_gradient(h, first):
    with torch.set_grad_enabled(first):
        one = h.sin()
    with torch.set_grad_enabled(not first):
        return one * h.sin()


class NoGradInPlace(Blocks):
    """Two writes in place, of which autograd sees one: in one block the other one."""

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            mask = h * 1
            for factor in (3, 5):
                with torch.set_grad_enabled((factor == 3) == (i == 2)):
                    mask.mul_(factor)
            h = layer(h, mask)
        return self.last(h)


class HookedNode(Blocks):
    """A hook not on a tensor but on the node that made it."""

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 2:
                h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        return self.last(h)


class HookedSaved(Blocks):
    """One block saves for its backward what the model says."""

    def forward(self, x):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2)
            with hooks if i == 2 else contextlib.nullcontext():
                h = layer(h)
        return self.last(h)


class Turns(Blocks):
    """The gradient that comes from the block that mixes lies otherwise in memory, so the one before reshapes it."""

    def __init__(self):
        super().__init__(*[nn.Linear(4, 4) for _ in range(9)])
        self.mix = nn.Linear(5, 5)

    def forward(self, x):
        h = self.first(x).unsqueeze(1).repeat(1, 5, 1)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 4:
                h = self.mix(h.mT).mT
        return self.last(h)


class InPlace(Blocks):
    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
            h += 1
        return self.last(h)


class Inside(Blocks):
    """What only the gradient of a block in the middle depends on: a result of its own in the loss."""

    def forward(self, x):
        h, kept = self.first(x), 0
        for i, layer in enumerate(self.layers):
            if i == 3:
                kept = layer.norm(h).sum()
            h = layer(h)
        return self.last(h) + kept


class Later(Blocks):
    """A parameter of one block is used once more behind all of them."""

    def forward(self, x):
        return super().forward(x) * self.layers[2].linear.bias.sum()


CASES = {
    "equal": (Blocks, 3),
    "turns": (Turns, 4),
    "own formula": (OwnFormula, 0),
    "two kinds": (lambda: Blocks(*[Block(2.0, wide=bool(i % 2)) for i in range(9)]), 4),
    "another factor": (lambda: Blocks(*[Block(3.0 if i == 3 else 2.0) for i in range(7)]), 3),
    "frozen": (Frozen, 2),
    "in place": (InPlace, 3),
    "skips": (Skips, 0),
    "collects": (Collects, 0),
    "shares": (Shares, 0),
    "same": (Same, 0),
    "recomputes": (Recomputes, 0),
    "hooked": (Hooked, 0),
    "hooked node": (HookedNode, 0),
    "hooked saved": (HookedSaved, 0),
    "no grad": (NoGrad, 2),
    "no grad in place": (NoGradInPlace, 2),
    "negative zero": (lambda: Blocks(*[Block(-0.0 if i == 2 else 0.0) for i in range(6)]), 2),
    "inside": (Inside, 0),
    "later": (Later, 0),
}


def loss(model, batch):
    return model(batch["x"]).pow(2).sum()


def calls_of(model):
    graph = capture(model, loss, X, tell_unused=False)
    keys = ("fqn", "source", "backward", "tensor")
    nodes = [(n.name, n.op, n.target, repr((n.args, n.kwargs)), *map(n.meta.get, keys)) for n in graph.gm.graph.nodes]
    return nodes, graph.outputs


AT_NIGHT = {
    "collects",
    "in place",
    "negative zero",
    "recomputes",
    "same",
    "shares",
    "two kinds",
}  # others have each by day


@pytest.mark.parametrize("name", thinned(CASES, CASES.keys() - AT_NIGHT))
def test_copied_backward_is_the_traced_one(name, monkeypatch):
    make, copied = CASES[name]
    model, copies = make().double(), []
    copy = repeats._Plan._copied
    monkeypatch.setattr(repeats._Plan, "_copied", lambda *args: copies.append(args) or copy(*args))
    found = calls_of(model)
    assert len(copies) == copied
    monkeypatch.setattr(repeats, "FEWEST", 100)
    assert found == calls_of(model)
    assert len(copies) == copied
