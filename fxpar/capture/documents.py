"""Documents packed into one row of tokens: who belongs to whom, and attention that stays inside.

`document_ids` [B or 1, S] name the document of each token; attention does not cross from one to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpar.capture.attention import scaled_dot_product_attention
from fxpar.capture.context import current
from fxpar.torch_api.tracing import known_equal

_PACKED: ContextVar[Tensor | None] = ContextVar("fxpar_packed", default=None)


def document_ids_from_positions(position_ids: Tensor) -> Tensor:
    """position_ids [S] or [B, S] that restart at 0 with every document -> document ids [1 or B, S], counting from 1."""
    positions = position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)
    return (positions == 0).cumsum(-1)


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, length: int | torch.SymInt) -> Tensor:
    """cu_seqlens [C] = [0, end of document 1, ...] -> document ids [1, length]; tokens past the last end are one more."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous().long(), tokens, right=True).unsqueeze(0)


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


def packed_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` with the documents of the surrounding `packed` block, if it fits them."""
    ids = _PACKED.get()
    fits = ids is not None and all(known_equal(x.shape[-2], ids.shape[-1]) for x in (query, key))
    return scaled_dot_product_attention(query, key, value, *args, **kwargs, document_ids=ids if fits else None)


class _PackedMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = packed_attention
        return func(*args, **(kwargs or {}))
