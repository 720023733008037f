"""Groups whose gradients lie alike add to the same ones, which leave once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.hot import Case, Small, hot, largest_error, loss_error, sequences, small, stacked

DENSE = {16: "dp2.tp2+sp", 64: "dp2.tp2+sp+remat", 512: "dp4"}
STAGES = {16: "dp2.pp2", 64: "dp2.pp2+zb_h1+remat", 512: "dp4"}
ZERO = {16: "dp4+zero3", 64: "dp4+zero3+remat", 512: "dp4+zero2"}
ONE = {16: "dp4", 64: "dp4", 512: "dp4+remat"}  # some replicas have nothing to run
LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2)


class Twins(nn.Module):
    """Two parameters have one gradient: a number that is expanded behind the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.one, self.other = Small(), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(input_ids, position_ids) * (1 + (self.one + self.other).sum())


class Turned(nn.Module):
    """A gradient is a view of another one: what is added to needs memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.one, self.other = Small(), nn.Parameter(torch.eye(131)), nn.Parameter(torch.zeros(131, 131))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(input_ids, position_ids) @ (self.one + self.other.T)


def twins() -> nn.Module:
    return Twins().double()


def turned() -> nn.Module:
    return Turned().double()


CASES = {
    f"{name}{', overlapped' * overlap}": Case(
        [sequences(1, LENGTHS), sequences(2, (5, 6, 40, 100))],
        {"strategies": strategies, "overlap": overlap, "order": list(dict.fromkeys(strategies.values())), **more},
        make,
    )
    for name, make, strategies, more in (
        ("dense", small, DENSE, {}),
        ("arena", small, DENSE, {"resident": []}),
        ("stages", stacked, STAGES, {}),
        ("zero", small, ZERO, {}),
        ("one", turned, ONE, {}),
        ("twins", twins, ONE, {}),
        ("chain", small, DENSE, {"gradients": "chain"}),
    )
    for overlap in (False, True)
}
# Groups behind which nothing leaves: those before the last of a kind, if gradients are not expanded behind them.
KEPT = {"dense": 1, "arena": 1, "stages": 1, "zero": 2, "one": 2, "twins": 0, "chain": 0}


@pytest.fixture(scope="module")
def found():
    return hot(CASES)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name, found):
    have, want = found[name], CASES[name].one_device()
    assert loss_error(have["losses"], want["losses"]) <= 1e-10
    assert largest_error(have["grads"], want["grads"]) <= 1e-10
    kind, _, overlapped = name.partition(",")
    groups = have["reports"][0].groups
    kept = [not group.predicted_reduce_s for group in groups]
    # What takes turns in the arena is written over while gradients, which may be views of it, leave.
    assert sum(kept) == (0 if kind == "arena" and overlapped else KEPT[kind])
    # Gradients of ZeRO are made where their home is.
    assert [not group.reduce_bytes for group in groups] == kept or kind == "zero"
