"""Example data: packed rows of tokens, images, vectors. Everything is drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.losses import next_token_labels

TOKENS = (61, 37, 94)
"""Default lengths of the micro-batches: unequal, and no multiple of a degree."""

ROWS = (8, 4, 12)
"""Default row counts for models without tokens."""

# Lengths of the documents in a row, as shares of it; the last document takes the rest.
_SHARES = (0.45, 0.3, 0.1)


def document_lengths(length: int) -> tuple[int, ...]:
    """Unequal lengths that add up to `length`."""
    parts = [max(1, int(length * share)) for share in _SHARES]
    while parts and sum(parts) >= length:
        parts.pop()
    return (*parts, length - sum(parts))


def packed_tokens(length: int, vocab: int, generator: torch.Generator, *, positions: bool = True) -> dict[str, Tensor]:
    """One row of documents: input_ids, labels [1, T], and position_ids [1, T] that restart with every document.

    Without `positions`, document_ids [1, T] say which token is of which document.
    """
    ids = torch.randint(0, vocab, (1, length), generator=generator)
    lengths = document_lengths(length)
    counted = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = next_token_labels(ids, position_ids=counted)
    if positions:
        return {"input_ids": ids, "labels": labels, "position_ids": counted}
    numbers = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None]
    return {"input_ids": ids, "labels": labels, "document_ids": numbers}


def token_batches(lengths: Sequence[int], vocab: int, seed: int, *, positions: bool = True) -> tuple[dict, ...]:
    """One packed row per length."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(packed_tokens(n, vocab, generator, positions=positions) for n in lengths)


def labelled_batches(
    key: str, shape: Sequence[int], classes: int, rows: Sequence[int], dtype: torch.dtype, seed: int
) -> tuple[dict, ...]:
    """Normal tensors [B, *shape] under `key`, with labels [B] below `classes`; one batch per entry of `rows`."""
    generator = torch.Generator().manual_seed(seed)

    def batch(count: int) -> dict[str, Tensor]:
        values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        return {key: values.to(dtype), "labels": torch.randint(0, classes, (count,), generator=generator)}

    return tuple(batch(count) for count in rows)
