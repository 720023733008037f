"""Tasks whose strategies and ranks are chosen before they run."""

from __future__ import annotations

import pytest

from fxpar.runtime.forked import run_forked
from fxpar.train.chosen_tasks import choose_on_rank_0, choose_tasks
from fxpar.train.task_source import check_tasks
from fxpar.train.tasks import chooses
from tests.cli.helpers import fxpar
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
    for found, said in run_forked(2, lambda rank: choose_on_rank_0(config)):
        assert (found, said) == (chosen, words)


def test_what_cannot_be_chosen_is_told_before_ranks_start(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    status, _, err = fxpar("train", str(tmp_path / "run.toml"), "--set", "engine.memory_budget_bytes=10")
    assert status == 1
    assert "no strategies of the tasks fit on 2 devices of" in err
