"""`fxpar::attention_block`: one step of attention whose tokens are cut over a ring of ranks.

The row of T tokens is cut in `degree` equal pieces. A rank keeps its queries; keys and values go around, each step to
the next rank, so that in step s rank r has those of rank (r - s) mod degree. A step adds what the queries find there to
what they have found so far (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889,
section 3; the sum by log-sum-exp as in Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1):

    lse = log(exp(lse_a) + exp(lse_b)); out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

With q [B, H, S, E] and kv [B, S, Hkv, E + Ev] (keys and values side by side, as they travel), S = T / degree:

    attention_block           (out, lse) so far, none in step 0 -> (out [B, H, S, Ev], lse [B, H, S])
    attention_block_backward  with out and lse of all steps -> (dq, dkv) of this step, terms of sums over all steps

`document_ids` [B or 1, T] and `positions` [1, T] are those of the whole row. A query sees the keys that
`fxpar::attention` would show it: those of its document and, if `causal`, at no later position; with a window within it.
Positions are needed where a document does not lie in the row in one piece; without, they are the places in the row.
`sinks` are those of `fxpar::attention`; they are given to the last step only, so that they join once.
Between steps `out` has the compute dtype; the last step gives that of q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops import attention_cpu
from fxpar.ops.attention import join_sinks_
from fxpar.ops.attention_cpu import MaskRule, compute_dtype, empty_bshe
from fxpar.ops.ring_pairs import Pair, pairs, pieces_of, whole

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_PLACE = (
    "Tensor? document_ids, Tensor? positions, int rank, int step, int degree, bool causal, int window, float scale, "
    "float softcap"
)
_LIB.define(
    f"attention_block(Tensor q, Tensor kv, Tensor? out, Tensor? lse, {_PLACE}, Tensor? sinks=None) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "attention_block_backward(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, "
    f"{_PLACE}) -> (Tensor dq, Tensor dkv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _Step:
    """What the queries of `rank` see in a step; fields as in the page above."""

    def __init__(
        self,
        q: Tensor,
        kv: Tensor,
        ids: Tensor | None,
        positions: Tensor | None,
        rank: int,
        step: int,
        degree: int,
        causal: bool,
        window: int,
        scale: float,
        softcap: float,
    ) -> None:
        tokens = q.shape[2] * degree
        for name, given in (("document_ids", ids), ("positions", positions)):
            if given is not None and given.shape[1] != tokens:
                raise OpInputError("attention_block", f"{name} {tuple(given.shape)} are not those of {tokens} tokens")
        self.first, self.last = step == 0, step == degree - 1
        self.place = rank, (rank - step) % degree, degree
        self.rule = MaskRule(None, None, causal, window, scale, softcap)
        self.k, self.v = (x.transpose(1, 2) for x in kv.split([q.shape[3], kv.shape[3] - q.shape[3]], 3))
        self.size = q.shape[2]
        self.pieces = None if ids is None else pieces_of(ids, positions, degree)

    @property
    def own(self) -> MaskRule:
        """The rule inside of the stretches of the rank. A window counts places, which a stretch leaves out."""
        if self.pieces is None:
            return self.rule
        apart = self.pieces.numbers if self.rule.window else self.pieces.stretches
        return replace(self.rule, ids=apart[self.place[0]])

    def others(self) -> Iterator[tuple[slice, Pair, MaskRule]]:
        """Rows of the batch, a pair of ranges, and the rule between them."""
        rank, other, degree = self.place
        rows = (whole(self.size * degree, degree),) if self.pieces is None else self.pieces.runs
        for b, ranks in enumerate(rows):
            batch = slice(None) if len(rows) == 1 else slice(b, b + 1)
            queries, keys = ranks[rank], ranks[other]
            for pair in pairs(queries, keys, self.rule.causal, self.rule.window, same=self.first):
                yield batch, pair, self._between(pair)

    def _between(self, pair: Pair) -> MaskRule:
        """Under `causal` no key of a pair is behind a query, so that at most a window hides some."""
        if pair.offset is None:
            return replace(self.rule, causal=False, window=0)
        return replace(self.rule, causal=False, offset=pair.offset)


def _forward(of: Callable[[], Any]) -> Callable[..., Any]:
    def run(q: Tensor, kv: Tensor, out: Tensor | None, lse: Tensor | None, *place: Any) -> tuple[Tensor, Tensor]:
        sinks = place[9] if len(place) > 9 else None
        step, kernels = _Step(q, kv, *place[:9]), of()
        if out is None or lse is None:
            out, lse = kernels.forward(q, step.k, step.v, step.own)
            out = out.to(compute_dtype(q.dtype))
        else:
            out, lse = out.clone(), lse.clone()
        for batch, pair, rule in step.others():
            (i0, i1), (j0, j1) = pair.queries, pair.keys
            found = kernels.forward(q[batch, :, i0:i1], step.k[batch, :, j0:j1], step.v[batch, :, j0:j1], rule)
            _combine_(out[batch, :, i0:i1], lse[batch, :, i0:i1], *found)
        if sinks is not None:
            join_sinks_(out, lse, sinks)
        return (out.to(q.dtype) if step.last else out), lse

    return run


def _combine_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add what was found in another block to `out` and `lse`, which have seen a key already."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(other.to(out.dtype), (other_lse - both).exp_()[..., None])
    lse.copy_(both)


def _backward(of: Callable[[], Any]) -> Callable[..., Any]:
    def run(dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        step, kernels = _Step(q, kv, *place), of()
        dkv = (kv.new_empty if step.first else kv.new_zeros)(kv.shape)  # the first step writes all of it
        dk, dv = (x.transpose(1, 2) for x in dkv.split([step.k.shape[3], step.v.shape[3]], 3))
        if step.first:
            dq, first_dk, first_dv = kernels.backward(dout, q, step.k, step.v, out, lse, step.own)
            dk.copy_(first_dk)
            dv.copy_(first_dv)
        else:
            dq = empty_bshe(q, *q.shape[1::2]).zero_()
        for batch, pair, rule in step.others():
            (i0, i1), (j0, j1) = pair.queries, pair.keys
            g, qs, o = (x[batch, :, i0:i1] for x in (dout, q, out))
            ks, vs = step.k[batch, :, j0:j1], step.v[batch, :, j0:j1]
            terms = kernels.backward(g, qs, ks, vs, o, lse[batch, :, i0:i1].contiguous(), rule)
            targets = dq[batch, :, i0:i1], dk[batch, :, j0:j1], dv[batch, :, j0:j1]
            for target, term in zip(targets, terms, strict=True):
                target.add_(term)
        return dq, dkv

    return run


def _forward_fake(q: Tensor, kv: Tensor, out: Tensor | None, lse: Tensor | None, *place: Any) -> tuple[Tensor, Tensor]:
    wide, step, degree = compute_dtype(q.dtype), place[3], place[4]
    made = q.new_empty(q.shape[0], q.shape[2], q.shape[1], kv.shape[3] - q.shape[3], dtype=wide).transpose(1, 2)
    return made.to(q.dtype) if step == degree - 1 else made, q.new_empty(q.shape[:3], dtype=wide)


def _backward_fake(dout: Tensor, q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_bshe(q, *q.shape[1::2]), kv.new_empty(kv.shape)


def _cuda() -> Any:
    from fxpar.ops import attention_cuda  # only a process that has a GPU needs it

    return attention_cuda


def _cpu() -> Any:
    return attention_cpu


for _device, _of in (("CPU", _cpu), ("CUDA", _cuda)):
    _LIB.impl("attention_block", _forward(_of), _device)
    _LIB.impl("attention_block_backward", _backward(_of), _device)
torch.library.register_fake("fxpar::attention_block", _forward_fake, lib=_LIB)
torch.library.register_fake("fxpar::attention_block_backward", _backward_fake, lib=_LIB)
