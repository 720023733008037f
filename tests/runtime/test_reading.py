"""What a mini-batch of whole batches is: its lengths, and what it counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from fxpar.batching import GroupCost, LengthGroup, MicroBatch, plan_batch
from fxpar.errors import (
    LengthMultipleError,
    NoValidTokenError,
    SequenceTooLongError,
    WholeBatchError,
    WholeBatchesError,
    WholeBatchSizeError,
)
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.ir.strategy import Strategy
from fxpar.runtime.reading import TokenRows, WholeBatches

ROWS, TOKENS = dim_symbol("B"), dim_symbol("T")
IMAGES = TensorMeta((ROWS, 3), torch.float32)
WORDS = TensorMeta((ROWS, TOKENS), torch.int64)


def pair(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"pixels": torch.zeros(rows, 3), "target": torch.ones(rows, tokens, dtype=torch.int64)}


def test_the_length_is_that_of_tokens_or_else_of_rows():
    items = [pair(2, 5), pair(4, 3)]
    assert WholeBatches({"pixels": IMAGES, "target": WORDS}).lengths(items) == (5, 3)
    assert WholeBatches({"pixels": IMAGES}).lengths(items) == (2, 4)
    fixed = WholeBatches({"pixels": TensorMeta((4, 3), torch.float32)})
    assert (fixed.lengths(items[1:]), fixed.length_dim) == ((1,), "")


def test_labels_count_or_else_rows():
    """Only what is called labels is: `target` may be what a decoder reads."""
    keys = {"pixels": IMAGES, "target": WORDS}
    assert WholeBatches(keys).valid([pair(2, 5), pair(4, 3)]) == 6
    labelled = [{**pair(2, 3), "labels": torch.tensor([[1, -100, 2], [-100, -100, 3]])}]
    assert WholeBatches({**keys, "labels": WORDS}).valid(labelled) == 3
    example = {"labels": torch.ones(4, 3)}
    assert WholeBatches({**keys, "labels": WORDS}).averaged(labelled, 4, example) == 6 - 2  # one fewer of each row
    assert WholeBatches(keys).averaged(labelled, 0, example) == 2
    with pytest.raises(NoValidTokenError):
        WholeBatches({"labels": WORDS}).valid([{"labels": torch.full((2, 3), -100)}])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"pixels": torch.zeros(3, 3)},
            r"has 'target' of shape \[2, 5\]; the captured step reads \[B, T\].* `dynamic` of the task",
        ),
        ({"pixels": torch.zeros(2, 4)}, r"has 'pixels' of shape \[2, 4\]; the captured step reads \[B, 3\]"),
        ({"target": torch.ones(2, 5)}, "has 'target' of torch.float32; the captured step reads torch.int64"),
        ({"target": [1, 2]}, "has 'target' as a list"),
        ({"mask": torch.ones(2)}, "has 'mask', which the step does not read"),
        (pair(0, 5), r"has 'pixels' of shape \[0, 3\]: leave empty batches out"),
    ],
)
def test_a_batch_is_like_the_example(changed, why):
    reading = WholeBatches({"pixels": IMAGES, "target": WORDS})
    reading.check([pair(2, 5), pair(4, 3)])
    with pytest.raises(WholeBatchError, match=f"batch 1 of the mini-batch {why}"):
        reading.check([pair(4, 3), {**pair(2, 5), **changed}])


@dataclass
class Program:
    """What a reading asks a program."""

    divisors: dict[str, int]
    padding_hazard: str | None = "conv at x"
    strategy: str = "dp2.cp2"


def test_sizes_that_no_strategy_takes_are_told_by_key_and_dim():
    reading, items = WholeBatches({"pixels": IMAGES, "target": WORDS}), [pair(2, 5), pair(3, 9)]
    groups = [LengthGroup(8, Strategy.parse("cp2"), 8, multiple=2)]
    for lengths, why in (
        ((4, 5), r"must be a multiple of 2 up to 8 \('cp2'\). `dynamic` of the task says which sizes may differ"),
        ((4, 9), r"the longest limit is 8 \('cp2'\). Add a strategy for 9 or more, or split it. `dynamic`"),
    ):
        with pytest.raises((LengthMultipleError, SequenceTooLongError)) as caught:
            plan_batch(lengths, groups, [GroupCost(1.0, 0.0, 0.0)], lambda *_: 0.0)
        told = str(reading.retold(caught.value))
        assert re.search(
            rf"batch 1 .* has {lengths[1]} in dim 1 of 'target' \(the dynamic dim 'T'\), but .*{why}", told
        )
    with pytest.raises(
        WholeBatchSizeError, match=r"batch 1 .* has 3 in dim 0 of 'pixels' .* multiple of 2 .*'dp2.cp2'"
    ):
        reading.check_divides(Program({"B": 2}), items, (0, 1))  # type: ignore[arg-type]
    reading.check_divides(Program({"B": 2}, None), items, (0, 1))  # type: ignore[arg-type]
    assert TokenRows().retold(caught.value) is caught.value


def test_what_is_no_batch():
    reading = WholeBatches({"pixels": IMAGES, "target": WORDS})
    with pytest.raises(WholeBatchError, match=r"batch 0 of the mini-batch has no 'pixels', which .*; it is empty"):
        reading.check([{}])
    with pytest.raises(
        WholeBatchesError, match=r"is a dict. Give a list of batches .* pixels, target; one batch alone"
    ):
        reading.check(pair(2, 5))  # type: ignore[arg-type]


def test_the_loss_function_takes_a_batch_as_it_is():
    items = [pair(2, 5), pair(4, 3)]
    found = WholeBatches({"pixels": IMAGES}).unpadded(items, MicroBatch((1,), 3), ["pixels"])
    assert list(found) == ["pixels"]
    assert found["pixels"] is items[1]["pixels"]
