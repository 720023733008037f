"""Fewer key-value heads than ranks of tp, in mini-batches of several strategies: trained weights are one device's."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from tests.runtime.hot import Case, hot, largest_error, loss_error, make_llama, sequences

LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12)


def few(kv_heads: int, layers: int = 1) -> nn.Module:
    sizes = {"layers": str(layers), "dim": "64", "heads": "8", "kv_heads": str(kv_heads), "ffn": "48"}
    return make_llama(**sizes)


two, one, deep = functools.partial(few, 2), functools.partial(few, 1), functools.partial(few, 1, 2)
BATCHES = [sequences(seed, LENGTHS) for seed in (3, 4)]
CASES = {
    "chain, arena only": Case(
        BATCHES,
        {
            "strategies": {16: "dp4+zero3", 64: "tp4+sp", 512: "dp2.tp2"},
            **{"gradients": "chain", "resident": [], "checked": True},
        },
        two,
    ),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, dict]:
    return hot(CASES)


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_are_those_of_one_device(trained, name):
    have, case = trained[name], CASES[name]
    want = case.one_device()
    assert {group.strategy for group in have["reports"][0].groups} == set(case.options["strategies"].values())
    assert loss_error(have["losses"], want["losses"]) <= 1e-12
    assert largest_error(have["grads"], want["grads"]) <= 1e-9
    assert largest_error(have["params"], want["params"]) <= 1e-9


MORE = {
    4: {
        "two heads": Case(BATCHES, {"strategies": {16: "dp4", 64: "tp4+sp", 512: "dp2.tp2"}}, two),
        "two heads, chain, arena only": Case(
            BATCHES,
            {"strategies": {64: "tp4", 512: "dp4+zero3"}, "gradients": "chain", "resident": [], "checked": True},
            two,
        ),
        "one head, zero": Case(BATCHES, {"strategies": {64: "tp4", 512: "dp2.tp2+zero3"}}, one),
        "one head, stages": Case(BATCHES, {"strategies": {64: "pp2.tp2", 512: "tp4+sp"}}, deep),
    },
    8: {
        "stages of four": Case(
            BATCHES[:1], {"strategies": {64: "pp2.tp4+sp", 512: "dp2.tp4+zero2"}}, functools.partial(few, 2, 2)
        ),
        "eight": Case(BATCHES[:1], {"strategies": {16: "dp8", 64: "dp2.tp4", 512: "tp8"}}, two),
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("world", MORE)
def test_more_of_them(world):
    for name, have in hot(MORE[world], world=world).items():
        want = MORE[world][name].one_device()
        assert largest_error(have["grads"], want["grads"]) <= 1e-9
        assert largest_error(have["params"], want["params"]) <= 1e-9
