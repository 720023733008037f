"""The memory-efficient kernels: how they are called, on CPU with a stand-in for ATen's, and, on a GPU, themselves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fxpar.ops import attention_cpu, attention_cuda, attention_efficient
from fxpar.ops.attention_cpu import MaskRule

DOCUMENTS = (None, [[0, 0, 0, 1, 1, 1, 1, 2, 2]], [[0] * 9, [4] * 5 + [1] * 4])
RULES = [(causal, documents) for causal in (False, True) for documents in DOCUMENTS]
# dtype, head size, value size: what flash leaves.
KINDS = [(torch.float32, 64, 64), (torch.float32, 12, 20), (torch.bfloat16, 192, 128), (torch.bfloat16, 264, 264)]


def padded(length: int) -> int:
    return math.ceil(length / 32) * 32


def pieces(cu_q: Tensor | None, batch: int, length: int) -> list[tuple[int, int]]:
    ends = list(range(0, (batch + 1) * length, length)) if cu_q is None else cu_q.tolist()
    return list(itertools.pairwise(ends))


def rule_of(mask_type: int, scale: float) -> MaskRule:
    assert mask_type in (0, 1)
    return MaskRule(None, None, mask_type == 1, 0, scale, 0.0)


def efficient_forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, p, mask_type, want_lse, *, scale):
    """`aten::_efficient_attention_forward` in its layouts: [B, S, H, E], or packed [1, T, H, E]; lse per document."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert (bias, p, want_lse) == (None, 0.0, True)
    assert cu_q is None or q.shape[0] == 1
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    out = flat[0].new_empty(*flat[0].shape[:2], v.shape[3])
    cut, keys = pieces(cu_q, q.shape[0], q.shape[1]), pieces(cu_k, k.shape[0], k.shape[1])
    lse = torch.full((len(cut), q.shape[2], padded(max_q)), torch.inf)
    for n, ((a, b), (c, d)) in enumerate(zip(cut, keys, strict=True)):
        assert b - a <= max_q
        assert d - c <= max_k
        qs, ks, vs = (x[None, i:j].transpose(1, 2) for x, (i, j) in zip(flat, ((a, b), (c, d), (c, d)), strict=True))
        o, ls = attention_cpu.forward_blocks(qs, ks, vs, rule_of(mask_type, scale))
        out[a:b], lse[n, :, : b - a] = o[0].transpose(0, 1), ls[0]
    return out.view(*q.shape[:3], -1), lse, q.new_empty(0), q.new_empty(0), max_q, max_k


def efficient_backward(
    g, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, p, seed, offset, mask_type, bias_grad, *, scale
):
    """`aten::_efficient_attention_backward`, likewise."""
    cut, keys = pieces(cu_q, q.shape[0], q.shape[1]), pieces(cu_k, k.shape[0], k.shape[1])
    assert lse.shape == (len(cut), q.shape[2], padded(max_q))
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (g, q, k, v, out)]
    grads = [torch.empty_like(x) for x in flat[1:4]]
    for n, ((a, b), (c, d)) in enumerate(zip(cut, keys, strict=True)):
        assert (lse[n, :, b - a :] == torch.inf).all()
        spans = ((a, b), (a, b), (c, d), (c, d), (a, b))
        gs, qs, ks, vs, o = (x[None, i:j].transpose(1, 2) for x, (i, j) in zip(flat, spans, strict=True))
        rule = rule_of(mask_type, scale)
        parts = attention_cpu.backward_blocks(gs, qs, ks, vs, o, lse[n : n + 1, :, : b - a], rule)
        for whole, part, (i, j) in zip(grads, parts, spans[1:4], strict=True):
            whole[i:j] = part[0].transpose(0, 1)
    return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), q.new_empty(0)


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # ATen has no CPU kernel for these two
    library.impl("_efficient_attention_forward", efficient_forward, "CPU")
    library.impl("_efficient_attention_backward", efficient_backward, "CPU")
    return library


@pytest.fixture
def device(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU that has the kernel, and no blocks to fall back on."""
    monkeypatch.setattr(attention_cuda, "_device_has_efficient", lambda index: True)
    for name in ("forward_blocks", "backward_blocks"):
        monkeypatch.setattr(attention_cuda, name, lambda *a: pytest.fail("this call is the kernel's"))
    return "cpu"


def make(dtype: torch.dtype, E: int, Ev: int, device: str) -> list[Tensor]:
    """q, k, v, dout, two query heads to a key head, not all of them contiguous."""
    sizes = [(2, 4, 9, E), (2, 2, 9, E), (2, 9, 2, Ev), (2, 4, 9, Ev)]
    q, k, v, dout = (torch.randn(*size, device=device).to(dtype) for size in sizes)
    return [q, k, v.transpose(1, 2), dout]


def compare(made: list[Tensor], rule: MaskRule) -> None:
    """The kernels on CUDA against blocks in fp64."""
    q, k, v, dout = made
    out, lse = attention_cuda.forward(q, k, v, rule)
    grads = attention_cuda.backward(dout, q, k, v, out, lse, rule)
    wide = [x.double() for x in made]
    want_out, want_lse = attention_cpu.forward_blocks(*wide[:3], rule)
    want = (want_out, want_lse, *attention_cpu.backward_blocks(wide[3], *wide[:3], want_out, want_lse, rule))
    tolerance = 1e-5 if q.dtype == torch.float32 else 3e-2
    for a, b in zip((out, lse, *grads), want, strict=True):
        assert a.transpose(1, 2).is_contiguous() if a.dim() == 4 else a.is_contiguous()
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("causal", "documents"), RULES)
@pytest.mark.parametrize(("dtype", "E", "Ev"), KINDS)
def test_the_kernel_is_called_as_it_wants(device, causal, documents, dtype, E, Ev):
    ids = None if documents is None else torch.tensor(documents)
    compare(make(dtype, E, Ev, device), MaskRule(ids, None, causal, 0, E**-0.5, 0.0))


def test_queries_over_other_keys(device):
    q, k, v, dout = make(torch.float32, 8, 8, device)
    compare([q[:, :, :5], k, v, dout[:, :, :5]], MaskRule(None, None, False, 0, 0.3, 0.0))


@pytest.mark.parametrize(
    "change",
    ["mask", "softcap", "window", "fp64", "head size", "value size", "scattered ids", "empty", "many documents"],
)
def test_what_it_cannot_do_goes_to_blocks(library, monkeypatch, change):
    monkeypatch.setattr(attention_cuda, "_device_has_efficient", lambda index: True)
    S = {"empty": 0, "many documents": 60}.get(change, 5)
    E, Ev = {"head size": (6, 8), "value size": (8, 6)}.get(change, (8, 8))
    dtype = torch.float64 if change == "fp64" else torch.float32
    q, k, v = (torch.randn(1, 2, S, size, dtype=dtype) for size in (E, E, Ev))
    mask = torch.rand(1, 1, S, S) > 0.4 if change == "mask" else None
    ids = {"scattered ids": [0, 1, 0, 1, 1], "many documents": [*range(30), *[30] * 30]}.get(change)
    window, softcap = (3 if change == "window" else 0), (2.0 if change == "softcap" else 0.0)
    rule = MaskRule(None if ids is None else torch.tensor([ids]), mask, True, window, 0.3, softcap)
    assert not attention_cuda._efficient_fits(q, k, v, rule)
    out, lse = attention_cuda.forward(q, k, v, rule)
    torch.testing.assert_close((out, lse), attention_cpu.forward(q, k, v, rule))


def test_where_tokens_lie_in_their_documents():
    document, place = attention_efficient._places(torch.tensor([0, 2, 3, 7], dtype=torch.int32), 7)
    assert document.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "documents"), RULES)
@pytest.mark.parametrize(("dtype", "E", "Ev"), KINDS)
def test_gpu_equals_blocks(causal, documents, dtype, E, Ev):
    ids = None if documents is None else torch.tensor(documents, device="cuda")
    made, rule = make(dtype, E, Ev, "cuda"), MaskRule(ids, None, causal, 0, E**-0.5, 0.0)
    assert attention_cuda._efficient_fits(*made[:3], rule)
    compare(made, rule)
