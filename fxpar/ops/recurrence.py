"""`fxpar::recurrence`: attention that is a recurrence over the tokens, with a state of fixed size per head.

One op for state space models and gated linear attention. With a state S [K, V] per batch row and head, zero before the
first token of a document, token t of q, k [B, T, Hk, K], v [B, T, H, V], decay [B, T, H, 1 or K], beta [B, T, H] does

    S = exp(decay) * S                                    one factor per head, or one per row of S
    S = S + k (beta * v)^T                                delta=False: it is written
    S = S + k (beta * (v - S^T k))^T                      delta=True: what is read at k is corrected towards v
    out = S^T q                                           [B, T, H, V]

Head h reads query and key head `h // (H // Hk)`. `decay` is a logarithm, at most 0 in all models. In these words
Mamba (Gu, Dao, arXiv 2312.00752) has a head per channel with V = 1 and a decay per row; Mamba-2 (Dao, Gu, arXiv
2405.21060) has one decay per head and beta = dt; gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464) is
delta=True, and Kimi Delta Attention (arXiv 2510.26692) the same with a decay per row.

`document_ids` [B or 1, T]: a token whose id is another than that of the token before begins a document.

The kernel, on every device, is written in ATen calls, a chunk of tokens at a time (section 6 of Mamba-2; section 3.3 of
gated DeltaNet): inside a chunk a product of [chunk, chunk] scores, between chunks the state. It computes in fp32 (fp64
for fp64). The backward keeps the states between chunks and differentiates one chunk at a time, so that its memory is
that of one chunk and T / chunk states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.attention_cpu import compute_dtype
from fxpar.ops.once import refuse_second_derivative

CHUNK, CHUNK_BY_ROW = 64, 16  # tokens at a time; fewer where each row of the state has a decay of its own

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? document_ids, bool delta"
_LIB.define(f"recurrence({_OPERANDS}) -> Tensor out", tags=(torch.Tag.pt2_compliant_tag,))
_LIB.define(
    f"recurrence_backward(Tensor dout, {_OPERANDS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dbeta)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, ids: Tensor | None) -> None:
    def fail(why: str) -> NoReturn:
        raise OpInputError("recurrence", why)

    if not (q.dim() == k.dim() == v.dim() == decay.dim() == 4 and beta.dim() == 3):
        dims = ", ".join(str(x.dim()) for x in (q, k, v, decay, beta))
        fail(f"q, k, v, decay need 4 dims [B, T, H, size] and beta 3, got {dims}")
    (B, T, heads, K), (H, _) = q.shape, v.shape[2:]
    fits = _same(q.shape, k.shape) and _same(v.shape[:3], decay.shape[:3]) and _same(v.shape[:3], beta.shape)
    grouped = not _whole(H, heads) or H % heads == 0
    if not (fits and grouped and _same((B, T), v.shape[:2]) and decay.shape[3] in (1, K)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, decay, beta))
        fail(f"{shapes} are not [B, T, Hk, K] twice, [B, T, H, V], [B, T, H, 1 or K], [B, T, H], H a multiple of Hk")
    if ids is not None and not (ids.dim() == 2 and ids.shape[0] in (1, B) and _same((ids.shape[1],), (T,))):
        fail(f"document_ids {tuple(ids.shape)} are not [B or 1, T] = [{B}, {T}]")


def _whole(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _same(a: Any, b: Any) -> bool:
    """Whether no two sizes are known to differ. Comparing a symbolic one would guard the graph."""
    return len(a) == len(b) and not any(_whole(x, y) and x != y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class _Chunk:
    """Tokens start:end, the number of the document of each in [b, tokens], and of the token before them in [b]."""

    start: int
    end: int
    document: Tensor
    before: Tensor

    def of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Their part of values [B, H, T, ...]."""
        return tuple(x[:, :, self.start : self.end] for x in values)


def _chunks(ids: Tensor | None, like: Tensor, size: int) -> Iterator[_Chunk]:
    tokens = like.shape[1]
    if ids is None:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=like.device)
    begins = (ids[:, 1:] != ids[:, :-1]).long().cumsum(1)
    document = F.pad(begins, (1, 0))  # counted from 0 in each row
    before = document[:, 0]
    for start in range(0, tokens, size):
        end = min(tokens, start + size)
        yield _Chunk(start, end, document[:, start:end], before)
        before = document[:, end - 1]


def _by_head(heads: int, *values: Tensor) -> tuple[Tensor, ...]:
    """[B, T, H or fewer, size] or [B, T, H] as [B, H, T, ...] in the compute dtype."""
    found = []
    for x in values:
        x = x.to(compute_dtype(x.dtype)).transpose(1, 2)
        found.append(x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1))
    return tuple(found)


def _run(at: _Chunk, delta: bool, state: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, tokens, V], state behind them) of one chunk, from the state [B, H, K, V] before it and its part of
    q, k, v, decay and beta.
    """
    q, k, v, decay, beta = operands
    sums = decay.cumsum(2)
    apart = sums[:, :, :, None] - sums[:, :, None]  # [B, H, queries, keys, 1 or K]
    seen = (at.document[:, :, None] == at.document[:, None]).tril()[:, None, :, :, None]
    apart = apart.masked_fill(~seen, -torch.inf).exp()
    goes_on = (at.document == at.before[:, None])[:, None, :, None]
    reaches_end = (at.document == at.document[:, -1:])[:, None, :, None]
    since_start = sums.masked_fill(~goes_on, -torch.inf).exp()
    until_end = (sums[:, :, -1:] - sums).masked_fill(~reaches_end, -torch.inf).exp()
    written = beta[..., None] * v
    if delta:
        fixed = (beta[..., None] * _scores(k, k, apart)).tril(-1)
        written = written - beta[..., None] * ((k * since_start) @ state)
        written = torch.linalg.solve_triangular(fixed, written, upper=False, unitriangular=True)
    out = (q * since_start) @ state + _scores(q, k, apart) @ written
    return out, since_start[:, :, -1, :, None] * state + (k * until_end).mT @ written


def _scores(q: Tensor, k: Tensor, apart: Tensor) -> Tensor:
    """[B, H, queries, keys]: products over rows of the state, decayed by what lies between."""
    if apart.shape[4] == 1:
        return (q @ k.mT) * apart[..., 0]
    return torch.einsum("bhik,bhjk,bhijk->bhij", q, k, apart)


def _first_state(q: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(*v.shape[:2], q.shape[3], v.shape[3])


def _size(decay: Tensor) -> int:
    return CHUNK if decay.shape[3] == 1 else CHUNK_BY_ROW


def forward(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, ids: Tensor | None, delta: bool) -> Tensor:
    """The kernel of `fxpar::recurrence`."""
    _check(q, k, v, decay, beta, ids)
    out = v.new_empty(v.shape)
    operands = _by_head(v.shape[2], q, k, v, decay, beta)
    state = _first_state(operands[0], operands[2])
    for at in _chunks(ids, v, _size(decay)):
        found, state = _run(at, delta, state, *at.of(*operands))
        out[:, at.start : at.end] = found.transpose(1, 2)
    return out


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, ids: Tensor | None, delta: bool
) -> tuple[Tensor, ...]:
    _check(q, k, v, decay, beta, ids)
    given = (q, k, v, decay, beta)
    operands = _by_head(v.shape[2], *given)
    (wide,) = _by_head(v.shape[2], dout)
    grads = [torch.zeros_like(x) for x in operands]
    chunks = list(_chunks(ids, v, _size(decay)))
    states = [_first_state(operands[0], operands[2])]
    for at in chunks[:-1]:
        states.append(_run(at, delta, states[-1], *at.of(*operands))[1])
    dstate = torch.zeros_like(states[0])
    for at, state in zip(reversed(chunks), reversed(states), strict=False):
        derived: Any = torch.func.vjp(partial(_run, at, delta), state, *at.of(*operands))
        dstate, *terms = derived[1]((*at.of(wide), dstate))
        for whole, term in zip(grads, terms, strict=True):
            whole[:, :, at.start : at.end] = term
    return tuple(_by_token(grad, x) for grad, x in zip(grads, given, strict=True))


def _by_token(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient [B, H, T, ...] of an operand as it was given: summed over the heads that read the same."""
    if grad.shape[1] != of.shape[2]:
        grad = grad.unflatten(1, (of.shape[2], -1)).sum(2)
    return grad.transpose(1, 2).to(of.dtype).contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.delta = inputs[6]


def _autograd(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.fxpar.recurrence_backward.default(dout, *ctx.saved_tensors, ctx.delta), None, None)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, ids: Tensor | None, delta: bool
) -> Tensor:
    _check(q, k, v, decay, beta, ids)
    return v.new_empty(v.shape)


for _device in ("CPU", "CUDA"):
    _LIB.impl("recurrence", forward, _device)
    _LIB.impl("recurrence_backward", _backward, _device)
torch.library.register_fake("fxpar::recurrence", _forward_fake, lib=_LIB)
torch.library.register_fake(
    "fxpar::recurrence_backward", lambda dout, *given: tuple(x.new_empty(x.shape) for x in given[:5]), lib=_LIB
)
torch.library.register_autograd("fxpar::recurrence", _autograd, setup_context=_setup_context, lib=_LIB)
refuse_second_derivative(_LIB, "fxpar::recurrence_backward", "a recurrence", "Write it out, as a loop over the tokens.")
