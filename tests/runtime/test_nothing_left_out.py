"""What a user gives and a run would leave out, or what one device would do otherwise, is named before anything runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar.errors import BatchKeyError, EvaluateLossError, SequenceError, UnreadKeyError
from fxpar.losses import causal_lm
from tests.runtime.hot import World

VOCAB, WIDTH = 31, 8
IDS = torch.tensor([3, 1, 4, 1, 5])


class Plain(nn.Module):
    """Takes more than token ids, if it gets it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        if token_type_ids is not None:
            x = x * (1 + token_type_ids[..., None])
        return self.head(x + self.positions(position_ids))


class Counting(Plain):
    """Scales by the number of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("idle", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen += 1
        self.idle += 1
        return super().forward(input_ids) * self.seen


class Normed(Plain):
    """A batch norm that trains writes statistics that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids).transpose(1, 2)).transpose(1, 2)


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return 0.5 * F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def of_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return causal_lm(model, batch) + (model.head.weight**2).sum()


def parallel(make: Any = Plain, **options: Any) -> Any:
    return fxpar.parallelize(make().double(), strategies={64: "dp1"}, monitor=False, **options)


UNREAD = {
    "position_ids": torch.arange(5) * 2,
    "positions": torch.tensor([0, 1, 2, 0, 2]),
    "token_type_ids": torch.zeros(5, dtype=torch.int64),
    "attention_mask": torch.tensor([0, 1, 1, 1, 1]),
    "loss_mask": torch.ones(5),
    "label": IDS,
}
READ = {
    "position_ids": torch.tensor([0, 1, 0, 1, 2]),
    "positions": torch.arange(5, dtype=torch.int32),
    "attention_mask": torch.ones(5, dtype=torch.bool),
    "document_ids": torch.tensor([4, 4, 4, 2, 2]),
    "target": IDS,
}
WORLD = World(1, lambda: None)


@WORLD.case
def unread_keys(rank: int) -> None:
    model = parallel()
    for key, value in UNREAD.items():
        for use in (model.train_step, model.evaluate, model.plan):
            with pytest.raises(UnreadKeyError, match=f"sequence 1 .*has '{key}', .*reads 'input_ids', 'labels'"):
                use([IDS, {"input_ids": IDS, key: value}])
    padding = (
        r"It hides 1 of its tokens\. If these are padding, leave .* out .*: input_ids\[attention_mask != 0\], labels"
    )
    with pytest.raises(UnreadKeyError, match=padding):
        model.train_step([{"input_ids": IDS, "attention_mask": UNREAD["attention_mask"]}])
    with pytest.raises(UnreadKeyError, match=r"sequence 0 .*has 3, which"):
        model.train_step([{"input_ids": IDS, 3: IDS}])
    with pytest.raises(UnreadKeyError, match="did you mean 'labels'"):
        model.train_step([{"input_ids": IDS, "label": IDS}])
    for key, value in READ.items():
        model.train_step([IDS, {"input_ids": IDS, key: value}])


def test_a_key_that_the_captured_step_does_not_read():
    unread_keys()


@WORLD.case
def read_keys(rank: int) -> list[float]:
    given = {"input_ids": IDS, "labels": IDS, "token_type_ids": IDS % 2}
    example = {key: value[None].repeat(1, 3) for key, value in given.items()}
    return [parallel(example=example).train_step([given]).loss]


def test_a_key_of_the_example_is_read():
    logits = Plain().double()(IDS[None], token_type_ids=IDS[None] % 2)[0]
    assert abs(read_keys()[0][0] - F.cross_entropy(logits, IDS).item()) < 1e-12


TWO = World(2, lambda: None)


@TWO.case
def lacking_keys(rank: int) -> float:
    """The sequence that lacks a key would be on one replica."""
    given = {"input_ids": IDS, "labels": IDS, "token_type_ids": IDS % 2}
    example = {key: value[None].repeat(1, 3) for key, value in given.items()}
    module = Plain().double()
    model = fxpar.parallelize(module, strategies={64: "dp2"}, example=example, monitor=False, timeout_s=20)
    for bad in (IDS, {"input_ids": IDS}, {**given, "token_type_ids": IDS[:, None]}):
        for use in (model.train_step, model.evaluate, model.plan):
            with pytest.raises((BatchKeyError, SequenceError), match=r"sequence 1 .*'token_type_ids'"):
                use([given, bad])
    return model.train_step([given, {**given, "token_type_ids": (IDS % 2).bool()}]).loss


def test_a_key_that_one_sequence_lacks_stops_all_ranks():
    logits = Plain().double()(IDS[None], token_type_ids=IDS[None] % 2)[0]
    assert lacking_keys() == pytest.approx([F.cross_entropy(logits, IDS).item()] * 2, rel=1e-12)


class Running(Plain):
    """Adds up the tokens before."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).cumsum(1)


DOCUMENTS = [
    {"input_ids": IDS, "document_ids": torch.tensor([7, 7, 3, 3, 3])},
    {"input_ids": IDS, "position_ids": torch.tensor([0, 1, 0, 1, 2])},
    {"input_ids": IDS, "document_ids": torch.tensor([7, 7, 3, 3, 3]), "labels": torch.tensor([-100, 2, 2, 1, 0])},
]


@WORLD.case
def documents_alone(rank: int) -> list[tuple[float, float, float]]:
    model = parallel(Running)
    found = []
    for sequence in DOCUMENTS:
        cut = {key: value.split([2, 3]) for key, value in sequence.items() if key in ("input_ids", "labels")}
        parts = [dict(zip(cut, part, strict=True)) for part in zip(*cut.values(), strict=True)]
        want = model.train_step(parts).loss
        found.append((want, model.train_step([sequence]).loss, model.evaluate([sequence])))
    return found


def test_documents_of_a_sequence_whose_model_mixes_tokens_run_alone():
    for want, stepped, evaluated in documents_alone()[0]:
        assert abs(stepped - want) < 1e-12
        assert abs(evaluated - want) < 1e-12


@WORLD.case
def evaluated(rank: int) -> None:
    with pytest.raises(EvaluateLossError, match="returns a mean over tokens"):
        parallel(loss=mean).evaluate([IDS])
    with pytest.raises(EvaluateLossError, match="uses parameters of the model itself"):
        parallel(loss=of_weights).evaluate([IDS])


def test_a_loss_of_which_evaluate_cannot_make_the_sum():
    evaluated()


@WORLD.case
def told(rank: int) -> list[list[str]]:
    found = []
    for make in (Plain, Normed, Counting):
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            parallel(make)
        found.append([str(one.message) for one in raised if "buffers" in str(one.message)])
    return found


def test_a_forward_that_reads_what_it_wrote():
    plain, normed, (carried, counted) = told()[0]
    assert not plain
    assert not normed
    assert "the forward reads buffers that it writes (seen)" in carried
    assert "the forward makes new values of buffers from the old ones (idle)" in counted
    assert "Losses and gradients do not depend on them" in counted
