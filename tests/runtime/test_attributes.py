"""Plain attributes of modules that change after the capture: a warning, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparWarning
from fxpar.runtime.attributes import plain_attributes
from fxpar.tracer import capture
from tests.captured import tokens


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(13, 8), nn.Dropout(0.5), nn.Linear(8, 13)
        self.alpha = 2.0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.dropout(self.embedding(input_ids))) * self.alpha


class Counting(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.alpha += 1
        return super().forward(input_ids)


@pytest.fixture
def parallel() -> Iterator[Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield fxpar.parallelize(Model(), strategies={64: "dp1"}, loss=fxpar.losses.causal_lm, monitor=False)
    dist.destroy_process_group()


BATCH = [torch.arange(9), torch.arange(4)]
USES = {
    "a step": lambda model: model.train_step(BATCH),
    "evaluation": lambda model: model.evaluate(BATCH),
    "a plain call": lambda model: model(BATCH[0][None]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_change_is_told_once(parallel, use):
    with warnings.catch_warnings(record=True) as nothing:
        warnings.simplefilter("always")
        use(parallel)
        parallel.eval()
        parallel.train()
        use(parallel)
    assert not [one for one in nothing if issubclass(one.category, FxparWarning)]
    parallel.alpha, parallel.dropout.p = 3.0, 0.0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        use(parallel)
        use(parallel)
    said = [str(one.message) for one in found if issubclass(one.category, FxparWarning)]
    assert [text.partition(",")[0] for text in said] == [
        "alpha of the model was 2.0 when it was captured",
        "p of module 'dropout' was 0.5 when it was captured",
    ]


class CountingByClass(Model):
    step = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.step += 1
        return super().forward(input_ids) * min(1.0, self.step / 10)


class CountingInside(Model):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.counts = {"n": 4, "name": "x"}, [1.5]

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.state["n"] += 1
        self.counts[0] += 1
        return super().forward(input_ids) * self.state["n"] * self.counts[0]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Model, []),
        (Counting, ["alpha from 2.0 to 3.0"]),
        (CountingByClass, ["step from 0 to 1"]),
        (CountingInside, ["state['n'] from 4 to 5", "counts[0] from 1.5 to 2.5"]),
    ],
)
def test_a_forward_that_counts(make, told):
    (batch,) = tokens(13, 6)
    model = make()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture(model, fxpar.losses.causal_lm, batch)
    said = [str(one.message) for one in found if issubclass(one.category, FxparWarning)]
    assert [text.partition(": captured")[0] for text in said] == [
        f"the forward of the model sets {one}" for one in told
    ]
    assert "step" not in vars(model)


def test_an_attribute_of_the_class_that_changes():
    model = CountingByClass()
    (found,) = [one for one in plain_attributes(model) if one.name == "step"]
    assert (found.value, found.changed()) == (0, False)
    model.step = 3
    assert found.changed()
