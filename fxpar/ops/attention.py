"""`fxpar::attention`: one attention op for every device, with its fake kernel and its gradient.

The op covers what captured models need: grouped-query heads, causal, packed documents, sliding
windows, a dense mask, a soft cap on the scores. Its graph is the same on every device; the kernels
behind it are not:

    CPU     `attention_cpu`   ATen's CPU flash, once per document; else blocks of query rows
    CUDA    `attention_cuda`  ATen's flash or memory-efficient kernel, dense or packed; else blocks of query rows

With q [B, H, Sq, E], k [B, Hkv, Skv, E], v [B, Hkv, Skv, Ev], query head h reads key/value head
`h // (H // Hkv)`, and

    score = (q . k) * scale; if softcap > 0: score = softcap * tanh(score / softcap); score += mask
    lse = log(sum(exp(score of the visible keys))); out = sum(exp(score - lse) * v)

With `sinks` [B or 1, H, Sq or 1] each query sees one key more, of that score and a value of zero (attention sinks, as
gpt-oss learns them: one per head): exp(sinks) joins the sum in lse, so weights add up to less than one. Neither scale
nor cap nor mask applies to it, and no rule hides it.

Key j is visible to query i unless one of these hides it:

    causal         j > i
    window > 0     i - j >= window if causal, |i - j| >= window if not: the `sliding_window` that
                   transformers hands to its attention functions (the config value of its
                   bidirectional models, and of `create_bidirectional_sliding_window_mask`, is
                   one less)
    document_ids   [B or 1, S] integers: i and j have different ids. Ids may come in any order
    mask           [B or 1, H or 1, Sq, Skv]: bool, False hides; or float, added to the score

A query that sees no key has out 0, lse -inf (with a sink: the sink) and gradients 0. Sq may differ
from Skv only without causal, window and document_ids. `mask` gets no gradient.

Memory: `out` and the gradients are laid out as [B, S, H, E] (what is returned is a transposed
view), so `out.transpose(1, 2).reshape(B, S, H * E)` costs nothing. `lse` is [B, H, Sq], contiguous,
fp32 (fp64 for fp64). It serves the backward, where a global lse may stand in for the local one, and
combines partial results of one query; no gradient flows through it. With the lse of keys and sink, and the out that
belongs to it, `attention_backward` is the same with sinks as without; `attention_sinks_backward` gives what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops import attention_cpu
from fxpar.ops.once import refuse_second_derivative

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? document_ids, Tensor? mask, bool causal, "
    "int window, float scale, float softcap, Tensor? sinks=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? document_ids, Tensor? mask, bool causal, int window, float scale, float softcap) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "attention_sinks_backward(Tensor dout, Tensor out, Tensor lse, Tensor sinks) -> Tensor dsinks",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ. Comparing a symbolic one would guard the graph."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def _fits(x: Tensor, shape: tuple[Any, ...], broadcast: int) -> bool:
    """Whether x has this shape, where the first `broadcast` dims may also be 1."""
    return x.dim() == len(shape) and not any(
        _differ(a, b) and not (d < broadcast and a == 1) for d, (a, b) in enumerate(zip(x.shape, shape, strict=True))
    )


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int,
    sinks: Tensor | None = None,
) -> None:
    """Raise `OpInputError` if the shapes or dtypes do not fit together (see the page above)."""

    def fail(why: str) -> NoReturn:
        raise OpInputError("attention", why)

    if not (q.dim() == k.dim() == v.dim() == 4):
        fail(f"q, k, v need 4 dims [B, H, S, E], got {q.dim()}, {k.dim()}, {v.dim()}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        fail(f"q, k, v need one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    (B, H, Sq, E), (Bk, Hkv, Sk, Ek) = q.shape, k.shape
    ungrouped = _differ(H, Hkv) and (Hkv == 0 or H % Hkv != 0)
    kv_differ = any(_differ(a, b) for a, b in zip(k.shape[:3], v.shape[:3], strict=True))
    if ungrouped or kv_differ or _differ(B, Bk) or _differ(E, Ek):
        fail(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are not [B, H, Sq, E], "
            "[B, Hkv, Skv, E], [B, Hkv, Skv, Ev] with H a multiple of Hkv"
        )
    if (causal or window > 0 or document_ids is not None) and _differ(Sq, Sk):
        fail(f"{Sq} queries over {Sk} keys need causal, window and document_ids to be off")
    if document_ids is not None and not _fits(document_ids, (B, Sq), 1):
        fail(f"document_ids {tuple(document_ids.shape)} are not [B or 1, S] = [{B}, {Sq}]")
    if mask is not None and not _fits(mask, (B, H, Sq, Sk), 2):
        fail(f"mask {tuple(mask.shape)} is not [B or 1, H or 1, Sq, Skv] = {[B, H, Sq, Sk]}")
    if sinks is not None and not (
        sinks.dim() == 3 and not _differ(sinks.shape[1], H) and _fits(sinks, (B, sinks.shape[1], Sq), 3)
    ):
        fail(f"sinks {tuple(sinks.shape)} are not [B or 1, H, Sq or 1] = {[B, H, Sq]}")


def _empty_bshe(like: Tensor, shape: Any) -> Tensor:
    """An empty [B, H, S, E] tensor whose memory is laid out as [B, S, H, E]."""
    B, H, S, E = shape
    return like.new_empty(B, S, H, E).transpose(1, 2)


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v, document_ids, mask, causal, window, sinks)
    lse = q.new_empty(q.shape[:3], dtype=attention_cpu.compute_dtype(q.dtype))
    return _empty_bshe(q, (*q.shape[:3], v.shape[3])), lse


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_bshe(q, q.shape), _empty_bshe(k, k.shape), _empty_bshe(v, v.shape)


def join_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let queries that have seen all of their keys see their sinks too: scores [B or 1, H, Sq or 1], values of zero."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - both).exp_()[..., None])
    lse.copy_(both)


def _kernels(of: Callable[[], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward on a device; `of()` is the module that has them."""

    def forward(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, mask: Tensor | None, *rule: Any) -> Any:
        sinks = rule[4] if len(rule) > 4 else None
        check_inputs(q, k, v, ids, mask, rule[0], rule[1], sinks)
        out, lse = of().forward(q, k, v, attention_cpu.MaskRule(ids, mask, *rule[:4]))
        if sinks is not None:
            join_sinks_(out, lse, sinks)
        return out, lse

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        ids: Tensor | None,
        mask: Tensor | None,
        *rule: Any,
    ) -> Any:
        check_inputs(q, k, v, ids, mask, rule[0], rule[1])
        return of().backward(dout, q, k, v, out, lse, attention_cpu.MaskRule(ids, mask, *rule))

    return forward, backward


def _cuda() -> Any:
    from fxpar.ops import attention_cuda  # only a process that has a GPU needs it

    return attention_cuda


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, mask, *rule, sinks = inputs
    if mask is not None and mask.requires_grad:
        raise OpInputError("attention", "mask requires a gradient, which this op does not compute; detach the mask")
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, document_ids, mask, sinks)
    ctx.rule = rule


def _autograd(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    grads = torch.ops.fxpar.attention_backward.default(dout, *saved, *ctx.rule)
    of_sinks = None
    if any(ctx.needs_input_grad[9:]):  # empty where the call leaves sinks out
        out, lse = saved[3:5]
        of_sinks = torch.ops.fxpar.attention_sinks_backward.default(dout, out, lse, sinks)
    return (*grads, *(None,) * 6, of_sinks)


def _sinks_backward(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink has the value zero: its score gets minus its weight times what all keys give the output."""
    weight = (sinks.to(lse.dtype) - lse).exp_()
    given = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return weight.mul_(given).neg_().sum_to_size(sinks.shape).to(sinks.dtype)


for _device, _of in (("CPU", lambda: attention_cpu), ("CUDA", _cuda)):
    for _name, _kernel in zip(("attention", "attention_backward"), _kernels(_of), strict=True):
        _LIB.impl(_name, _kernel, _device)
    _LIB.impl("attention_sinks_backward", _sinks_backward, _device)
torch.library.register_fake("fxpar::attention", _forward_fake, lib=_LIB)
torch.library.register_fake(
    "fxpar::attention_sinks_backward", lambda dout, out, lse, sinks: sinks.new_empty(sinks.shape), lib=_LIB
)
torch.library.register_fake("fxpar::attention_backward", _backward_fake, lib=_LIB)
torch.library.register_autograd("fxpar::attention", _autograd, setup_context=_setup_context, lib=_LIB)
for _name in ("attention_backward", "attention_sinks_backward"):
    refuse_second_derivative(
        _LIB,
        f"fxpar::{_name}",
        "attention",
        "Write it out, with products and a softmax.",
    )
