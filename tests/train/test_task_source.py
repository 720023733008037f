"""From [task.NAME] to tasks and mini-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from fxpar import losses
from fxpar.errors import FxparError, ModelFunctionError, ResumeError, TaskDataError
from fxpar.runtime.report import Evaluated
from fxpar.train.session import _together
from fxpar.train.task_source import TaskLoader, check_tasks, task_model, tasks_of
from tests.train.test_config import parse

FILE = """
import torch
from torch import nn

class Model(nn.Linear):
    def __init__(self, width):
        super().__init__(3, width)
        self.words = nn.Embedding(9, width)

    def forward(self, input_ids):
        return super().forward(input_ids) if input_ids.is_floating_point() else self.words(input_ids)

def build(width: int = 4):
    return Model(width)

def loss(model, batch):
    return model(batch["x"]).sum()

def long(number):
    return torch.ones(5 + 2 * number, dtype=torch.int64)

def mean(model, batch):
    return model(batch["x"]).exp().mean().log()

def none(number):
    return {"x": torch.ones(0, 3)}

def rows(number):
    if number == 9:
        raise ValueError("no more")
    return {"x": torch.full((2, 3), float(number))}

def words(number):
    return torch.arange(number + 2) if number != 4 else [1, 2]
"""
TASKS = """
[model]
name = "FILE:build"
options = { width = 5 }
[task.rows]
loss = "loss"
data = "rows"
items = 2
weight = 2.0
validation = 1
ranks = [0]
strategies = { 8 = "dp1" }
dynamic = { x = { 0 = "B" } }
[task.words]
loss = "fxpar.losses:causal_lm"
data = "words"
items = 1
[strategies]
8 = "dp2"
[precision]
parameters = "float64"
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    return parse(TASKS.replace("FILE", str(tmp_path / "file.py")))


def test_tasks_are_what_their_sections_say(config):
    rows, words = tasks_of(config).values()
    assert (rows.weight, rows.ranks, rows.strategies, rows.dynamic) == (2.0, [0], {8: "dp1"}, {"x": {0: "B"}})
    assert rows.example["x"].dtype == torch.float64
    assert (words.loss, words.strategies, words.dynamic) == (losses.causal_lm, None, "auto")
    assert {key: value.tolist() for key, value in words.example.items()} == {
        "input_ids": [[0, 1]],
        "labels": [[1, -100]],
    }
    model = task_model(config)
    assert (model.weight.shape, model.weight.dtype) == ((5, 3), torch.float64)
    assert torch.equal(model.weight, task_model(config).weight)
    assert task_model(config, "meta").weight.is_meta
    check_tasks(config)


def first_numbers(loader, steps):
    return [[int(one["x"][0, 0]) for one in batch["rows"]] for batch in islice(iter(loader), steps)]


def test_a_loader_goes_on_where_it_was(config):
    loader = TaskLoader(config)
    assert [int(one["x"][0, 0]) for one in loader.held_out()["rows"]] == [0]
    assert first_numbers(loader, 2) == [[1, 2], [3, 4]]
    state = loader.state_dict()
    assert state == {"tasks": {"rows": 4, "words": 2}}
    joined = replace(config, tasks={"rows": config.tasks["rows"], "more": config.tasks["words"]})
    other = TaskLoader(joined)
    other.load_state_dict(state)
    batch = next(iter(other))
    assert (int(batch["rows"][0]["x"][0, 0]), len(batch["more"][0])) == (5, 2)
    with pytest.raises(ResumeError, match="written by a run without tasks"):
        other.load_state_dict({"epoch": 1})


def test_what_is_no_item(config):
    rows = iter(TaskLoader(replace(config, tasks={"rows": config.tasks["rows"]})))
    assert len(list(islice(rows, 4))) == 4
    with pytest.raises(TaskDataError, match=r"task.rows.data: .*file.py:rows\(9\) raised ValueError: no more"):
        next(rows)
    words = iter(TaskLoader(replace(config, tasks={"words": config.tasks["words"]})))
    assert len(list(islice(words, 4))) == 4
    with pytest.raises(TaskDataError, match=r"file.py:words\(4\) returned list. Let it return"):
        next(words)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('8 = "dp2"', '8 = "ep2"', "task 'words': strategy 'ep2': ep cuts experts, and model 'Model' has none"),
        ('8 = "dp2"', '8 = "cp1+cut(nope) > cp1"', "task 'words': .*nope"),
        ("{ x = {", "{ y = {", "task 'rows': dynamic names 'y', but the batch has x"),
        ('0 = "B"', '2 = "B"', "task 'rows': .* does not name a dim of a 2-dim tensor"),
        ('data = "words"', 'data = "long"', r"task 'words': sequence 2 .* 9 tokens, but the longest limit is 8"),
        ('8 = "dp2"', '8 = "dp2+remat(1B)"', "task 'words': remat: .* the budget is 0.000 MB"),
        ('{ 8 = "dp1" }', '{ 1 = "dp1" }', r"task 'rows': batch 0 .* has 2 in dim 0 of 'x' .*limit is 1"),
        ('data = "rows"', 'data = "none"', r"task.rows.data: .*none\(0\) returned 'x' without an element"),
        ('loss = "loss"', 'loss = "mean"', r"task 'rows': the loss is a mean"),
    ],
)
def test_what_does_not_fit_before_ranks_start(config, tmp_path, old, new, told):
    text = TASKS.replace("items = 1", "items = 3").replace("FILE", str(tmp_path / "file.py"))
    with pytest.raises(FxparError, match=told):
        check_tasks(parse(text.replace(old, new, 1)))


def test_functions_that_are_not_there(config):
    for key in ("loss", "data"):
        broken = replace(config, tasks={"rows": replace(config.tasks["rows"], **{key: "row"})})
        with pytest.raises(ModelFunctionError, match=r"has no function 'row'; did you mean 'rows'"):
            check_tasks(broken)


def test_the_loss_of_held_out_items_is_weighted(config):
    found = _together(config, {"rows": Evaluated(1.5, {"accuracy": 0.5}), "words": Evaluated(1.0)})
    assert (found, found.metrics) == (4.0, {"rows": 1.5, "words": 1.0, "rows/accuracy": 0.5})
