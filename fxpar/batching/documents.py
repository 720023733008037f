"""Rows and the documents in them: where they begin, a row cut in its documents, a row with its documents marked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from fxpar.ir.graph import Input, dim_symbol

Row = Mapping[str, Tensor]
_POSITIONS = ("document_positions", "position_ids", "positions")


def document_starts(row: Row) -> Tensor | None:
    """Whether each token [T] of a row begins a document; None for a batch that marks no documents.

    Documents are marked by `document_ids` [1, T], or by positions [1, T] that restart at 0.
    """
    ids = row.get("document_ids")
    if ids is not None and ids.dim() == 2 and ids.shape[0] == 1:
        return torch.cat([torch.ones_like(ids[0, :1], dtype=torch.bool), ids[0, 1:] != ids[0, :-1]])
    positions = next((row[key] for key in _POSITIONS if key in row), None)
    if positions is None or positions.dim() != 2 or positions.shape[0] != 1:
        return None
    starts = positions[0] == 0
    starts[:1] = True
    return starts


def split_documents(inputs: Collection[Input], row: Row) -> list[dict[str, Tensor]]:
    """The documents of a row, each as a batch of its own with what `inputs` take; the row itself if none is marked.

    What has no dim of tokens is the same for all of them.
    """
    starts, token = document_starts(row), dim_symbol("T")
    wanted = {info.fqn: info.meta.shape for info in inputs if info.kind == "batch" and info.fqn in row}
    if starts is None:
        return [{key: row[key] for key in wanted}]
    begins = [*torch.nonzero(starts).flatten().tolist(), len(starts)]
    found = []
    for begin, end in pairwise(begins):
        document = {}
        for key, shape in wanted.items():
            value = row[key]
            for d, size in enumerate(shape):
                if size == token:
                    value = value.narrow(d, begin, end - begin)
            document[key] = value
        found.append(document)
    return found


def mark_documents(inputs: Collection[Input], row: Row, *, whole: bool = False) -> dict[str, Tensor]:
    """The row with `document_ids` and `document_positions` [1, T] where `inputs` take them; unmarked, or `whole`, it is
    one document.
    """
    missing = [info.fqn for info in inputs if info.kind == "batch" and info.fqn not in row]
    if not {"document_ids", "document_positions"} & set(missing):
        return dict(row)
    starts, token = None if whole else document_starts(row), dim_symbol("T")
    if starts is None:
        sized = ((row[info.fqn], info.meta.shape) for info in inputs if info.kind == "batch" and info.fqn in row)
        x, dim = next((x, shape.index(token)) for x, shape in sized if token in shape)
        starts = torch.arange(x.shape[dim], device=x.device) == 0
    index = torch.arange(len(starts), device=starts.device)
    made = {
        "document_ids": starts.cumsum(0)[None],
        "document_positions": (index - torch.where(starts, index, 0).cummax(0).values)[None],
    }
    return {**row, **{key: value for key, value in made.items() if key in missing}}


def cut_in_documents(inputs: Collection[Input], row: Row) -> dict[str, Tensor]:
    """An unmarked row [1, T] as two documents of about half its length; any other as it is. Not of half its length, as
    ranks that have a half each would keep them apart by themselves.
    """
    token = dim_symbol("T")
    like = next((row[i.fqn] for i in inputs if i.fqn in row and i.meta.shape == (1, token)), torch.empty(1, 0))
    length = like.shape[1]
    if document_starts(row) is not None or length < 2:
        return dict(row)
    second = torch.arange(length, device=like.device) >= min(length // 2 + 1, length - 1)
    return {**row, "document_ids": 1 + second.long()[None]}
