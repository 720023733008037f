"""[task.NAME] sections: what they become, and all that is wrong with them at once."""

from __future__ import annotations

import json

import pytest

from fxpar.train.config import config_from_json
from fxpar.train.tasks import chooses, texts_of
from tests.train.test_config import message, parse

TASKS = """
[model]
name = "shapes.py:towers"
[task.pairs]
loss = "contrast"
data = "other.py:pairs"
items = 2
ranks = [0, 1]
strategies = { 8 = "cp2", 4 = "dp2" }
dynamic = { pixels = { 0 = "B" } }
[task.text]
loss = "said"
data = "words"
items = 4
weight = 0.5
[strategies]
64 = "dp3"
"""


def test_values_and_defaults():
    config = parse(TASKS)
    pairs, text = config.tasks.values()
    assert (pairs.by_length(config.strategies), pairs.dims) == (((4, "dp2"), (8, "cp2")), {"pixels": {0: "B"}})
    assert (text.by_length(config.strategies), text.weight, text.ranks, text.dims) == (((64, "dp3"),), 0.5, None, None)
    assert config.world == 3
    assert texts_of(config.tasks, config.strategies) == ["dp2", "cp2", "dp3"]
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    assert list(config_from_json(config.to_json()).tasks) == ["pairs", "text"]
    alone = TASKS[: TASKS.index("[task.text]")]
    assert parse(alone).world == 2
    assert parse(alone, "run.ranks=5").world == 5


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["task.pairs.los=3", "task.text.items=0", "data.source=x", "engine.order=['dp3']", "plan.drift=0.5"],
            [
                "task.pairs.los is not a known key; did you mean 'loss'?",
                "task.text.items = 0 must be 1 or more",
                "[data] is for one loss: each [task.NAME] has data of its own",
                "engine.order is for one loss, and there are tasks: leave it out",
                "plan.drift is for one loss, and there are tasks: leave it out",
            ],
        ),
        (["engine.gradients=chain"], ["engine.gradients is for one loss"]),
        (["plan.residual=0.5"], ["plan.residual is for one loss"]),
        (["strategies=auto"], ['"auto" and static are for one loss: give tasks strategies by length or rows']),
        (["task.text.strategies.static=dp3"], ["task.text.strategies.static is for one loss"]),
        (["task.text.strategies.x=dp3"], ["task.text.strategies.x is not a length in tokens"]),
        (["task.pairs.ranks=[0, 2]"], ["task.pairs.ranks = [0, 2] must be consecutive ones of 0 to 2"]),
        (["task.pairs.ranks=[]"], ["task.pairs.ranks = [] must name ranks"]),
        (["task.pairs.ranks=['a']"], ["must be a list of integers"]),
        (["task.pairs.dynamic.pixels=['B']"], ["task.pairs.dynamic.pixels = ['B'] must name dims by number"]),
        (["task.pairs.loss=a.py:"], ['task.pairs.loss = "a.py:" must name a function']),
        (
            ["task.pairs.strategies={8='dp4'}"],
            ["task.pairs: each strategy must use all 2 ranks, but 'dp4' (up to 8 tokens or rows)"],
        ),
        (["task.a/b.loss=x"], ["[task.a/b] is not a name for a task"]),
        (["task.pairs=3"], ["task.pairs = 3 must be a section: [task.pairs]"]),
        (["precision.compute=x"], ["precision.compute: "]),
    ],
)
def test_what_is_refused(words, lines):
    found = message(*words, text=TASKS)
    assert [line for line in lines if line not in found] == [], found


def test_strategies_that_are_yet_to_be_chosen():
    chosen = TASKS.replace('strategies = { 8 = "cp2", 4 = "dp2" }', 'strategies = { 8 = "auto" }').replace(
        "ranks = [0, 1]", ""
    )
    auto = chosen.replace('64 = "dp3"', '64 = "auto"')
    config = parse(auto, "run.ranks=4")
    assert chooses(config.tasks, config.strategies)
    assert (config.world, config.strategies) == (4, ((64, "auto"),))
    assert not chooses((fixed := parse(TASKS)).tasks, fixed.strategies)
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    assert '"auto" needs run.ranks, or --ranks N' in message(text=auto)
    assert 'task.text: if one task is "auto", each must have it as its only strategy' in message(
        "run.ranks=4", text=chosen
    )
    both = auto.replace('8 = "auto"', '8 = "auto", 4 = "auto"')
    assert 'task.pairs: if one task is "auto", each must' in message("run.ranks=4", text=both)
    assert "task.pairs.ranks are chosen with its strategy" in message("run.ranks=4", "task.pairs.ranks=[0]", text=auto)
    assert "x is not a length in tokens" in message("run.ranks=4", "task.pairs.strategies.x=auto", text=auto)


def test_a_task_without_strategies():
    assert "task.text has no strategies" in message(text=TASKS[: TASKS.index("[strategies]")])
