"""Ids that no table has are found before anything runs: which limits a graph states, and which id the error names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.batching.ids import IdLimit, check_ids, id_limits
from fxpar.errors import TokenIdError
from fxpar.tracer import capture
from tests.captured import gpt, tokens


class Tables(nn.Module):
    """Ids go into a table of 9 rows, shifted into one of 12, and hashed into one of 5; 7 classes are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.later, self.hashed = nn.Embedding(9, 8), nn.Embedding(12, 8), nn.Embedding(5, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shifted = F.pad(input_ids[:, :-1], (1, 0)).int()
        return self.head(self.whole(input_ids) + self.later(shifted) + self.hashed(input_ids * 3 % 5))


def masked(model, batch):
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-7, reduction="sum")


def smooth(model, batch):
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=0.1, reduction="sum")


def limits_of(loss):
    (batch,) = tokens(7, 6)
    batch.pop("position_ids")
    return id_limits(capture(Tables(), loss, batch))


def test_limits_of_a_graph():
    found = id_limits(gpt().graph)
    assert {key: limit.rows for key, limit in found.items()} == {"input_ids": 61, "labels": 61, "position_ids": 64}
    assert found["position_ids"].table == "the table of 'positions'"
    # What is computed from ids says nothing about them, the smallest of the tables that they index does.
    assert limits_of(masked) == {
        "input_ids": IdLimit(9, "the table of 'whole'"),
        "labels": IdLimit(7, "the table of logits", frozenset({-7})),
    }
    assert limits_of(smooth)["labels"] == IdLimit(7, "the table of logits", frozenset({-100}))


@pytest.mark.parametrize(
    "moved",
    [lambda x: x.repeat(2, 1), lambda x: x.flip(1), lambda x: x.roll(1, 1), lambda x: x[:, None].squeeze((0, 1))[None]],
    ids=["repeated", "turned", "rolled", "relabelled"],
)
def test_ids_that_are_moved_index_their_table(moved):
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.table(moved(input_ids))

    (batch,) = tokens(7, 6)
    graph = capture(Moved(), lambda m, b: m(b["input_ids"]).square().sum(), {"input_ids": batch["input_ids"]})
    assert id_limits(graph)["input_ids"] == IdLimit(9, "the table of 'table'")


def test_labels_of_pixels_are_classes():
    def loss(model, batch):
        scores = model(batch["x"]).log_softmax(1)
        return F.nll_loss(scores, batch["labels"], ignore_index=-3, reduction="sum")

    batch = {"x": torch.randn(2, 3, 4, 4), "labels": torch.randint(5, (2, 4, 4))}
    graph = capture(nn.Conv2d(3, 5, 1), loss, batch)
    assert id_limits(graph)["labels"] == IdLimit(5, "the table of logits", frozenset({-3}))


LIMITS = {
    "input_ids": IdLimit(9, "the table of 'tokens'"),
    "labels": IdLimit(7, "the table of logits", frozenset({-100})),
    "position_ids": IdLimit(4, "the table of 'positions'"),
}
ids = torch.tensor


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (
            ids([1, 9]),
            r"sequence 1 of the mini-batch, position 1: 'input_ids' is 9, but the table of 'tokens' has",
        ),
        (ids([-1, 2]), r"position 0: 'input_ids' is -1"),
        (ids([1, 2, 8]), r"position 1: 'labels' is 8, but the table of logits has 7 rows"),  # made of the next token
        ({"tokens": ids([1, 2], dtype=torch.int32), "targets": ids([-100, 7])}, r"position 1: 'labels' is 7"),
        ({"input_ids": ids([1, 2]), "labels": ids([-3, 1])}, r"position 0: 'labels' is -3"),
        (ids([1] * 5), r"position 4: 'position_ids' is 4, .* 4 rows .*\. Give sequences of at most 4 tokens, or"),
        ({"input_ids": ids([1, 2]), "position_ids": ids([0, 11])}, r"position 1: 'position_ids' is 11"),
    ],
)
def test_the_first_bad_id_is_named(bad, named):
    with pytest.raises(TokenIdError, match=named):
        check_ids([ids([1, 2, 3]), bad, bad], LIMITS)


@pytest.mark.parametrize(
    "good",
    [
        ids([8, 6, 0, 1]),  # the first token of a sequence is nobody's label
        {"input_ids": ids([6, 8, 6]), "document_ids": ids([1, 2, 2])},  # nor is the first one of a document
        {"input_ids": ids([8, 8]), "labels": ids([-100, 6])},
        {"input_ids": ids([1] * 6), "position_ids": ids([0, 1, 0, 1, 2, 3])},
        {"input_ids": ids([1, 1]), "scores": torch.randn(2)},
    ],
)
def test_ids_with_rows_pass(good):
    check_ids([ids([1, 2]), good], LIMITS)
    check_ids([ids([1]), {"input_ids": ids([99])}], {})


def test_ids_of_two_bytes_without_a_sign():
    limits = {"input_ids": IdLimit(9, "the table")}
    check_ids([torch.tensor([1, 8], dtype=torch.uint16)], limits)
    with pytest.raises(TokenIdError, match="65535"):
        check_ids([torch.arange(3), torch.tensor([1, 65535], dtype=torch.uint16)], limits)
