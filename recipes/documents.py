"""From torchtitan's packed rows to sequences: what `train_step` takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxpar.losses import IGNORE_INDEX


def split_rows(inputs: Mapping[str, Tensor], labels: Tensor) -> list[dict[str, Tensor]]:
    """The documents of packed rows: `input_ids` and aligned `labels`, [T] each.

    `inputs` has "input" [B, S] and "positions" [B, S] that restart at 0 with every document (without them a row is one
    document), labels are [B, S] with -100 where nothing is to be predicted. A document without any label, such as the
    padding at the end of a row, is left out: it adds nothing to the loss or to a gradient.
    """
    tokens = inputs["input"]
    positions = inputs.get("positions")
    found = []
    for row in range(tokens.shape[0]):
        starts = [0] if positions is None else torch.nonzero(positions[row] == 0).flatten().tolist()
        if not starts or starts[0] != 0:
            starts = [0, *starts]
        for begin, end in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
            answer = labels[row, begin:end]
            if bool((answer != IGNORE_INDEX).any()):
                found.append({"input_ids": tokens[row, begin:end], "labels": answer})
    return found


__all__ = ["split_rows"]
