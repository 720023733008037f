"""Documents packed into one row of tokens: who belongs to whom, and attention that stays inside.

`document_ids` [B or 1, S] name the document of each token; attention does not cross from one to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpar.errors import PackedCallError
from fxpar.ops.traits import TAKES
from fxpar.torch_api.symbolic import known_equal
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.attention import scaled_dot_product_attention
from fxpar.tracer.context import CaptureContext, MaskRule, current

aten = torch.ops.aten
_SAME_POSITIONS = TAKES | {aten._to_copy.default}
_PACKED: ContextVar[Tensor | None] = ContextVar("fxpar_packed", default=None)
_IS_TOKEN: ContextVar[Tensor | None] = ContextVar("fxpar_is_token", default=None)


def document_ids_from_positions(position_ids: Tensor) -> Tensor:
    """position_ids [S] or [B, S] that restart at 0 with every document -> document ids [1 or B, S], counting from 1."""
    positions = position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)
    return (positions == 0).cumsum(-1)


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, length: int | torch.SymInt) -> Tensor:
    """cu_seqlens [C] = [0, end of document 1, ...] -> ids [1, length]; what is past the last end is one more."""
    stop: Any = length
    tokens = torch.arange(stop, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous().long(), tokens, right=True).unsqueeze(0)


def remembered(context: CaptureContext, key: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make(key)`, computed once per capture, and again where the key was written to."""
    place = (id(key), key._version)
    known = context.documents.get(place)
    if known is None:
        known = context.documents[place] = (key, make(key))  # holding the key keeps its id taken
    return known[1]


def documents_of_positions(context: CaptureContext, positions: Tensor) -> Tensor:
    """The documents of positions; notes which key of the batch they are, as a call may bring others that jump."""
    node = node_of(positions)
    while node is not None and node.op == "call_function" and node.target in _SAME_POSITIONS:
        node = node.all_input_nodes[0]
    context.restarting |= {key for key, value in context.batch.items() if node is not None and node_of(value) is node}
    return remembered(context, positions, document_ids_from_positions)


def with_batch_documents(rule: MaskRule, query: Tensor, key: Tensor, cu_seqlens: Tensor | None = None) -> MaskRule:
    """Give a causal rule without documents those of the batch: bounds if there are any, else restarting positions.

    For models whose masks are made by rule, with query and key [B, H, S, E]. Bounds are `cu_seqlens` [C] or the batch's
    "cu_seq_lens_q" or "cu_seqlens", positions are its "position_ids" [B or 1, S].
    """
    context, length = current(), query.shape[-2]
    if context is None or not rule.causal or rule.chunk or rule.keys is not None:
        return rule  # beside a mask of padding transformers looks for no documents either
    if not known_equal(length, key.shape[-2]):
        return rule
    batch = context.batch
    if cu_seqlens is None:
        cu_seqlens = next((batch[k] for k in ("cu_seq_lens_q", "cu_seqlens") if k in batch), None)
    if cu_seqlens is not None and (rule.documents is None or rule.positions is not None):
        ids = remembered(context, cu_seqlens, lambda bounds: document_ids_from_cu_seqlens(bounds, length))
        return replace(rule, documents=ids)
    positions = batch.get("position_ids")
    if rule.documents is not None or positions is None or positions.dim() != 2:
        return rule
    if not known_equal(positions.shape[1], length):
        return rule
    return replace(rule, documents=documents_of_positions(context, positions))


@contextmanager
def packed(document_ids: Tensor) -> Iterator[None]:
    """Inside the block, `F.scaled_dot_product_attention` over S tokens stays inside documents [B or 1, S].

    For loss functions around plain models; it acts on eager runs and on captured ones alike. Attention over another
    number of tokens is left alone.
    """
    token = _PACKED.set(document_ids)
    try:
        if current() is not None:
            yield  # the mode of the capture looks here
        else:
            with _PackedMode():
                yield
    finally:
        _PACKED.reset(token)


def surrounding_documents() -> Tensor | None:
    """The ids that the surrounding `packed` block names; None outside of one."""
    return _PACKED.get()


@contextmanager
def padded(is_token: Tensor | None) -> Iterator[None]:
    """Inside the block, `surrounding_tokens` are these [1, S]: 0 where a place of the rows is padding."""
    reset = _IS_TOKEN.set(is_token)
    try:
        yield
    finally:
        _IS_TOKEN.reset(reset)


def surrounding_tokens() -> Tensor | None:
    """What the surrounding `padded` block names; None outside of one."""
    return _IS_TOKEN.get()


@contextmanager
def without_surroundings() -> Iterator[None]:
    """Inside the block no surrounding `packed` or `padded` holds, for a forward that is captured on its own.

    Raises PackedCallError if the documents are several: the forward could not keep them apart.
    """
    ids = _PACKED.get()
    if ids is not None and ids.numel() and bool((ids != ids.flatten()[0]).any()):
        raise PackedCallError
    token = _PACKED.set(None)
    try:
        with padded(None):
            yield
    finally:
        _PACKED.reset(token)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """`F.scaled_dot_product_attention` with the documents of the surrounding `packed` block, if it fits them.

    A mask whose meaning is known is replaced by that meaning.
    """
    ids, context = _PACKED.get(), current()
    rule = context.mask_rule(attn_mask) if context is not None and attn_mask is not None else None
    if rule is not None:
        attn_mask, rule = rule.hidden_keys(), with_batch_documents(rule, query, key)
        ids = rule.documents if ids is None else ids
    fits = ids is not None and all(known_equal(x.shape[-2], ids.shape[-1]) for x in (query, key))
    return scaled_dot_product_attention(
        query, key, value, attn_mask, *args, **kwargs, document_ids=ids if fits else None, rule=rule
    )


class _PackedMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = packed_attention
        return func(*args, **(kwargs or {}))
