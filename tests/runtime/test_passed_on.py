"""Groups whose gradients lie alike add to the same ones, which leave once."""

from __future__ import annotations

import pytest

from tests.runtime.hot import Case, hot, largest_error, loss_error, sequences, small, stacked

DENSE = {16: "dp2.tp2+sp", 64: "dp2.tp2+sp+remat", 512: "dp4"}
STAGES = {16: "dp2.pp2", 64: "dp2.pp2+zb_h1+remat", 512: "dp4"}
ZERO = {16: "dp4+zero3", 64: "dp4+zero3+remat", 512: "dp4+zero2"}
ONE = {16: "dp4", 64: "dp4", 512: "dp4+remat"}  # some replicas have nothing to run
LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2)
CASES = {
    f"{name}{', overlapped' * overlap}": Case(
        [sequences(1, LENGTHS), sequences(2, (5, 40, 100))],
        {"strategies": strategies, "overlap": overlap, "order": list(dict.fromkeys(strategies.values())), **more},
        make,
    )
    for name, make, strategies, more in (
        ("dense", small, DENSE, {}),
        ("arena", small, DENSE, {"resident": []}),
        ("stages", stacked, STAGES, {}),
        ("zero", small, ZERO, {}),
        ("one", small, ONE, {}),
        ("chain", small, DENSE, {"gradients": "chain"}),
    )
    for overlap in (False, True)
}
# Groups behind which nothing leaves: those before the last of a kind; gradients of ZeRO are made where their home is.
KEPT = {"dense": 1, "arena": 1, "stages": 1, "zero": 3, "one": 2, "chain": 0}


@pytest.fixture(scope="module")
def found():
    return hot(CASES)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name, found):
    have, want = found[name], CASES[name].one_device()
    assert loss_error(have["losses"], want["losses"]) <= 1e-10
    assert largest_error(have["grads"], want["grads"]) <= 1e-10
    kept = [not group.reduce_bytes for group in have["reports"][0].groups]
    kind, _, overlapped = name.partition(",")
    # What takes turns in the arena is written over while gradients, which may be views of it, leave.
    assert sum(kept) == (0 if kind == "arena" and overlapped else KEPT[kind])
    predicted = [not group.predicted_reduce_s for group in have["reports"][0].groups]
    assert predicted == kept or kind == "chain"
