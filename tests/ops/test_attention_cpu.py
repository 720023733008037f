"""The CPU kernels: how documents are found, and how work is cut into blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.ops import attention_cpu
from fxpar.ops.attention_cpu import MaskRule, bshe, document_runs


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([[5, 5, 5]], [[3]]),
        ([[0, 0, 1, 2, 2]], [[2, 3, 5]]),
        ([[7, 7, 1, 1]], [[2, 4]]),  # decreasing is as good as increasing
        ([[0, 1, 1], [4, 2, 2]], [[1, 3]]),  # rows cut alike are given once
        ([[0, 0, 1], [0, 1, 1]], [[2, 3], [1, 3]]),
        ([[0, 1, 0]], None),
        ([[0, 0, 1], [1, 0, 1]], None),
    ],
)
def test_document_runs(ids, runs):
    assert document_runs(torch.tensor(ids)) == runs


def packed(ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Forward and backward of two rows of six tokens."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    rule = MaskRule(ids, mask, True, 0, 0.3, 0.0)
    out, lse = attention_cpu.forward(q, k, v, rule)
    return out, lse, *attention_cpu.backward(dout, q, k, v, out, lse, rule)


def test_documents_are_looked_for_again_when_their_ids_change():
    """Where they begin and end is kept with the tensor, as all layers ask."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    first = packed(ids)
    ids[0, 2] = 1
    second = packed(ids)
    assert all(torch.equal(a, b) for a, b in zip(second, packed(ids.clone()), strict=True))
    assert not torch.equal(first[0], second[0])
    with torch.inference_mode():  # such a tensor does not say that it was written to
        ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
        packed(ids)
        ids[0, 2] = 1
        assert torch.equal(packed(ids)[0], second[0])


@pytest.mark.parametrize("rows", [[[0, 0, 0, 1, 1, 1]], [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]], [[3] * 6]])
@pytest.mark.parametrize("masked", [False, True])
def test_documents_one_by_one_are_what_blocks_with_ids_compute(rows, masked):
    ids = torch.tensor(rows)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) if masked else None
    torch.manual_seed(0)
    q, dout = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    rule = MaskRule(ids, mask, True, 0, 0.3, 0.0)
    out, lse = attention_cpu.forward_blocks(q, k, v, rule)
    expected = (out, lse, *attention_cpu.backward_blocks(dout, q, k, v, out, lse, rule))
    for found, wanted in zip(packed(ids, mask), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_bshe_copies_only_what_lies_otherwise():
    lying_right = torch.randn(2, 5, 3, 4).transpose(1, 2)
    assert bshe(lying_right) is lying_right
    other = torch.randn(2, 3, 5, 4)
    assert bshe(other).transpose(1, 2).is_contiguous()
    assert torch.equal(bshe(other), other)


@given(
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([1, 100, 4096, 32768]),
    st.sampled_from([0, 1, 128, 5000]),
    st.booleans(),
)
def test_blocks_cover_everything_once_and_stay_small(B, Hkv, group, S, window, causal):
    one = torch.empty(1)  # expanded: nothing of that size is allocated
    q, k = one.expand(B, Hkv * group, S, 8), one.expand(B, Hkv, S, 8)
    rule = MaskRule(None, None, causal, window, 1.0, 0.0)
    covered = torch.zeros(B, Hkv, dtype=torch.int64)
    limit = attention_cpu._CPU_BLOCK_SCORES
    starved = 2 * attention_cpu._MIN_BLOCK_ROWS * S  # one head, fewest rows, all keys
    last = None
    for last in attention_cpu._parts(q, k, rule):
        covered[last.b0 : last.b1, last.h0 : last.h1] += 1
        heads = (last.b1 - last.b0) * (last.h1 - last.h0)
        assert heads == 1 or last.h1 - last.h0 == Hkv or last.b1 - last.b0 == 1
        ends = [0]
        for i0, i1, j0, j1 in last.blocks(S, S, rule):
            assert i0 == ends[-1]
            ends.append(i1)
            assert heads * group * (i1 - i0) * (j1 - j0) <= max(limit, starved)
        assert ends[-1] == S
    assert (covered == 1).all()


@given(st.integers(1, 40), st.integers(1, 15), st.integers(0, 50), st.booleans())
def test_key_range_holds_all_visible_keys_and_no_block_more(S, rows, window, causal):
    rule = MaskRule(None, None, causal, window, 1.0, 0.0)
    back = torch.arange(S)[:, None] - torch.arange(S)
    seen = (back >= 0) if causal else torch.ones_like(back, dtype=torch.bool)
    seen = seen & (back.abs() < window) if window > 0 else seen
    for i0 in range(0, S, rows):
        i1 = min(S, i0 + rows)
        keys = seen[i0:i1].any(0).nonzero()
        assert rule.keys(i0, i1, S) == (int(keys.min()), int(keys.max()) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_is_exp_except_where_it_is_next_to_nothing(dtype):
    x = torch.cat([-torch.linspace(0, 2000, 4001, dtype=dtype), torch.full((17,), -torch.inf, dtype=dtype)])
    y = attention_cpu._exp_(x.clone())
    low = 1e-300 if dtype == torch.float64 else 1e-34
    torch.testing.assert_close(y[x.exp() > low], x.exp()[x.exp() > low])
    assert (y[x < -1000] == 0).all()
    assert y.isfinite().all()


def test_bias_hides_what_is_not_seen():
    seen = torch.rand(50) > 0.5
    bias = attention_cpu._bias(seen, torch.float32)
    assert torch.equal(bias == 0, seen)
    assert torch.equal(bias == -torch.inf, ~seen)


def test_flash_and_blocks_agree():
    """The two ways to compute one piece, with the same rule."""
    q, k, v, dout = (torch.randn(2, h, 150, 16, dtype=torch.float64) for h in (4, 2, 2, 4))
    rule = MaskRule(None, None, True, 0, 0.2, 0.0)
    assert attention_cpu._flash_fits(q, k, v, rule)
    out, lse = attention_cpu.forward(q, k, v, rule)
    blocks = attention_cpu.forward_blocks(q, k, v, rule)
    torch.testing.assert_close((out, lse), blocks, rtol=1e-12, atol=1e-12)
    args = (dout, q, k, v, out, lse, rule)
    torch.testing.assert_close(
        attention_cpu.backward(*args), attention_cpu.backward_blocks(*args), rtol=1e-11, atol=1e-11
    )
