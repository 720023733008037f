"""What a rank says and writes step by step."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import torch
from rich.console import Console

from fxpar.train.metrics import METRICS
from fxpar.train.rank import ThisRank, _run
from fxpar.train.stop import StopRequest
from tests.train.test_config import SMALL, parse
from tests.train.test_loop import training


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
