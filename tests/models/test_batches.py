"""Example data: packed documents, labels, seeds."""

from __future__ import annotations

import pytest
import torch

from fxpar.models.batches import document_lengths, labelled_batches, packed_tokens, token_batches
from fxpar.models.loaded import LoadedModel, valid_count


@pytest.mark.parametrize("length", [2, 3, 7, 37, 61, 4096])
def test_documents_fill_the_row(length):
    parts = document_lengths(length)
    assert sum(parts) == length
    assert min(parts) >= 1
    if length >= 20:
        assert len(set(parts)) >= 3  # of unequal length


def test_packed_row():
    batch = packed_tokens(40, 11, torch.Generator().manual_seed(0))
    ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
    starts = (positions == 0).nonzero()[:, 0].tolist()
    assert len(starts) == len(document_lengths(40))
    ends = [*(s - 1 for s in starts[1:]), 39]
    assert (labels == -100).nonzero()[:, 0].tolist() == ends
    inside = [i for i in range(39) if i not in ends]
    assert torch.equal(labels[inside], ids[[i + 1 for i in inside]])
    assert int(ids.max()) < 11


def test_row_without_positions_numbers_its_documents():
    batch, counted = (packed_tokens(9, 11, torch.Generator().manual_seed(0), positions=p) for p in (False, True))
    assert set(batch) == {"input_ids", "labels", "document_ids"}
    assert torch.equal(batch["labels"], counted["labels"])
    assert torch.equal(batch["document_ids"], (counted["position_ids"] == 0).cumsum(1))


def test_micro_batches_differ_and_repeat_with_the_seed():
    first, again, other = (token_batches((30, 30, 8), 50, seed) for seed in (0, 0, 1))
    assert [b["input_ids"].shape[1] for b in first] == [30, 30, 8]
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])
    assert all(torch.equal(a[k], b[k]) for a, b in zip(first, again, strict=True) for k in a)
    assert not torch.equal(first[0]["input_ids"], other[0]["input_ids"])


def test_scale_counts_valid_tokens_of_all_micro_batches():
    batches = token_batches((30, 8), 50, 0)
    model = LoadedModel("x", torch.nn.Linear(1, 1), lambda model, batch: torch.zeros(()), batches[0], batches)
    valid = sum(int((b["labels"] != -100).sum()) for b in batches)
    assert valid < 38
    assert model.scale() == 1 / valid


def test_rows_count_where_there_are_no_tokens():
    (batch,) = labelled_batches("x", (3,), 4, (5,), torch.float64, 0)
    assert batch["x"].shape == (5, 3)
    assert batch["x"].dtype == torch.float64
    assert valid_count(batch) == 5
    assert valid_count({"x": torch.zeros(6, 2)}) == 6
