"""A backward that the model writes itself is no derivative that the flow of the forward says anything of."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar import losses
from fxpar.flow import padding_hazard
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.tracer import capture, capture_forward
from tests.captured import tokens


class Normed(torch.autograd.Function):
    """The identity; its gradient has the norm of all tokens in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def hooked(x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda grad: grad.flip(1))
    return x


class Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], hook: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)
        self.between = between
        if hook:
            self.inner.register_full_backward_hook(lambda module, given, made: (given[0].cumsum(1),))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.between(self.inner(self.embedding(input_ids))))


OWN = {
    "a function": (Model(Normed.apply), "the backward of Normed, an autograd.Function, may mix tokens"),
    "a hook": (Model(hooked), r"a hook on a gradient, at .*test_own_backward.py:\d+, may mix tokens"),
    "a module's hook": (Model(nn.Identity(), hook=True), "the backward of BackwardHookFunction, an autograd.Function"),
}
ONES_OF_TORCH = {
    "plain": torch.tanh,
    "an op of fxpar with a formula": lambda x: nn.functional.dropout(x, 0.5),
    "checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
}


@pytest.mark.parametrize(("model", "why"), OWN.values(), ids=OWN)
def test_rows_are_neither_packed_nor_padded(model, why):
    (batch,) = tokens(13, 6)
    logical = capture(model, losses.causal_lm, batch)
    packed, said = packed_if_proved(logical)
    assert packed.packing is None
    assert re.search(why, said)
    assert re.search(why, padding_hazard(logical) or "")


@pytest.mark.parametrize("between", ONES_OF_TORCH.values(), ids=ONES_OF_TORCH)
def test_what_torch_differentiates_is_packed(between):
    (batch,) = tokens(13, 6)
    packed, said = packed_if_proved(capture(Model(between), losses.causal_lm, batch))
    assert (packed.packing is not None, said) == (True, "")


def test_a_plain_call_with_gradients_is_not_padded():
    ids = torch.arange(6)[None]
    of = {gradients: capture_forward(Model(Normed.apply), (ids,), gradients=gradients) for gradients in (True, False)}
    assert "Normed" in (padding_hazard(of[True]) or "")
    assert padding_hazard(of[False]) is None
