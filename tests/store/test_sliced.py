"""Initializers on one slice: values do not depend on it, and only what has to be whole is made whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxpar.store.sliced import Slice, Sliced, cut, sliced_init
from tests.repeat import examples

SHAPE = (6, 8)
BY_SLICE = {
    "normal_": lambda w: nn.init.normal_(w, std=0.3),
    "data.normal_": lambda w: w.data.normal_(mean=0.0, std=0.02),
    "uniform_": lambda w: nn.init.uniform_(w, -1, 2),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.06, b=0.06),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "constant_": lambda w: nn.init.constant_(w, 0.5),
    "scaled": lambda w: w.normal_().mul_(0.5).add_(1, alpha=2).div_(3).clamp_(min=-1).sub_(torch.tensor(0.25)),
}
WHOLE = {
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "one row": lambda w: w[2].zero_(),
    "a part": lambda w: w.data[1:3].fill_(7.0),
    "copy_": lambda w: w.copy_(torch.arange(48.0).view(SHAPE)),
    "another's": lambda w: w.mul_(w),
    "generator": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
    "generator, truncated": lambda w: nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(3)),
    "kth": lambda w: w.copy_(w.flatten().sort().values.view(SHAPE)),
}


def filled(box, *actions, dtype=torch.float32, seed=1):
    part = Slice("layer.weight", SHAPE, box, dtype, torch.device("cpu"), seed)
    weight = nn.Parameter(Sliced(part))
    torch.manual_seed(0)  # for what draws whole tensors by torch's generator
    with torch.no_grad(), sliced_init():
        for action in actions:
            action(weight)
    return part


everything = tuple((0, size) for size in SHAPE)
rows = st.tuples(st.integers(0, SHAPE[0]), st.integers(0, SHAPE[0])).map(sorted)
columns = st.tuples(st.integers(0, SHAPE[1]), st.integers(0, SHAPE[1])).map(sorted)


@settings(max_examples=examples(80), deadline=None)
@given(
    box=st.tuples(rows, columns),
    names=st.lists(st.sampled_from([*BY_SLICE, *WHOLE]), min_size=1, max_size=3),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_a_slice_has_the_values_of_the_whole(box, names, dtype):
    actions = [(BY_SLICE | WHOLE)[name] for name in names]
    part, whole = (filled(b, *actions, dtype=dtype) for b in (box, everything))
    assert torch.equal(part.value, cut(whole.value, box))
    assert part.value.shape == tuple(stop - start for start, stop in box)
    assert (part.whole is None) == all(name in BY_SLICE for name in names)


@pytest.mark.parametrize("name", BY_SLICE)
def test_what_nn_init_means_is_done(name):
    """Mean, deviation and bounds are those of torch on a plain tensor."""
    shape = (400, 300)
    part = Slice("w", shape, tuple((0, size) for size in shape), torch.float32, torch.device("cpu"), 0)
    with torch.no_grad(), sliced_init():
        BY_SLICE[name](Sliced(part))
        plain = torch.zeros(shape)
        BY_SLICE[name](plain)
    assert abs(part.value.mean() - plain.mean()) <= 0.02 * plain.abs().max()
    assert abs(part.value.std() - plain.std()) <= 0.02 * plain.std()
    assert part.value.abs().max() <= 1.5 * plain.abs().max()


def test_draws_differ():
    """Each draw of a parameter, each parameter and each seed has numbers of its own."""
    once = filled(everything, nn.init.normal_).value
    assert torch.equal(once, filled(everything, nn.init.normal_).value)
    assert not torch.equal(once, filled(everything, nn.init.normal_, nn.init.normal_).value)
    assert not torch.equal(once, filled(everything, nn.init.normal_, seed=2).value)


def test_what_was_done_to_a_slice_is_done_to_the_whole():
    """An op that needs the whole meets the values that the slices have."""
    want = filled(everything, nn.init.normal_, nn.init.normal_).value.clone()
    want[2] = 0
    part = filled(((1, 4), (2, 8)), nn.init.normal_, nn.init.normal_, WHOLE["one row"])
    assert part.whole is not None
    assert torch.equal(part.value, want[1:4, 2:8])


def test_nothing_whole_is_made(monkeypatch):
    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append(zeros(*args, **kwargs)) or made[-1])
    filled(((1, 2), (0, 8)), *BY_SLICE.values())
    assert {tensor.numel() for tensor in made} == {8}


def test_torch_has_its_own_function_back():
    usual = nn.init._no_grad_trunc_normal_
    with sliced_init(), sliced_init():
        assert nn.init._no_grad_trunc_normal_ is not usual
        assert nn.init.trunc_normal_(torch.empty(3, 3)).abs().max() <= 2
    assert nn.init._no_grad_trunc_normal_ is usual
