"""Plain values survive JSON unchanged; what cannot is named with its place."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.checkpoint.plain import PlainValueError, decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.just({"__fxpar__": 1}),
    max_leaves=20,
)


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "extra"))))


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(a, b) and same(v, w) for (a, v), (b, w) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(VALUES)
def test_round_trip(value):
    assert same(through_json(value), value)


def test_random_state_of_python():
    state = random.Random(3).getstate()
    random.Random().setstate(through_json(state))
    assert same(through_json(state), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensor(dtype):
    value = (torch.randn(2, 3, dtype=torch.float64) * 3).to(dtype)
    back = through_json({"a": [value]})["a"][0]
    assert back.dtype == dtype
    assert torch.equal(back, value)


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"x", torch.zeros(5000)])
def test_names_the_place(bad):
    with pytest.raises(PlainValueError, match=r"extra\.loader\[1\] is an? "):
        encode({"loader": [0, bad]}, "extra")
