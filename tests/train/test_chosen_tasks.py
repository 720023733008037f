"""Tasks whose strategies and ranks are chosen before they run."""

from __future__ import annotations

import json
import re

import pytest

from fxpar.cli.run_commands import TrainRequest
from fxpar.cli.train import run_train
from fxpar.train.chosen_tasks import choose_tasks
from fxpar.train.task_source import check_tasks
from fxpar.train.tasks import chooses
from tests.cli.helpers import fxpar
from tests.docs.ranks import run_ranks
from tests.train.test_config import parse
from tests.train.test_session import FILE, TASKS


@pytest.fixture
def text(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    auto = TASKS.replace("FOLDER", str(tmp_path)).replace("ranks = [1]\n", "")
    return (
        auto.replace('8 = "dp1"', '8 = "auto"')
        .replace('16 = "dp2"', '16 = "auto"')
        .replace("steps = 3", "steps = 3\nranks = 2")
    )


def test_a_run_has_what_is_chosen(text):
    config = parse(text)
    chosen, words = choose_tasks(config)
    assert not chooses(chosen.tasks, chosen.strategies)
    check_tasks(chosen)
    assert {name: [int(limit) for limit in one.strategies] for name, one in chosen.tasks.items()} == {
        "rows": [8],
        "said": [16],
    }
    assert words.startswith("chosen ")
    assert "s per step predicted, one after the other" in words
    assert chosen.world == 2
    assert chosen.engine.memory_budget_bytes is None


def test_ranks_of_torchrun_choose_and_train(text, tmp_path):
    """`torchrun --nproc-per-node 2 -m fxpar train run.toml`, which has counted the ranks."""
    (tmp_path / "run.toml").write_text(text.replace("ranks = 2\n", ""))
    words = ("run.report=false", "run.tensorboard=false", "checkpoint.enabled=false")
    printed = run_ranks(2, lambda rank: run_train(TrainRequest(str(tmp_path / "run.toml"), assignments=words)))
    assert printed[1] == ""
    assert re.search(r"^chosen .*rows \S+ on rank.*, one after the other", printed[0], re.MULTILINE)
    assert "task said: weight 1, 3 items per step; strategies <=16 " in printed[0]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(step["tasks"]) for step in steps] == [{"rows", "said"}] * 3


def test_what_cannot_be_chosen_is_told_before_ranks_start(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    status, _, err = fxpar("train", str(tmp_path / "run.toml"), "--set", "engine.memory_budget_bytes=10")
    assert status == 1
    assert "no strategies of the tasks fit on 2 devices of" in err
