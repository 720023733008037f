"""`fxpar::causal_conv`: a short convolution over the tokens, one filter per channel, that sees tokens before only.

    out[b, c, t] = bias[c] + sum over j < W of weight[c, W - 1 - j] * x[b, c, t - j]

for x [B, C, T], weight [C, W], bias [C]. Tokens before the first, and with `document_ids` [B or 1, T] those of another
document, count as zeros: a token whose id is another than that of the token before begins a document. It computes in
fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.attention_cpu import compute_dtype
from fxpar.ops.once import refuse_second_derivative

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? document_ids) -> Tensor out",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "causal_conv_backward(Tensor dout, Tensor x, Tensor weight, Tensor? document_ids) -> (Tensor dx, Tensor dweight)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None) -> None:
    sizes = (*x.shape[1:2], *weight.shape[:1], *(() if bias is None else bias.shape))
    known = {size for size in sizes if isinstance(size, int)}
    if x.dim() != 3 or weight.dim() != 2 or (bias is not None and bias.dim() != 1) or len(known) > 1:
        shapes = [None if t is None else tuple(t.shape) for t in (x, weight, bias)]
        raise OpInputError("causal_conv", f"{shapes} are not [B, C, T], [C, W] and [C] or None")
    if ids is not None and ids.dim() != 2:
        raise OpInputError("causal_conv", f"document_ids {tuple(ids.shape)} are not [B or 1, T]")


def _documents(ids: Tensor | None) -> Tensor | None:
    """[B or 1, 1, T]: the number of each token's document in its row."""
    if ids is None:
        return None
    begins = (ids[:, 1:] != ids[:, :-1]).long().cumsum(1)
    return F.pad(begins, (1, 0))[:, None]


def _back(x: Tensor, by: int, document: Tensor | None) -> Tensor:
    """x moved `by` tokens towards the end of the row, within documents."""
    if by == 0:
        return x
    moved = F.pad(x[..., : max(0, x.shape[2] - by)], (min(by, x.shape[2]), 0))
    return moved if document is None else moved * _seen(document, by)


def _seen(document: Tensor, by: int) -> Tensor:
    """[B or 1, 1, T]: whether the token `by` before is of the same document."""
    return F.pad(document[..., by:] == document[..., : max(0, document.shape[2] - by)], (min(by, document.shape[2]), 0))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
    _check(x, weight, bias, ids)
    wide = compute_dtype(x.dtype)
    values, filters, document = x.to(wide), weight.to(wide), _documents(ids)
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    for by in range(weight.shape[1]):
        out.addcmul_(_back(values, by, document), filters[:, -1 - by, None])
    return (out if bias is None else out.add_(bias.to(wide)[:, None])).to(x.dtype)


def _backward(dout: Tensor, x: Tensor, weight: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x, weight, None, ids)
    wide = compute_dtype(x.dtype)
    grad, values, filters, document = dout.to(wide), x.to(wide), weight.to(wide), _documents(ids)
    dx = torch.zeros_like(values, memory_format=torch.contiguous_format)
    dweight = torch.zeros_like(filters)
    for by in range(weight.shape[1]):
        moved = _back(values, by, document)
        dweight[:, -1 - by] = (grad * moved).sum((0, 2))
        if by < x.shape[2]:
            to = grad if document is None or by == 0 else grad * _seen(document, by)
            dx[..., : x.shape[2] - by].addcmul_(to[..., by:], filters[:, -1 - by, None])
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ids = inputs
    ctx.save_for_backward(x, weight, ids)
    ctx.bias = None if bias is None else bias.dtype


def _autograd(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = torch.ops.fxpar.causal_conv_backward.default(dout, *ctx.saved_tensors)
    return dx, dweight, None if ctx.bias is None else dout.sum((0, 2)).to(ctx.bias), None


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
    _check(x, weight, bias, ids)
    return x.new_empty(x.shape)


for _device in ("CPU", "CUDA"):
    _LIB.impl("causal_conv", _forward, _device)
    _LIB.impl("causal_conv_backward", _backward, _device)
torch.library.register_fake("fxpar::causal_conv", _forward_fake, lib=_LIB)
torch.library.register_fake(
    "fxpar::causal_conv_backward",
    lambda dout, x, weight, ids: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    lib=_LIB,
)
torch.library.register_autograd("fxpar::causal_conv", _autograd, setup_context=_setup_context, lib=_LIB)
refuse_second_derivative(_LIB, "fxpar::causal_conv_backward", "a causal convolution", "Use `F.conv1d`.")
