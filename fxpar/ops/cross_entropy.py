"""`fxpar::cross_entropy`: cross entropy over a slice of the classes, combined by the caller.

A rank that holds the columns C of the logits [N, V] computes, per token n,

    lse[n] = log(sum(exp(logits[n, c]) for c in C))
    picked[n] = logits[n, target[n]] if target[n] is in C, else 0

and the loss is `logsumexp over ranks (lse) - sum over ranks (picked)`. On one device C is all
columns and the loss is `lse - picked`. With lse the global one, the gradient is local again:

    dlogits = dlse * exp(logits - lse) + dpicked * onehot(target)

`class_ids` [V] says which classes the columns are: 1 + class, contiguous and ascending, and 0 for
padding columns, which come last, are not classes, and get gradient 0.

Both ops work on blocks of rows, so that no fp32 copy of bf16 logits is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.attention_cpu import compute_dtype
from fxpar.ops.once import refuse_second_derivative

_CPU_BLOCK = 1 << 18  # logits per block and thread: 1 MiB in fp32 stays in an L2 cache
_GPU_BLOCK = 1 << 26

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor class_ids) -> (Tensor lse, Tensor picked)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "cross_entropy_backward(Tensor dlse, Tensor dpicked, Tensor logits, Tensor target, "
    "Tensor class_ids, Tensor lse) -> Tensor dlogits",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def cross_entropy_loss(logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The cross entropy of each token: `F.cross_entropy(..., reduction="none")` as one fxpar op.

    logits [N, V] floating point, target [N] int64; the loss is [N], fp32 (fp64 for fp64 logits).
    A token whose target is `ignore_index` has loss 0 and gradient 0. Any other target outside
    [0, V) has loss NaN and gradient 0: inside a captured graph nothing can look at data and raise.
    """
    if logits.dim() != 2 or target.dim() != 1:
        raise OpInputError(
            "cross_entropy",
            f"logits need dims [N, V] and target [N], got {logits.dim()} and {target.dim()} dims; "
            "flatten batch and sequence first",
        )
    V = logits.shape[1]
    class_ids = torch.arange(1, V + 1, device=logits.device)
    lse, picked = torch.ops.fxpar.cross_entropy.default(logits, target, class_ids)
    unknown = (target < 0) | (target >= V)
    loss = (lse - picked).masked_fill(unknown, torch.nan)
    return loss.masked_fill(target == ignore_index, 0.0)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows, each small enough for its temporaries."""
    on_cpu = logits.device.type == "cpu"
    limit = _CPU_BLOCK * torch.get_num_threads() if on_cpu else _GPU_BLOCK
    rows = max(1, limit // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def _real_columns(class_ids: Tensor) -> tuple[int | Tensor, int | Tensor]:
    """(class of the first column, number of columns that are classes and not padding).

    Ints on CPU; on CUDA tensors, since looking at data would synchronise. V > 0.
    """
    if class_ids.device.type != "cpu":
        return class_ids[0] - 1, class_ids.count_nonzero()
    V = class_ids.shape[0]
    n_real = V if int(class_ids[-1]) > 0 else int(class_ids.count_nonzero())
    return int(class_ids[0]) - 1, n_real


def _columns(target: Tensor, first: int | Tensor, n_real: int | Tensor) -> tuple[Tensor, Tensor | None]:
    """The column [N, 1] of each target's class, and which tokens [N] have none here.

    The column of those is 0. None stands for: every token has one.
    """
    column = target - first
    if isinstance(n_real, int) and column.numel() > 0:
        low, high = torch.aminmax(column)
        if int(low) >= 0 and int(high) < n_real:
            return column[:, None], None
    away = (column < 0) | (column >= n_real)
    return column.masked_fill_(away, 0)[:, None], away


def _check(logits: Tensor, target: Tensor, class_ids: Tensor) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1] or class_ids.shape != logits.shape[1:]:
        raise OpInputError(
            "cross_entropy",
            f"logits {tuple(logits.shape)}, target {tuple(target.shape)}, class_ids "
            f"{tuple(class_ids.shape)} are not [N, V], [N], [V]",
        )


def _forward(logits: Tensor, target: Tensor, class_ids: Tensor) -> tuple[Tensor, Tensor]:
    _check(logits, target, class_ids)
    dtype = compute_dtype(logits.dtype)
    lse = logits.new_empty(logits.shape[0], dtype=dtype)
    first, n_real = _real_columns(class_ids) if class_ids.shape[0] > 0 else (0, 0)
    if isinstance(n_real, int):
        if n_real == 0:
            return lse.fill_(-torch.inf), torch.zeros_like(lse)
        for rows in _blocks(logits):
            torch.logsumexp(logits[rows, :n_real].to(dtype), 1, out=lse[rows])
    else:
        real, hidden = class_ids > 0, lse.new_full((1,), -torch.inf)
        for rows in _blocks(logits):
            torch.logsumexp(torch.where(real, logits[rows], hidden), 1, out=lse[rows])
    column, away = _columns(target, first, n_real)
    picked = logits.gather(1, column).squeeze(1).to(dtype)
    return lse, picked if away is None else picked.masked_fill_(away, 0.0)


def _backward(dlse: Tensor, dpicked: Tensor, logits: Tensor, target: Tensor, class_ids: Tensor, lse: Tensor) -> Tensor:
    _check(logits, target, class_ids)
    V = class_ids.shape[0]
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    first, n_real = _real_columns(class_ids) if V > 0 else (0, 0)
    used = n_real if isinstance(n_real, int) else V
    if used == 0:
        return dlogits.zero_()
    column, away = _columns(target, first, n_real)
    dpicked = (dpicked if away is None else dpicked.masked_fill(away, 0.0))[:, None].to(lse.dtype)
    shift, dlse = lse[:, None], dlse[:, None]
    for rows in _blocks(logits):
        part = dlogits[rows, :used]
        wide = part if part.dtype == lse.dtype else torch.empty_like(part, dtype=lse.dtype)
        torch.sub(logits[rows, :used], shift[rows], out=wide)
        wide.exp_().mul_(dlse[rows]).scatter_add_(1, column[rows], dpicked[rows])
        if wide is not part:
            part.copy_(wide)
    if used < V:
        dlogits[:, used:] = 0.0
    return dlogits if isinstance(n_real, int) else dlogits.masked_fill_(class_ids == 0, 0.0)


def _forward_fake(logits: Tensor, target: Tensor, class_ids: Tensor) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=compute_dtype(logits.dtype))
    return lse, torch.empty_like(lse)


def _backward_fake(dlse: Tensor, dpicked: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _autograd(ctx: Any, dlse: Tensor, dpicked: Tensor) -> tuple[Tensor, None, None]:
    return (
        torch.ops.fxpar.cross_entropy_backward.default(dlse, dpicked, *ctx.saved_tensors),
        None,
        None,
    )


for _device in ("CPU", "CUDA"):
    _LIB.impl("cross_entropy", _forward, _device)
    _LIB.impl("cross_entropy_backward", _backward, _device)
torch.library.register_fake("fxpar::cross_entropy", _forward_fake, lib=_LIB)
torch.library.register_fake("fxpar::cross_entropy_backward", _backward_fake, lib=_LIB)
torch.library.register_autograd("fxpar::cross_entropy", _autograd, setup_context=_setup_context, lib=_LIB)
refuse_second_derivative(
    _LIB,
    "fxpar::cross_entropy_backward",
    "F.cross_entropy",
    "Write the loss out, with log_softmax and gather.",
)
