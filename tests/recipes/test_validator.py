"""Validation takes the rows that torchtitan's data-parallel ranks would take, to the last, each token weighs alike."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.validate import Validator

from fxpar.recipes.loader import SharedLoaders
from fxpar.recipes.validator import FxparValidator, steps_of
from tests.recipes.test_loader import ROWS, SEQ_LEN, Bytes, configured, stock


class Model:
    """Its loss is the mean of the labels, so that rows and weights show."""

    def evaluate(self, sequences: list[Any]) -> float:
        labels = torch.cat([one["labels"] for one in sequences])
        return float(labels[labels != -100].double().mean())


def validated(config: Any, data_ranks: int, turns: int) -> tuple[float, int]:
    """The loss that is logged, and how many tokens are counted."""
    logged: list[float] = []
    metrics = SimpleNamespace(ntokens_since_last_log=0, log_validation=lambda loss, step: logged.append(loss))
    validator = FxparValidator.of(config, ROWS, turns, data_ranks).build(
        parallelism=None,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=Bytes(),
        parallel_dims=None,
        loss_fn=None,
        validation_context=None,
        metrics_processor=metrics,
        seq_len=SEQ_LEN,
        local_batch_size=99,
    )
    validator.validate([Model()], step=1)
    return logged[0], metrics.ntokens_since_last_log


@pytest.mark.parametrize(("data_ranks", "turns", "steps"), [(1, 1, 3), (1, 2, 3), (2, 1, 3), (2, 1, -1), (1, 3, -1)])
def test_rows_of_torchtitans_ranks(data_ranks, turns, steps, tmp_path, monkeypatch):
    data = configured("text", tmp_path, monkeypatch, infinite=steps != -1)
    taken = [
        batch for loader in stock(data, data_ranks) for batch in islice(loader, None if steps < 0 else steps * turns)
    ]
    labels = torch.cat([labels for _, labels in taken])
    loss, tokens = validated(Validator.Config(enable=True, steps=steps, dataloader=data), data_ranks, turns)
    assert tokens == labels.numel()
    assert loss == pytest.approx(float(labels[labels != -100].double().mean()), rel=1e-12)


def test_steps_end_with_the_longest_loader():
    def batch(number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        row = torch.tensor([[number]])
        return {"input": row}, row

    batches = [[batch(0), batch(1), batch(2)], [batch(10)]]

    def taken(turns: int, steps: int) -> list[list[int]]:
        loaders = SharedLoaders(lambda number: batches[number], 2)
        return [documents.input_ids.tolist() for documents in steps_of(loaders, turns, steps)]

    assert taken(1, -1) == [[0, 10], [1], [2]]
    assert taken(2, -1) == [[0, 10, 1], [2]]
    assert taken(1, 2) == [[0, 10], [1]]


def test_another_validator_is_kept():
    class Mine(Validator):
        @dataclass(kw_only=True, slots=True)
        class Config(Validator.Config):
            pass

    mine = Mine.Config(enable=True)
    assert FxparValidator.of(mine, 1, 1, 1) is mine
