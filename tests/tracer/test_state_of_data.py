"""State that is made once of data, such as a scale made of the first batch, and values handed on within a call."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import fxpar
from tests.tracer.test_state import WIDTH, Model, said_of


class Once(Model):
    """What the first call makes of data, or has found out, and later ones compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.by_name, self.started, self.turn = None, {}, False, "odd"
        self.one, self.other = nn.Tanh(), nn.ReLU()


def act_norm(model: Once, x: Tensor) -> Tensor:
    if model.scale is None:
        model.scale = 1 / (x.detach().std((0, 1)) + 0.1)
    return x * model.scale


def act_norm_in_dict(model: Once, x: Tensor) -> Tensor:
    if not model.by_name:
        model.by_name["scale"] = x.detach().abs().amax()
    return x * model.by_name["scale"]


def of_a_weight(model: Once, x: Tensor) -> Tensor:
    if model.scale is None:
        model.scale = model.head.weight.norm()
    return x * model.scale


def of_a_new_buffer(model: Once, x: Tensor) -> Tensor:
    if not hasattr(model, "shift"):
        model.register_buffer("shift", x.detach().mean((0, 1)))
    return x - model.shift


def first_call(model: Once, x: Tensor) -> Tensor:
    if not model.started:
        model.started = True
        return x * 2
    return x * 3


def turns(model: Once, x: Tensor) -> Tensor:
    model.turn = "even" if model.turn == "odd" else "odd"
    return x * len(model.turn)


def switches_modes(model: Once, x: Tensor) -> Tensor:
    model.train(not model.training)
    return x * 2 if model.training else x


def swaps_modules(model: Once, x: Tensor) -> Tensor:
    model.one, model.other = model.other, model.one
    return model.one(x)


ONCE = {
    act_norm: "scale from None to a tensor [8]",
    act_norm_in_dict: "by_name['scale'] to a tensor []",
    of_a_weight: "scale from None to a tensor []",
    of_a_new_buffer: "shift to a tensor [8]",
    first_call: "started from False to True",
    turns: "turn from 'odd' to 'even'",
    switches_modes: "training from True to False",
    swaps_modules: "one from a Tanh to a ReLU",
}


@pytest.mark.parametrize("kept", ONCE)
def test_what_is_made_once_of_data_is_state(kept):
    said = said_of(type("Made", (Once,), {"kept": kept})())
    assert any(f"the forward of the model sets {ONCE[kept]}" in text for text in said)
    assert sum(" training " in text for text in said) <= 1


class FirstLoss:
    def __init__(self) -> None:
        self.first = None

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = fxpar.losses.causal_lm(model, batch)
        if self.first is None:
            self.first = loss.detach()
        return loss / self.first


def test_a_loss_over_its_first_value_is_state():
    scale, said = said_of(Model(), FirstLoss())
    assert scale.startswith("the loss is ")
    assert "a FirstLoss, sets first to a tensor []" in said


class HandingOn(Model):
    """Sets what the loss reads in the same call, and freezes a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.by_layer, self.auxiliary = nn.BatchNorm1d(WIDTH), {}, None

    def kept(self, x: Tensor) -> Tensor:
        self.norm.eval()
        self.auxiliary = x.square().sum()
        self.by_layer["head"] = [x.abs().sum()]
        return x


def test_what_is_handed_on_within_a_call_is_no_state():
    def loss(model: HandingOn, batch: dict[str, Tensor]) -> Tensor:
        return fxpar.losses.causal_lm(model, batch) + model.auxiliary + model.by_layer["head"][0]

    model = HandingOn()
    assert [text for text in said_of(model, loss) if "sets" in text] == []
    assert model.auxiliary is None
    assert model.norm.training
