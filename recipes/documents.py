"""From torchtitan's packed rows to documents: what `train_step` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.losses import IGNORE_INDEX


@dataclass(frozen=True)
class Documents:
    """Documents one after the other: `input_ids` and aligned `labels` [N] (-100 where nothing is to be predicted), and
    the `lengths` of the documents, which add up to N. `places` are those of the rows that they lay in, with padding.
    """

    input_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    places: int

    @staticmethod
    def joined(parts: Sequence[Documents]) -> Documents:
        """Those of several parts, in order."""
        return Documents(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.labels for part in parts]),
            tuple(length for part in parts for length in part.lengths),
            sum(part.places for part in parts),
        )

    def sequences(self) -> list[dict[str, Tensor]]:
        """`input_ids` and `labels` [T] of each document, views of these here."""
        columns = zip(self.input_ids.split(self.lengths), self.labels.split(self.lengths), strict=True)
        return [{"input_ids": ids, "labels": labels} for ids, labels in columns]

    @property
    def valid_tokens(self) -> int:
        """How many tokens are to be predicted."""
        return int((self.labels != IGNORE_INDEX).sum())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as 32-bit arrays: half the bytes, and without what torch adds to each tensor."""
        ids, labels = (column.to(torch.int32).numpy() for column in (self.input_ids, self.labels))
        return _unpickled, (ids, labels, self.lengths, self.places)


def _unpickled(ids: Any, labels: Any, lengths: tuple[int, ...], places: int) -> Documents:
    return Documents(torch.from_numpy(ids).long(), torch.from_numpy(labels).long(), lengths, places)


def split_rows(inputs: Mapping[str, Tensor], labels: Tensor) -> Documents:
    """The documents of packed rows.

    `inputs` has "input" [B, S] and "positions" [B, S] that restart at 0 with every document (without them a row is one
    document), labels are [B, S] with -100 where nothing is to be predicted. A document without any label, such as the
    padding at the end of a row, is left out: it adds nothing to the loss or to a gradient.
    """
    tokens, positions = inputs["input"], inputs.get("positions")
    begins = torch.zeros_like(tokens, dtype=torch.bool) if positions is None else positions == 0
    begins[:, :1] = True
    number = begins.flatten().cumsum(0) - 1  # of the document that a token is in
    starts = begins.flatten().nonzero().flatten()
    lengths = starts.diff(append=starts.new_tensor([tokens.numel()]))
    has_label = torch.zeros_like(starts, dtype=torch.bool)
    has_label[number[labels.flatten() != IGNORE_INDEX]] = True
    kept = has_label[number]
    return Documents(tokens.flatten()[kept], labels.flatten()[kept], tuple(lengths[has_label].tolist()), tokens.numel())


__all__ = ["Documents", "split_rows"]
