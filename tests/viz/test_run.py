from __future__ import annotations

import json

import pytest

from fxpar.viz.run import run_section
from tests.viz.steps import COMPARISON, metrics


def test_every_step_is_there():
    section = run_section(metrics(5), comparison=COMPARISON, environment=["4 ranks"])
    assert section["steps"] == [1, 2, 3, 4, 5]
    assert section["curves"]["loss"] == [7.75, None, 7.25, 7.0, 6.75]
    assert section["curves"]["validation_loss"] == [None] * 4 + [7.5]
    assert section["totals"]["steps"] == 5
    assert section["totals"]["skipped"] == 1
    assert section["comparison"] == COMPARISON
    assert json.loads(json.dumps(section, allow_nan=False))["environment"] == ["4 ranks"]
    assert run_section([]) is None


def test_times_of_a_step_add_up():
    lines = metrics(4)
    section = run_section(lines)
    for i, line in enumerate(lines):
        total = sum(group["ms"][phase][i] for group in section["groups"] for phase in ("run", "switch", "reduce"))
        total += section["times"]["optimizer"][i] + section["times"]["other"][i]
        assert total == pytest.approx(1e3 * line["wall_s"])


def test_groups():
    short, long = run_section(metrics(5))["groups"]
    assert (short["limit"], short["strategy"], short["steps"], short["tokens"]) == (256, "dp4", 5, 3000)
    assert short["lengths"] == [(128, 20), (256, 10)]
    assert short["measured"] == {"run": 312.5, "switch": 62.5, "reduce": 125.0}
    assert short["predicted"] == {"run": 250.0, "switch": 31.25, "reduce": 62.5}
    assert long["steps"] == 3
    assert long["ms"]["run"] == [312.5, 0.0, 312.5, 0.0, 312.5]
    assert long["points"] == [[250.0, 312.5]] * 2  # without the first step


def test_lines_of_an_earlier_version_have_no_predictions():
    lines = metrics(2)
    for line in lines:
        for group in line["groups"]:
            for name in ("predicted_s", "predicted_switch_s", "predicted_reduce_s", "lengths"):
                group.pop(name, None)
    group = run_section(lines)["groups"][0]
    assert group["points"] == []
    assert group["predicted"] == {"run": None, "switch": None, "reduce": None}


def test_long_runs_are_shown_as_means(monkeypatch):
    monkeypatch.setattr("fxpar.viz.run.MOST_POINTS", 3)
    section = run_section(metrics(8))
    assert section["steps"] == [3, 6, 8]
    assert section["steps_per_point"] == 3
    assert section["curves"]["loss"][0] == pytest.approx((7.75 + 7.25) / 2)
    assert section["totals"]["steps"] == 8


def test_losses_of_tasks():
    lines = metrics(3)
    assert run_section(lines)["tasks"] == {}
    for line in lines:
        line["tasks"] = {"text": 2.0 + line["step"]}
    lines[1]["tasks"] = {"text": 4.0, "pairs": 0.5}  # it has joined
    assert run_section(lines)["tasks"] == {"text": [3.0, 4.0, 5.0], "pairs": [None, 0.5, None]}
