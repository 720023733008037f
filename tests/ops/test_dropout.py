"""`fxpar::dropout`: the mask is a good one, and the same for any slicing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import OpInputError
from fxpar.ops.dropout import _key, _mix, _mix_int, dropout, index_strides
from tests.repeat import examples

own = torch.ops.fxpar
SEED = torch.tensor(1234)


def kept(n: int, p: float = 0.5, seed: int = 1234, salt: int = 0) -> torch.Tensor:
    return dropout(torch.ones(n), p, torch.tensor(seed), salt) != 0


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(p):
    n = 200_000
    share = 1.0 - kept(n, p).double().mean().item()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two fair masks, in standard deviations of what chance gives."""
    return abs(((a.double() - 0.5) * (b.double() - 0.5)).mean().item() * 4) * math.sqrt(len(a))


@pytest.mark.parametrize("distance", [1, 2, 3, 7, 8, 64, 1024, 4096])
def test_neighbours_are_independent(distance):
    mask = kept(200_000)
    assert correlation(mask[distance:], mask[:-distance]) < 5


@pytest.mark.parametrize(
    "other", [{"seed": 1235}, {"seed": -1234}, {"salt": 1}, {"salt": 2**40}, {"seed": 1235, "salt": -1}]
)
def test_seeds_and_salts_give_independent_masks(other):
    mask, more = kept(200_000), kept(200_000, **other)
    assert correlation(mask, more) < 5
    assert correlation(mask[1:], more[:-1]) < 5  # nor is one the other, shifted


def test_equal_seeds_and_salts_give_equal_masks():
    assert torch.equal(kept(1000), kept(1000))


def test_bits_are_uniform_in_blocks_of_sixteen():
    """Counts of kept elements in runs of 16 follow the binomial distribution (chi-square, 16 degrees of freedom)."""
    counts = kept(16 * 20_000).view(-1, 16).sum(1).bincount(minlength=17).double()
    expected = torch.tensor([math.comb(16, i) / 2**16 * 20_000 for i in range(17)]).double()
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_values():
    x = torch.randn(1000, dtype=torch.float64)
    y = dropout(x, 0.2, SEED, 0)
    mask = y != 0
    torch.testing.assert_close(y[mask], x[mask] / 0.8)
    assert 0 < (~mask).sum() < 400
    assert torch.equal(dropout(x, 0.0, SEED, 0), x)
    assert (dropout(x, 1.0, SEED, 0) == 0).all()
    assert (dropout(torch.full((99,), torch.nan), 1.0, SEED, 0) == 0).all()
    assert (dropout(torch.full((99,), torch.inf), 0.5, SEED, 0) == 0).any()  # dropped, not inf * 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_mask_is_the_same_in_all_dtypes(dtype):
    y = dropout(torch.ones(500, dtype=dtype), 0.5, SEED, 0)
    assert y.dtype == dtype
    assert torch.equal(y != 0, kept(500))


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.data(),
)
@settings(max_examples=examples(25))
def test_a_slice_of_the_result_is_the_result_of_the_slice(shape, data):
    x = torch.randn(shape)
    whole = dropout(x, 0.4, SEED, 3)
    offsets = [torch.arange(n) * s for n, s in zip(shape, index_strides(len(shape)), strict=True)]
    for d, n in enumerate(shape):  # any indices of each dim, in any order: strided shards too
        index = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=n)), dtype=torch.int64)
        x, whole = x.index_select(d, index), whole.index_select(d, index)
        offsets[d] = offsets[d][index]
    assert torch.equal(own.dropout(x, SEED, offsets, 0.4, 3), whole)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 12), st.data())
@settings(max_examples=examples(25))
def test_blocks_do_not_change_the_mask(shape, block, data):
    from fxpar.ops import dropout as module

    order = data.draw(st.permutations(range(len(shape))))
    x = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    want = dropout(x, 0.4, SEED, 0)
    before, module._CPU_BLOCK = module._CPU_BLOCK, block
    try:
        got = dropout(x, 0.4, SEED, 0)
    finally:
        module._CPU_BLOCK = before
    assert torch.equal(got, want)
    assert got.stride() == want.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_odd_shapes(shape):
    x = torch.ones(shape)
    assert dropout(x, 0.5, SEED, 0).shape == x.shape


def test_gradient_has_the_mask_of_the_forward():
    x = torch.randn(20, 30, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.3, SEED, 5)
    g = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
    torch.testing.assert_close(grad, torch.where(y != 0, g / 0.7, 0.0))
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.3, SEED, 5), x)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_mixing_of_ints_and_of_tensors_is_the_same(z, salt):
    assert _mix_int(z) == int(_mix(torch.tensor(z)))
    meta = torch.tensor(z)
    assert isinstance(_key(meta, salt), int)


def test_first_outputs_are_those_of_splitmix64():
    """The published sequence for seed 1234567, less the last step of the mixing function."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    for i, want in enumerate(published, 1):
        state = (1234567 + i * gamma) % 2**64
        z = _mix_int(state - 2**64 if state >= 2**63 else state) % 2**64
        assert z ^ (z >> 31) == want


def test_bad_inputs_are_named():
    x = torch.ones(2, 3)
    with pytest.raises(OpInputError, match=r"p is a probability, got 1\.5"):
        dropout(x, 1.5, SEED, 0)
    with pytest.raises(OpInputError, match=r"one offset per index of each dim, got \[\(2,\)\]"):
        own.dropout(x, SEED, [torch.arange(2)], 0.5, 0)


@pytest.mark.gpu
def test_gpu_has_the_bits_of_the_cpu():
    for shape in ((1000,), (3, 5, 7), ()):
        x = torch.randn(shape)
        for seed, salt in ((0, 0), (-5, 2**40), (2**62, -1)):
            want = dropout(x, 0.3, torch.tensor(seed), salt)
            got = dropout(x.cuda(), 0.3, torch.tensor(seed).cuda(), salt)
            assert torch.equal(got.cpu(), want)
