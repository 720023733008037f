"""The CUDA kernels: their bookkeeping on CPU with a stand-in for ATen's flash, and, on a GPU, themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxpar.ops import attention_cpu, attention_cuda
from fxpar.ops.attention_cpu import MaskRule

own = torch.ops.fxpar


# ------------------------------------------------------------------------------------- packing, on CPU
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_lengths_of_packed_documents(rows):
    length = max(map(sum, rows))
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in rows]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(r)).flip(0), torch.tensor(r)) for r in rows])
    lengths, longest = attention_cuda._read_packing(ids, len(rows))
    assert lengths is not None
    assert lengths.dtype == torch.int32
    flat = [n for row in rows for n in row]
    assert lengths.diff().tolist() == flat
    assert longest == max(flat)


def test_one_row_of_ids_serves_all_rows():
    lengths, longest = attention_cuda._read_packing(torch.tensor([[0, 0, 1]]), 3)
    assert lengths is not None
    assert lengths.tolist() == [0, 2, 3, 5, 6, 8, 9]
    assert longest == 2


def test_ids_that_come_back_have_no_lengths():
    assert attention_cuda._read_packing(torch.tensor([[0, 0, 1], [1, 0, 1]]), 2) == (None, 0)


def test_packing_is_read_once_per_tensor_and_again_after_a_write(monkeypatch):
    reads = []
    read = attention_cuda._read_packing
    monkeypatch.setattr(attention_cuda, "_read_packing", lambda i, b: reads.append(b) or read(i, b))
    ids = torch.tensor([[0, 0, 1]])
    for _ in range(3):
        assert attention_cuda._packing(ids, 1).longest == 2
    assert reads == [1]
    ids[0, 2] = 0
    assert attention_cuda._packing(ids, 1).longest == 3
    assert attention_cuda._packing(ids, 2).batch == 2
    assert reads == [1, 1, 2]
    with torch.inference_mode():
        untracked = torch.tensor([[0, 0, 1]])
        assert attention_cuda._packing(untracked, 1).longest == 2
        untracked[0, 2] = 0
        assert attention_cuda._packing(untracked, 1).longest == 3


# --------------------------------------------------------------------------- a stand-in for flash, on CPU
def each_document(cu_q: Tensor | None, batch: int, length: int) -> list[tuple[int, int]]:
    ends = list(range(0, (batch + 1) * length, length)) if cu_q is None else cu_q.tolist()
    return list(itertools.pairwise(ends))


def flash_rule(causal: bool, left: int, right: int, scale: float) -> MaskRule:
    """Flash's window (left, right) as the rule of one piece; only the forms that the kernel passes."""
    window = left + 1 if left >= 0 else 0
    assert right in ((0, -1) if window == 0 else (0, left))
    assert causal == (left < 0 and right == 0)
    return MaskRule(None, None, right == 0, window, scale, 0.0)


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale, window_size_left, window_size_right):
    """`aten::_flash_attention_forward` in its documented layouts: [B, S, H, E], or packed [T, H, E]."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert p == 0.0
    rule = flash_rule(causal, window_size_left, window_size_right, scale)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    out = torch.empty_like(flat[0])
    lse = q.new_empty(q.shape[-2], out.shape[0], dtype=torch.float32)
    for a, b in each_document(cu_q, q.shape[0], q.shape[1]):
        assert b - a <= max_q
        qs, ks, vs = (x[None, a:b].transpose(1, 2) for x in flat)
        o, ls = attention_cpu.forward_blocks(qs, ks, vs, rule)
        out[a:b], lse[:, a:b] = o[0].transpose(0, 1), ls[0]
    if cu_q is None:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return out.view(q.shape), lse, q.new_empty(2), q.new_empty(0), q.new_empty(0)


def flash_backward(
    g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, state, unused, *, scale, window_size_left,
    window_size_right,
):  # fmt: skip
    """`aten::_flash_attention_backward`, likewise."""
    assert lse.is_contiguous()
    rule = flash_rule(causal, window_size_left, window_size_right, scale)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (g, q, k, v, out)]
    lse = lse.transpose(0, 1).flatten(1) if cu_q is None else lse
    grads = [torch.empty_like(x) for x in flat[1:4]]
    for a, b in each_document(cu_q, q.shape[0], q.shape[1]):
        gs, qs, ks, vs, o = (x[None, a:b].transpose(1, 2) for x in flat)
        parts = attention_cpu.backward_blocks(gs, qs, ks, vs, o, lse[None, :, a:b], rule)
        for whole, part in zip(grads, parts, strict=True):
            whole[a:b] = part[0].transpose(0, 1)
    return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


@pytest.fixture(scope="module")
def flash_library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # ATen has no CPU kernel for these two
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    return library


@pytest.fixture
def flash(flash_library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuda, "_device_has_flash", lambda index: True)
    for name in ("forward_blocks", "backward_blocks"):
        monkeypatch.setattr(attention_cuda, name, lambda *a: pytest.fail("this call is flash's"))


RULES = [
    (causal, window, documents)
    for causal in (False, True)
    for window in (0, 3)
    for documents in (None, [[0, 0, 0, 1, 1, 1, 1, 2, 2]], [[0] * 9, [4] * 5 + [1] * 4])
]


@pytest.mark.parametrize(("causal", "window", "documents"), RULES)
def test_flash_is_called_as_it_wants(flash, causal, window, documents):
    q, dout = (torch.randn(2, 4, 9, 8).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 9, 2, 8).bfloat16().transpose(1, 2) for _ in range(2))
    rule = MaskRule(None if documents is None else torch.tensor(documents), None, causal, window, 0.3, 0.0)
    out, lse = attention_cuda.forward(q, k, v, rule)
    want, want_lse = attention_cpu.forward_blocks(q, k, v, rule)
    torch.testing.assert_close((out, lse), (want, want_lse))
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    args = (dout, q, k, v, out, lse, rule)
    grads = attention_cuda.backward(*args)
    torch.testing.assert_close(grads, attention_cpu.backward_blocks(*args))
    assert all(g.transpose(1, 2).is_contiguous() for g in grads)


@pytest.mark.parametrize(
    "change",
    ["mask", "softcap", "dtype", "head size", "value size", "scattered ids", "empty"],
)
def test_what_flash_cannot_do_goes_to_blocks(flash_library, monkeypatch, change):
    monkeypatch.setattr(attention_cuda, "_device_has_flash", lambda index: True)
    monkeypatch.setattr(attention_cuda, "_device_has_efficient", lambda index: False)
    E = 6 if change == "head size" else 8
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    S = 0 if change == "empty" else 5
    q, k, v = (torch.randn(1, 2, S, E).to(dtype) for _ in range(3))
    v = torch.randn(1, 2, S, 16).to(dtype) if change == "value size" else v
    mask = torch.rand(1, 1, S, S) > 0.4 if change == "mask" else None
    ids = torch.tensor([[0, 1, 0, 1, 1]]) if change == "scattered ids" else None
    rule = MaskRule(ids, mask, True, 0, 0.3, 2.0 if change == "softcap" else 0.0)
    assert not attention_cuda._flash_fits(q, k, v, rule)
    out, lse = attention_cuda.forward(q, k, v, rule)
    torch.testing.assert_close((out, lse), attention_cpu.forward(q, k, v, rule))
    args = (torch.ones_like(out), q, k, v, out, lse, rule)
    torch.testing.assert_close(attention_cuda.backward(*args), attention_cpu.backward(*args))


# --------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "softcap"), [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 0.0), (torch.bfloat16, 5.0)]
)
def test_gpu_equals_cpu(dtype, softcap):
    repeat = 40
    q, dout = (torch.randn(2, 4, 9 * repeat, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 9 * repeat, 2, 64).to(dtype).transpose(1, 2) for _ in range(2))
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for causal, window, documents in RULES:
        ids = None if documents is None else torch.tensor(documents).repeat_interleave(repeat, 1)
        rest = (None, causal, window * repeat, 0.125, softcap)
        out, lse = own.attention(q, k, v, ids, *rest)
        grads = own.attention_backward(dout, q, k, v, out, lse, ids, *rest)
        g, qs, ks, vs, o, ls, i = (None if x is None else x.cuda() for x in (dout, q, k, v, out, lse, ids))
        got = own.attention(qs, ks, vs, i, *rest)
        got_grads = own.attention_backward(g, qs, ks, vs, o, ls, i, *rest)
        for a, b in zip((*got, *got_grads), (out, lse, *grads), strict=True):
            assert a.transpose(1, 2).is_contiguous() if a.dim() == 4 else a.is_contiguous()
            torch.testing.assert_close(a.cpu().float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_gpu_mask_and_blind_rows():
    q = torch.randn(1, 2, 33, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(1, 1, 33, 33, device="cuda") > 0.5
    mask[:, :, 7] = False
    out, lse = own.attention(q, q, q, None, mask, False, 0, 0.125, 0.0)
    assert (out[:, :, 7] == 0).all()
    assert (lse[:, :, 7] == -torch.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), (q,))
    assert torch.isfinite(grad).all()


@pytest.mark.gpu
def test_gpu_documents_synchronise_once_per_tensor():
    q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    ids = (torch.arange(512, device="cuda") // 100)[None]
    args = (q, q, q, ids, None, True, 0, 0.125, 0.0)
    own.attention(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        own.attention(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
