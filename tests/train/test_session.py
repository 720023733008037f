"""Tasks of a configuration, trained on forked ranks: as one device trains them, and as if never interrupted."""

from __future__ import annotations

import json

import pytest
import torch

from fxpar.runtime.forked import run_forked
from fxpar.train.loop import one_step
from fxpar.train.report import collect, write_report
from fxpar.train.session import open_session
from fxpar.train.task_source import TaskLoader, task_model, tasks_of
from fxpar.train.text import NOTHING
from tests.train.test_config import parse
from tests.train.test_report import page_data

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

def build():
    return nn.ModuleDict({"words": nn.Embedding(11, 8), "head": nn.Linear(8, 11), "rows": nn.Linear(3, 8)})

def rows(model, batch):
    return F.cross_entropy(model["head"](model["rows"](batch["x"])), batch["labels"], reduction="sum")

def some_rows(number):
    g = torch.Generator().manual_seed(number)
    return {"x": torch.randn(4, 3, generator=g), "labels": torch.randint(0, 11, (4,), generator=g)}

def said(model, batch):
    scores = model["head"](model["words"](batch["input_ids"]))
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

def words(number):
    return torch.arange(number + 3) % 11
"""
TASKS = """
[model]
name = "FOLDER/file.py:build"
[task.rows]
loss = "rows"
data = "some_rows"
items = 2
weight = 2.0
validation = 1
ranks = [1]
strategies = { 8 = "dp1" }
[task.said]
loss = "said"
data = "words"
items = 3
[strategies]
16 = "dp2"
[optimizer]
clip = 0.0
weight_decay = 0.0
implementation = "loop"
[precision]
parameters = "float64"
[checkpoint]
folder = "FOLDER/checkpoints"
[run]
steps = 3
folder = "FOLDER/run"
"""


def train(config, rank):
    torch.manual_seed(1)
    session = open_session(config, NOTHING, torch.device("cpu"))
    records = [one_step(session.training, 1), one_step(session.training, 2)]
    session.save(2)
    records.append(one_step(session.training, 3))
    held_out = session.validate(3)
    session.training.traces.choose(1.0)
    page = None
    if (parts := collect(session)) is not None:
        lines = [json.dumps(record.to_json()) for record in records]
        config.folder.mkdir(parents=True)
        (config.folder / "metrics.jsonl").write_text("\n".join(lines))
        page = write_report(config.folder, config.name, parts)
    again = open_session(config, NOTHING, torch.device("cpu"))
    again.resume()
    return records, held_out, one_step(again.training, 3), page


def one_device(config):
    """Losses of three steps, and of what is held out behind them."""
    model, tasks, losses = task_model(config), tasks_of(config), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.55, 0.1)[min(step, 2)])

    def mean(name, items):
        batches = [one if isinstance(one, dict) else as_row(one) for one in items]
        count = sum(int((one["labels"] != -100).sum()) for one in batches)
        return sum(tasks[name].loss(model, one) for one in batches) / count

    loader = TaskLoader(config)
    for _, batch in zip(range(3), loader, strict=False):
        parts = {name: mean(name, items) for name, items in batch.items()}
        sum(tasks[name].weight * part for name, part in parts.items()).backward()
        losses.append({name: part.item() for name, part in parts.items()})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, mean("rows", loader.held_out()["rows"]).item()


def as_row(ids):
    return {"input_ids": ids[None], "labels": torch.cat([ids[1:], ids.new_tensor([-100])])[None]}


def test_tasks_train_as_on_one_device_and_go_on(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    config = parse(TASKS.replace("FOLDER", str(tmp_path)))
    want, held_out = one_device(config)
    ranks = run_forked(2, lambda rank: train(config, rank))
    assert [page is not None for *_, page in ranks] == [True, False]
    check_report(ranks[0][-1])
    for records, validated, resumed, _ in ranks:
        for record, losses in zip(records, want, strict=True):
            assert dict(record.tasks) == pytest.approx(losses, rel=1e-10)
            assert record.loss == pytest.approx(2 * losses["rows"] + losses["said"], rel=1e-10)
            assert record.sequences == 5
        assert validated == pytest.approx(2 * held_out, rel=1e-10)
        assert validated.metrics == pytest.approx({"rows": held_out}, rel=1e-10)
        assert (resumed.loss, dict(resumed.tasks)) == (records[2].loss, dict(records[2].tasks))


def check_report(path):
    """Each task's strategy has its tabs; the one of `rows` runs on rank 1 alone."""
    data = page_data(path)
    assert set(data["sections"]) == {"run", "graph", "timeline", "memory"}
    assert data["strategies"] == ["rows: dp1", "said: dp2"]
    assert set(data["sections"]["run"]["tasks"]) == {"rows", "said"}
    (step,) = data["sections"]["timeline"]["steps"]
    assert [group["strategy"] for group in step["groups"]] == data["strategies"]
    predicted, measured = step["timelines"]
    for timeline in (predicted, measured):
        ran = {
            lane: {span[2] for span in timeline["spans"] if span[1] == "micro_batch" and span[0] == lane}
            for lane in (0, 1)
        }
        assert [lane["replicas"] for lane in timeline["lanes"]] == [[-1, 0], [0, 1]]
        assert ran == {0: {1}, 1: {0, 1}}
    assert data["sections"]["memory"]["by_strategy"]["rows: dp1"]["ranks"][0]["ranks"] == [1, 1]
