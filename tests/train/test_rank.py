"""What a rank says and writes step by step."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fxpar.errors import PlanFileError, StartedRanksError
from fxpar.runtime.planned import parameters_of
from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.train.metrics import METRICS
from fxpar.train.model import shapes_for
from fxpar.train.rank import Job, ThisRank, _run, run_rank
from fxpar.train.session import TrainSession
from fxpar.train.stop import StopRequest
from tests.train.test_config import SMALL, parse
from tests.train.test_loop import training
from tests.train.test_tasks import TASKS


def test_groups_that_joined_another_and_riders_are_told_once_and_written_in_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr("fxpar.train.rank.agree", lambda asked, cpu_s, wall_s, device: (asked, cpu_s, wall_s))
    merged = {1: ((8, 64), (16, 64)), 2: ((8, 64),), 4: ((8, 32),)}
    rides = {2: ((16, 32, 5),), 3: ((16, 32, 7),)}
    words = (f'run.folder="{tmp_path}"', "run.steps=4", "run.tensorboard=false", "checkpoint.enabled=false")
    one = training(4, merged=merged, rides=rides)
    one.after_step = lambda report: "planned anew: why" * (one.model.steps == 3)
    session = SimpleNamespace(config=parse(SMALL, *words), step=0, training=one, validate=lambda step: None)
    out = Console(file=io.StringIO(), soft_wrap=True)
    monitor = SimpleNamespace(phase=lambda name: None)
    place = ThisRank(0, 1, 0, torch.device("cpu"), out, monitor, StopRequest())
    assert not _run(session, place, [], [])
    lines = out.file.getvalue().splitlines()
    why = "too small to be worth a switch of its own"
    assert [line for line in lines if "/4  loss" not in line] == [
        f"<=8 joined <=64: {why} (first in step 1)",
        f"<=16 joined <=64: {why} (first in step 1)",
        "sequences of <=16 ride in <=32 where the mini-batch is predicted to be faster so (first in step 2)",
        "step 3: planned anew: why",
        f"<=8 joined <=32: {why} (first in step 4)",
    ]
    written = [json.loads(line)["merged"] for line in (tmp_path / METRICS).read_text().splitlines()]
    assert written == [[[8, 64], [16, 64]], [[8, 64]], [], [[8, 32]]]
    written = [json.loads(line)["rides"] for line in (tmp_path / METRICS).read_text().splitlines()]
    assert written == [[], [[16, 32, 5]], [[16, 32, 7]], []]
    written = [json.loads(line)["replanned"] for line in (tmp_path / METRICS).read_text().splitlines()]
    assert written == ["", "", "planned anew: why", ""]


def test_there_is_something_to_save_behind_the_first_step(tmp_path, monkeypatch):
    """Ctrl-C ends a run at once before that: the first step may take seconds."""
    seen = []

    def agreed(asked, cpu_s, wall_s, device):
        seen.append((tmp_path / "stepping").exists())
        return asked, cpu_s, wall_s

    monkeypatch.setattr("fxpar.train.rank.agree", agreed)
    words = (f'run.folder="{tmp_path}"', "run.steps=2", "run.tensorboard=false", "checkpoint.enabled=false")
    session = SimpleNamespace(config=parse(SMALL, *words), step=0, training=training(2), validate=lambda step: None)
    stop = StopRequest(tmp_path / "stop", tmp_path / "stepping")
    monitor = SimpleNamespace(phase=lambda name: None)
    place = ThisRank(0, 1, 0, torch.device("cpu"), Console(file=io.StringIO()), monitor, stop)
    assert not _run(session, place, [], [])
    assert not seen[0]
    assert (tmp_path / "stepping").exists()


def test_a_plan_is_for_a_model_with_as_many_parameters():
    config = parse(SMALL)
    count = parameters_of(shapes_for(config, 320, {}).model)
    groups = tuple(PlanGroup(limit, strategy, limit) for limit, strategy in config.strategies)
    plan = Plan(config.model.name, config.world, 4096, groups, parameters=count)
    job = Job(config, None, ("plan.toml", plan.to_toml()))
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    job.check_plan(320)
    Job(config).check_plan(640)
    with pytest.raises(PlanFileError, match=f"'plan.toml': it is for .* with {count:,} parameters, and this model has"):
        job.check_plan(640)


def test_trained_parameters_are_told_where_some_are_frozen():
    assert TrainSession.size(SimpleNamespace(parameters=1204, trained=1204)) == "1,204 parameters"
    assert (
        TrainSession.size(SimpleNamespace(parameters=1204, trained=32)) == "1,204 parameters, of which 32 are trained"
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (parse(TASKS), r"3 ranks \('dp2', 'cp2', 'dp3', task.pairs.ranks = \[0, 1\]\), but 5"),
        (parse(TASKS, "run.ranks=4", "strategies.64=dp4"), r"4 ranks \(run.ranks = 4\), but 5"),
    ],
)
def test_another_number_of_ranks_than_a_launcher_started(monkeypatch, config, why):
    for key in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(key, "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(StartedRanksError, match=why):
        run_rank(Job(config), StopRequest())
