"""Experts in mini-batches of several strategies: trained weights are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import ExactExperts, expert_mm, weighted_sum
from tests.runtime.hot import Case, hot, largest_error, loss_error, sequences

LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12)


class Routed(nn.Module):
    """Each token through three of six experts; nothing else mixes or moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.router, self.head = nn.Embedding(131, 16), nn.Linear(16, 6), nn.Linear(16, 131)
        self.up, self.down = nn.Parameter(torch.randn(6, 32, 16) * 0.2), nn.Parameter(torch.randn(6, 16, 16) * 0.2)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(position_ids[..., None] * 0.1)
        tokens = x.reshape(-1, 16)
        weights, ids = self.router(tokens).softmax(-1).topk(3, -1)
        gate, value = expert_mm(tokens[:, None].expand(-1, 3, -1), self.up.transpose(1, 2), ids).chunk(2, -1)
        return self.head(x + weighted_sum(expert_mm(F.silu(gate) * value, self.down, ids), weights).view(x.shape))


def routed() -> nn.Module:
    return Routed().double()


def other_strategies(model: Any) -> Callable[[Any], object]:
    """From the second step on: one of the first ones, with another limit, and one that is new."""
    changes = [{64: "tp4", 512: "ep2.tp2+sp"}]
    return lambda report: changes and model.change_strategies(changes.pop(), order=["tp4", "ep2.tp2+sp"])


def exact(model: Any) -> Callable[[Any], object]:
    """Exact for two steps; then its layer, which is the model, is taken back as in an earlier run."""
    watch = ExactExperts(model, residual=0.01, first_steps=2)

    def after(report: Any) -> None:
        found = watch.after(report)
        if report.step == 2:
            assert found == "experts see means of rows from now on: 2 steps were exact"
            watch.load_state([""])

    return after


CASES = {
    "zero, width, tokens": Case(
        [sequences(seed, LENGTHS) for seed in (3, 4)],
        {"strategies": {16: "dp4+zero3", 64: "tp4", 512: "cp2.tp2+sp"}, "checked": True},
        routed,
    ),
    "changed": Case(
        [sequences(seed, LENGTHS) for seed in (5, 6)],
        {"strategies": {16: "dp4", 512: "tp4"}, "checked": True},
        routed,
        watch=other_strategies,
    ),
    "exact for some steps, and for good": Case(
        [sequences(seed, LENGTHS) for seed in (5, 6, 7)],
        {"strategies": {16: "dp4", 512: "dp2.ep2+zero3+lsh(0.2)"}, "checked": True},
        routed,
        watch=exact,
    ),
}


RAN = {
    "changed": {"dp4", "tp4", "ep2.tp2+sp"},
    "exact for some steps, and for good": {"dp4", "dp2.ep2+zero3"},
}
AT_THEIR_EXPERTS = Case(
    [sequences(seed, LENGTHS) for seed in (5, 6)],
    {"strategies": {16: "dp4", 64: "dp2.ep2+zero3", 512: "ep2.tp2+sp"}, "checked": True},
    routed,
)


@pytest.fixture(scope="module")
def trained() -> dict[str, dict]:
    return hot(CASES)


@pytest.mark.nightly
def test_these_are_together_in_two_cases_of_the_day():
    equal_to_one_device(hot({"": AT_THEIR_EXPERTS})[""], AT_THEIR_EXPERTS)


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_are_those_of_one_device(trained, name):
    equal_to_one_device(trained[name], CASES[name], RAN.get(name))


def equal_to_one_device(have: dict, case: Case, ran_by_name: set[str] | None = None) -> None:
    want = case.one_device()
    ran = {group.strategy for report in have["reports"] for group in report.groups}
    assert ran == (ran_by_name or set(case.options["strategies"].values()))
    (load,) = have["reports"][0].experts
    assert len(load.experts) == 6
    assert sum(load.experts) >= 3 * sum(LENGTHS)
    assert all(load.ranks)
    assert loss_error(have["losses"], want["losses"]) <= 1e-12
    assert largest_error(have["grads"], want["grads"]) <= 1e-10
    assert largest_error(have["params"], want["params"]) <= 1e-9
