"""Packed rows of torchtitan become documents, and nothing that is trained on is lost."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxpar.losses import IGNORE_INDEX
from fxpar.recipes.documents import Documents, split_rows


@dataclass(frozen=True)
class Segment:
    """A document of a row: what is predicted at each token, and where its positions begin (> 0: it was cut)."""

    is_valid: tuple[bool, ...]
    first_position: int = 0


segments = st.lists(st.booleans(), min_size=1, max_size=6).map(lambda valid: Segment(tuple(valid)))
rows = st.builds(
    lambda cut, first, rest, padding: (
        [Segment(first.is_valid, cut), *rest] + ([Segment((False,) * padding)] if padding else [])
    ),
    st.sampled_from((0, 0, 1, 700)),
    segments,
    st.lists(segments, max_size=4),
    st.sampled_from((0, 0, 1, 5)),
)


def packed(batch: list[list[Segment]]) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of one length; the shorter ones are filled with padding. Every token of the batch has another id."""
    width = max(sum(len(s.is_valid) for s in row) for row in batch)
    for row in batch:
        missing = width - sum(len(s.is_valid) for s in row)
        if missing:
            row.append(Segment((False,) * missing))
    positions = [[s.first_position + i for s in row for i in range(len(s.is_valid))] for row in batch]
    tokens = torch.arange(len(batch) * width).reshape(len(batch), width)
    valid = torch.tensor([[v for s in row for v in s.is_valid] for row in batch])
    labels = torch.where(valid, tokens + 1000, IGNORE_INDEX)
    return {"input": tokens, "positions": torch.tensor(positions)}, labels


@given(st.lists(rows, min_size=1, max_size=3))
def test_every_document_with_a_label_comes_once_and_in_order(batch):
    inputs, labels = packed(batch)
    found = split_rows(inputs, labels).sequences()
    documents = [s for row in batch for s in row]
    kept = [s for s in documents if any(s.is_valid)]
    assert [len(d["input_ids"]) for d in found] == [len(s.is_valid) for s in kept]
    expected = torch.cat([torch.tensor([any(s.is_valid)] * len(s.is_valid)) for s in documents])
    tokens = torch.cat([d["input_ids"] for d in found]) if found else torch.tensor([], dtype=torch.long)
    assert tokens.tolist() == inputs["input"].flatten()[expected].tolist()
    for document in found:  # labels stay beside their tokens, and are those of the row
        answer = document["labels"]
        valid = answer != IGNORE_INDEX
        assert valid.any()
        assert answer[valid].tolist() == (document["input_ids"][valid] + 1000).tolist()
    assert sum(int((d["labels"] != IGNORE_INDEX).sum()) for d in found) == int((labels != IGNORE_INDEX).sum())


def test_without_positions_a_row_is_a_document():
    tokens = torch.arange(8).reshape(2, 4)
    labels = torch.tensor([[1, 2, 3, 4], [IGNORE_INDEX] * 4])
    (document,) = split_rows({"input": tokens}, labels).sequences()
    assert document["input_ids"].tolist() == [0, 1, 2, 3]
    assert document["labels"].tolist() == [1, 2, 3, 4]


def test_a_row_that_begins_inside_of_a_document():
    inputs = {"input": torch.arange(6)[None], "positions": torch.tensor([[7, 8, 9, 0, 1, 0]])}
    labels = torch.tensor([[1, 2, 3, IGNORE_INDEX, IGNORE_INDEX, 6]])
    assert [d["input_ids"].tolist() for d in split_rows(inputs, labels).sequences()] == [[0, 1, 2], [5]]


def test_prompt_tokens_stay_with_their_answer():
    """A chat document: its prompt has no labels, but the answer is read after it."""
    inputs = {"input": torch.arange(5)[None], "positions": torch.tensor([[0, 1, 2, 3, 0]])}
    labels = torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, 30, 40, IGNORE_INDEX]])
    (document,) = split_rows(inputs, labels).sequences()
    assert document["input_ids"].tolist() == [0, 1, 2, 3]
    assert document["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 30, 40]


def test_no_label_no_document():
    inputs = {"input": torch.zeros(2, 3, dtype=torch.long), "positions": torch.arange(3).expand(2, 3)}
    found = split_rows(inputs, torch.full((2, 3), IGNORE_INDEX))
    assert found.sequences() == []
    assert (found.valid_tokens, found.places) == (0, 6)


@given(st.lists(rows, min_size=1, max_size=3), st.lists(rows, min_size=1, max_size=3))
def test_documents_are_joined_and_sent(one, other):
    parts = [split_rows(*packed(batch)) for batch in (one, other)]
    found = pickle.loads(pickle.dumps(Documents.joined(parts)))
    expected = [document for part in parts for document in part.sequences()]
    assert len(found.sequences()) == len(expected)
    for document, wanted in zip(found.sequences(), expected, strict=True):
        assert all(torch.equal(document[key], wanted[key]) for key in ("input_ids", "labels"))
        assert document["input_ids"].dtype == torch.int64
    assert found.valid_tokens == sum(part.valid_tokens for part in parts)
    assert found.places == sum(part.places for part in parts)
