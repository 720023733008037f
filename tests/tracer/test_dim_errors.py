"""Dims that cannot stay free, and what is said of them."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from fxpar import errors, losses
from fxpar.tracer import capture
from tests.tracer.models import MLP, Decoder
from tests.tracer.test_errors import With, X, sum_loss


def equal(x):
    return x * 2 if x.shape[0] == 6 else x


def divisible(x):
    return x.view(-1, 2, 4) if x.shape[0] % 2 == 0 else x


def fixed(x):
    return x + torch.ones(6, 1)


@pytest.mark.parametrize("function", [equal, divisible, fixed])
def test_specialized_shape(function):
    with pytest.raises(
        errors.SpecializedShapeError, match=r"B, the rows of the batch, should be free.*test_dim_errors.py:"
    ):
        capture(With(function), sum_loss, X)
    capture(With(function), sum_loss, X, dynamic=None)


def length(x):
    return x * len(x)


def rows(x):
    return torch.stack([row * 2 for row in x])


@pytest.mark.parametrize(
    ("function", "what"), [(length, r"len\(\) of a tensor"), (rows, "the number of turns of a loop over a tensor")]
)
def test_the_length_of_a_tensor(function, what):
    """Python makes a number of it, which holds for the example alone: said with the line, and what to write."""
    message = rf"^{what} is a fixed number in Python, but B, the rows of the batch, .*test_dim_errors\.py:\d+"
    with pytest.raises(errors.FixedLengthError, match=message):
        capture(With(function), sum_loss, X)
    capture(With(function), sum_loss, X, dynamic=None)
    capture(With(lambda x: x * len(x[0])), sum_loss, X)  # a size that is fixed anyway


@functools.lru_cache
def counted(n):
    return torch.arange(n)[:, None]


@pytest.mark.parametrize("function", [lambda x: x * counted(x.shape[0]), lambda x: x * {6: 2.0}[x.shape[0]]])
def test_a_size_as_a_key(function):
    message = r"^the key of a dict or of a cached function is a fixed number.* B, the rows .*test_dim_errors\.py:\d+"
    with pytest.raises(errors.FixedLengthError, match=message):
        capture(With(function), sum_loss, X)


def shapes(x):
    return x @ torch.ones(3, 3)


def op_of_torch(x):
    return torch.ops.aten.mm(x, torch.ones(3, 3))


@pytest.mark.parametrize("function", [shapes, op_of_torch])
def test_torchs_own_symbols_are_not_shown(function):
    with pytest.raises(RuntimeError) as caught:
        capture(With(function), sum_loss, X)
    text = str(caught.value)
    assert "B" in text
    assert not re.search(r"\bs\d+\b", text)
    if function is op_of_torch:
        assert any(note.startswith("raised by the op aten.mm") for note in caught.value.__notes__)


def test_the_shape_of_a_loss_names_its_dims():
    with pytest.raises(errors.LossError, match=r"of shape \(B, "):
        capture(MLP(), lambda m, b: m(b["x"]), X)


def test_bound_is_kept():
    def bounded(x):
        assert x.shape[0] < 100
        assert x.shape[0] * 2 >= 6
        return x

    (dim,) = capture(With(bounded), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (3, 99)


BRANCHES = {
    "a quotient": (lambda n: n // 4 > 0, 4, None),
    "a quotient, from above": (lambda n: n // 4 <= 1, 1, 7),
    "a quotient of floats": (lambda n: n / 4 < 2.5, 1, 9),
    "a square": (lambda n: n**2 > 20, 5, None),
    "a root": (lambda n: n**0.5 <= 3, 1, 9),
    "a sum": (lambda n: 3 * (n // 2) + n >= 15, 6, None),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_what_grows_with_a_size_is_a_bound(name):
    holds, minimum, maximum = BRANCHES[name]
    (dim,) = capture(With(lambda x: x * 2 if holds(x.shape[0]) else x), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (minimum, maximum)
    assert [n for n in range(1, 30) if bool(holds(n)) == bool(holds(6))] == list(range(minimum, (maximum or 29) + 1))


@pytest.mark.parametrize(
    "holds", [lambda n: torch.sym_min((n - 9) ** 2, n) > 3, lambda n: n % 4 > 1, lambda n: (n - 3) * (7 - n) > 2]
)
def test_a_branch_on_what_rises_and_falls_is_none(holds):
    with pytest.raises(errors.SpecializedShapeError, match=r"test_dim_errors.py:"):
        capture(With(lambda x: x * 2 if holds(x.shape[0]) else x), sum_loss, X)


@pytest.mark.parametrize(
    "holds",
    [
        lambda n: abs(n * 0.5 - 2000.0) > 0.6,
        lambda n: (n - 3999.5) * (n - 4000.5) > 0,
        lambda n: (n * 0.1 - 400) * (n * 0.1 - 400) > 0.001,
    ],
)
def test_a_branch_on_fractions_around_one_size_is_none(holds):
    """No sample of sizes shows it: both sides of 4000 are alike."""
    with pytest.raises(errors.SpecializedShapeError, match=r"test_dim_errors.py:"):
        capture(With(lambda x: x * 2 if holds(x.shape[0]) else x), sum_loss, X)


@pytest.mark.parametrize(
    ("number", "maximum"), [(lambda n: (4 * n - 1) // n, None), (lambda n: n // 8, 7), (lambda n: (n + 3) // 16, 12)]
)
def test_a_loop_over_a_quotient_is_what_the_quotient_means(number, maximum):
    (dim,) = capture(With(lambda x: sum(x * i for i in range(number(x.shape[0]) + 1))), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (1, maximum)


def test_a_quotient_that_only_some_sizes_have_fixes_them():
    with pytest.raises(errors.SpecializedShapeError, match=r"holds only where .*//2.*test_dim_errors.py:"):
        capture(With(lambda x: sum(x * i for i in range(x.shape[0] // 2))), sum_loss, X)


@pytest.mark.parametrize("text", [str, repr, lambda n: f"{n}"])
def test_a_text_of_a_size_is_told(text):
    with pytest.warns(errors.FxparWarning, match=r"test_dim_errors.py:\d+ makes a text of B, the rows of the batch"):
        capture(With(lambda x: x * 2 if text(x.shape[0]) == "6" else x), sum_loss, X)


def test_of_a_remainder_is_said_where_it_may_stand():
    with pytest.raises(errors.SpecializedShapeError, match=r"a remainder may stand in sizes and numbers"):
        capture(With(divisible), sum_loss, X)
    capture(With(lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4))), sum_loss, X)


@pytest.mark.parametrize(
    "one_row", [lambda x: x.shape[0] == 1, lambda x: not x.shape[0] > 1, lambda x: x.numel() <= x.shape[1]]
)
def test_a_branch_for_one_row_is_a_bound(one_row):
    """Torch asks whether a size is 1 to pick a shortcut; a model that asks computes something else there."""
    (dim,) = capture(With(lambda x: x * 2 if one_row(x) else x), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (2, None)
    (dim,) = capture(With(lambda x: [x.squeeze(0), x * 2 if one_row(x) else x][1]), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (2, None)
    (dim,) = capture(With(lambda x: x.squeeze(0) if x.shape[0] > 0 else x), sum_loss, X).dims
    assert (dim.minimum, dim.maximum) == (1, None)


def test_shared_dim_of_two_inputs_is_one_dim():
    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).sum()

    with pytest.raises(errors.SpecializedShapeError, match="A and B"):
        capture(MLP(), loss, X, dynamic={"x": {0: "A"}, "y": {0: "B"}})
    capture(MLP(), loss, X, dynamic={"x": {0: "A"}, "y": {-2: "A"}})


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("always", "'auto'"),
        ({"z": {0: "B"}}, "the batch has x, y"),
        ({"x": {2: "B"}}, "2-dim tensor"),
        ({"x": {0: "B", 1: "B"}}, "is 6 in x"),
    ],
)
def test_bad_dynamic(dynamic, message):
    with pytest.raises(errors.DynamicDimError, match=message):
        capture(MLP(), sum_loss, X, dynamic=dynamic)


def test_an_example_of_no_rows():
    """Bounds would be those of an empty batch."""
    empty = {key: value[:0] for key, value in X.items()}
    with pytest.raises(errors.DynamicDimError, match="B, the rows of the batch, is 0: the example batch has nothing"):
        capture(MLP(), sum_loss, empty)


def test_ambiguous_tokens():
    batch = {"input_ids": torch.zeros(4, 4, dtype=torch.long), "weights": torch.ones(4)}
    with pytest.raises(errors.DynamicDimError, match="'weights'"):
        capture(Decoder(), losses.causal_lm, batch)
