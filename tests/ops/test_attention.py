"""`fxpar::attention` against a dense softmax written out, over all its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops import attention_cpu
from tests.repeat import examples

own = torch.ops.fxpar


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor | None
    mask: Tensor | None
    causal: bool
    window: int
    scale: float
    softcap: float
    sinks: Tensor | None = None

    @property
    def args(self) -> tuple:
        """Of the op; of its backward too where there are no sinks."""
        return tuple(self.__dict__.values())[: None if self.sinks is not None else -1]


def visible(case: Case) -> Tensor:
    """[B or 1, H or 1, Sq, Skv]: the definition in the docstring of `fxpar.ops.attention`."""
    back = torch.arange(case.q.shape[2])[:, None] - torch.arange(case.k.shape[2])
    seen = torch.ones(1, 1, *back.shape, dtype=torch.bool)
    if case.causal:
        seen = seen & (back >= 0)
    if case.window > 0:
        seen = seen & (back.abs() < case.window)
    if case.ids is not None:
        seen = seen & (case.ids[:, None, :, None] == case.ids[:, None, None, :])
    if case.mask is not None and case.mask.dtype == torch.bool:
        seen = seen & case.mask
    return seen


def dense(case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse) with all scores in memory."""
    group = case.q.shape[1] // case.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (case.k, case.v))
    score = case.q @ k.mT * case.scale
    if case.softcap > 0:
        score = case.softcap * torch.tanh(score / case.softcap)
    if case.mask is not None and case.mask.dtype != torch.bool:
        score = score + case.mask
    score = score.masked_fill(~visible(case), -torch.inf)
    if case.sinks is not None:
        score = torch.cat([score, case.sinks[..., None].expand(*score.shape[:3], 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weight @ v, lse


def check(case: Case, tolerance: float) -> None:
    """Values, lse and gradients of the op equal those of `dense`, and its layout is as promised."""
    out, lse = own.attention(*case.args)
    want, want_lse = dense(case)
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=tolerance, atol=tolerance)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    dout = torch.randn_like(out)
    inputs = (case.q, case.k, case.v, *(() if case.sinks is None else (case.sinks,)))
    grads, wants = (torch.autograd.grad(o, inputs, dout) for o in (out, want))
    for grad, expected in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad, expected, rtol=tolerance, atol=10 * tolerance)
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads[:3])


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    B, Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    S, E = draw(st.integers(1, 21)), draw(st.sampled_from([1, 4, 8]))
    same_values = draw(st.booleans())
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def heads(H: int, E: int, length: int) -> Tensor:
        shape = (B, length, H, E) if draw(st.booleans()) else (B, H, length, E)
        x = torch.randn(shape, generator=g, dtype=dtype)
        return (x if shape[1] == H and shape[2] == length else x.transpose(1, 2)).requires_grad_()

    causal, window = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 3, 8, 50]))
    ids = None
    kind = draw(st.sampled_from(["none", "runs", "any"]))
    if kind != "none":
        ids = torch.randint(0, 4, (draw(st.sampled_from([1, B])), S), generator=g)
        ids = ids.sort(1).values if kind == "runs" else ids
    square = causal or window > 0 or ids is not None
    Sk = S if square else draw(st.integers(1, 9))
    mask = None
    kind = draw(st.sampled_from(["none", "none", "bool", "float"]))
    if kind != "none":
        shape = (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, Hkv * group])), S, Sk)
        mask = torch.randn(shape, generator=g, dtype=dtype)
        mask = mask > 0.5 if kind == "bool" else mask  # leaves some rows with nothing to see
    sinks = None
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, B])), Hkv * group, draw(st.sampled_from([1, S])))
        sinks = torch.randn(shape, generator=g, dtype=dtype).requires_grad_()
    return Case(
        heads(Hkv * group, E, S),
        heads(Hkv, E, Sk),
        heads(Hkv, E if same_values else E + 2, Sk),
        ids,
        mask,
        causal,
        window,
        draw(st.sampled_from([0.125, 0.4])),
        draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks,
    )


@given(cases())
@settings(max_examples=examples(40))
def test_equals_dense_softmax_in_fp64(case):
    check(case, 1e-12)


@given(cases(torch.float32))
@settings(max_examples=examples(20))
def test_equals_dense_softmax_in_fp32(case):
    check(case, 1e-5)


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    B, H, S, E = shape
    return torch.randn(B, S, H, E, dtype=dtype).transpose(1, 2).requires_grad_()


def plain(
    S: int = 40,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Case:
    q, k, v = heads(2, 4, S, 8), heads(2, 2, S, 8), heads(2, 2, S, 8)
    return Case(q, k, v, ids, mask, causal, window, 0.3, softcap)


def on_qkv(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    return replace(case, q=change(case.q), k=change(case.k), v=change(case.v))


@pytest.mark.parametrize("budget", [1, 500, 2000, 8000])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 6), (3, 6)])
def test_parts_of_batch_and_heads_get_their_own_ids_and_mask(monkeypatch, budget, shape):
    monkeypatch.setattr(attention_cpu, "_CPU_BLOCK_SCORES", budget)
    q, k, v = heads(3, 6, 20, 4), heads(3, 3, 20, 4), heads(3, 3, 20, 4)
    ids = torch.randint(0, 3, (shape[0], 20))
    for mask in (torch.rand(*shape, 20, 20) > 0.3, torch.randn(*shape, 20, 20, dtype=torch.float64)):
        check(Case(q, k, v, ids, mask, False, 0, 0.3, 0.0), 1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 2.0}, {"causal": False, "window": 70}])
def test_more_rows_than_one_block(options):
    check(plain(S=200, **options), 1e-11)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_documents_do_not_see_each_other(window, softcap):
    S = 40
    ids = torch.tensor([[0] * 7 + [3] * 30 + [9] * 3])
    case = plain(S, ids=ids, window=window, softcap=softcap)
    out, lse = own.attention(*case.args)
    for start, end in ((0, 7), (7, 37), (37, 40)):
        part = on_qkv(replace(case, ids=None), lambda x, a=start, b=end: x[:, :, a:b])
        alone, alone_lse = own.attention(*part.args)
        torch.testing.assert_close(out[:, :, start:end], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[:, :, start:end], alone_lse, rtol=1e-12, atol=1e-12)


def test_window_is_the_one_of_transformers():
    masking = pytest.importorskip("transformers.masking_utils", reason="needs transformers")
    causal = masking.sliding_window_causal_mask_function(3)
    both = masking.sliding_window_bidirectional_mask_function(3)
    seen = visible(plain(9, window=3))[0, 0]
    seen_both = visible(plain(9, causal=False, window=3 + 1))[0, 0]  # +1 as its models do
    for i in range(9):
        for j in range(9):
            assert bool(causal(0, 0, torch.tensor(i), torch.tensor(j))) == bool(seen[i, j])
            assert bool(both(0, 0, torch.tensor(i), torch.tensor(j))) == bool(seen_both[i, j])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("as_float", [False, True])
def test_rows_that_see_nothing_are_zero_and_not_nan(causal, as_float):
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 0] = False
    mask[:, :, 4] = False
    given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) if as_float else mask
    case = plain(6, mask=given, causal=causal)
    out, lse = own.attention(*case.args)
    blind = [0, 4] if causal else [4]
    assert (out[:, :, blind] == 0).all()
    assert (lse[:, :, blind] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out, (case.q, case.k, case.v), torch.ones_like(out))
    assert (dq[:, :, blind] == 0).all()
    assert (dk[:, :, 0] == 0).all()
    assert all(torch.isfinite(g).all() for g in (out, dq, dk, dv))
    check(plain(6, mask=mask, causal=causal), 1e-12)


def test_softcap_and_mask_come_in_the_order_of_gemma2():
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2", reason="needs transformers")
    mask = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    case = plain(8, mask=mask, causal=False, softcap=2.0)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    wide = (x.detach().float() for x in (case.q, case.k, case.v))
    want, _ = gemma.eager_attention_forward(module, *wide, mask.float(), scaling=0.3, softcap=2.0)
    out, _ = own.attention(*case.args)
    torch.testing.assert_close(out.float().transpose(1, 2), want)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_bf16_computes_in_fp32(options):
    exact = plain(24, **options)
    case = on_qkv(exact, lambda x: x.detach().bfloat16())
    wide = on_qkv(case, lambda x: x.float())
    out, lse = own.attention(*case.args)
    want, want_lse = own.attention(*wide.args)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, want.bfloat16())
    assert torch.equal(lse, want_lse)
    dout = torch.randn_like(out)
    grads = own.attention_backward(dout, *case.args[:3], out, lse, *case.args[3:])
    wants = own.attention_backward(dout.float(), *wide.args[:3], out.float(), lse, *case.args[3:])
    for grad, expected in zip(grads, wants, strict=True):
        assert torch.equal(grad, expected.bfloat16())


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_lse_combines_parts_of_the_keys_and_the_backward_takes_the_global_one(softcap):
    """What a rank that holds half of the keys does: a ring over key/value chunks."""
    whole = plain(10, causal=False, softcap=softcap)
    q, k, v = (x.detach() for x in (whole.q, whole.k, whole.v))
    rule = whole.args[3:]
    out, lse = own.attention(q, k, v, *rule)
    chunks = [(k[:, :, :4], v[:, :, :4]), (k[:, :, 4:], v[:, :, 4:])]
    parts = [own.attention(q, *chunk, *rule) for chunk in chunks]
    both = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    merged = sum(o * (part_lse - both).exp()[..., None] for o, part_lse in parts)
    torch.testing.assert_close(both, lse)
    torch.testing.assert_close(merged, out)
    dout = torch.randn_like(out)
    dq, dk, dv = own.attention_backward(dout, q, k, v, out, lse, *rule)
    grads = [own.attention_backward(dout, q, *chunk, out, lse, *rule) for chunk in chunks]
    torch.testing.assert_close(grads[0][0] + grads[1][0], dq)
    torch.testing.assert_close(torch.cat([g[1] for g in grads], 2), dk)
    torch.testing.assert_close(torch.cat([g[2] for g in grads], 2), dv)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_a_rank_may_hold_nothing(shape):
    B, H, S = shape
    q, k, v = heads(B, H, S, 8), heads(B, H // 2, S, 8), heads(B, H // 2, S, 8)
    ids = torch.zeros(1, S, dtype=torch.int64)
    for options in ((None, None, True, 0, 0.3, 0.0), (ids, None, True, 3, 0.3, 2.0)):
        out, _ = own.attention(q, k, v, *options)
        assert out.shape == q.shape
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_no_keys_at_all():
    q, k = heads(1, 2, 3, 8).detach(), heads(1, 2, 0, 8).detach()
    out, lse = own.attention(q, k, k, None, None, False, 0, 0.3, 0.0)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    dq, _, _ = own.attention_backward(out, q, k, k, out, lse, None, None, False, 0, 0.3, 0.0)
    assert (dq == 0).all()


def test_an_expanded_gradient():
    case = plain(12)
    out, _ = own.attention(*case.args)
    spread = torch.autograd.grad(out.sum(), (case.q, case.k, case.v))
    out, _ = own.attention(*case.args)
    dense_ones = torch.autograd.grad(out, (case.q, case.k, case.v), torch.ones_like(out))
    for a, b in zip(spread, dense_ones, strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_flows_through_lse():
    case = plain(6)
    _, lse = own.attention(*case.args)
    assert not lse.requires_grad


def test_bad_inputs_are_named():
    q, k = heads(2, 4, 6, 8), heads(2, 2, 6, 8)
    rest = (None, None, True, 0, 0.3, 0.0)
    ids, mask = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(2, 3, 6, 6)
    for args, words in [
        ((q[0], k, k, *rest), "4 dims"),
        ((q, k.float(), k, *rest), "one floating-point dtype"),
        ((q, heads(2, 3, 6, 8), heads(2, 3, 6, 8), *rest), "multiple of Hkv"),
        ((q, k, heads(2, 2, 5, 8), *rest), r"\[B, Hkv, Skv, Ev\]"),
        ((q, heads(2, 2, 5, 8), heads(2, 2, 5, 8), *rest), "6 queries over 5 keys"),
        ((q, k, k, ids, *rest[1:]), "document_ids"),
        ((q, k, k, None, mask, *rest[2:]), r"mask \(2, 3, 6, 6\)"),
        ((q, k, k, *rest, torch.zeros(1, 1, 1)), r"sinks \(1, 1, 1\)"),
        ((q, k, k, *rest, torch.zeros(4)), "sinks"),
        ((q, k, k, None, torch.zeros(1, 1, 6, 6, requires_grad=True), *rest[2:]), "detach the mask"),
    ]:
        with pytest.raises(OpInputError, match=words):
            own.attention(*args)
