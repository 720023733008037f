"""Commands on strategies side by side: what prints each team, and what looks at one at a time and says so."""

from __future__ import annotations

import json

import pytest

from tests.cli.helpers import fxpar

TEAMS = "cp2 | pp2 | dp1"


def test_a_dump_has_each_team():
    status, out, err = fxpar("dump", "llama", "-s", TEAMS, "--brief")
    assert status == 0, err
    assert out.startswith("fxpar teams graph of llama\nstrategy cp2 | pp2 | dp1: teams of 2 + 2 + 1 ranks\n")
    heads = [line for line in out.splitlines() if line.startswith("team ")]
    assert heads == ["team 0 on ranks 0-1:", "team 1 on ranks 2-3:", "team 2 on rank 4:"]
    assert "fxpar pipeline graph of llama\nstrategy pp2: mesh pp2, 2 ranks" in out


def test_json_has_each_team():
    status, out, err = fxpar("dump", "llama", "-s", TEAMS, "--format", "json", "-o", "-")
    assert status == 0, err
    document = json.loads(out)
    assert [(team["strategy"], team["ranks"]) for team in document["teams"]] == [
        ("cp2", [0, 1]),
        ("pp2", [2, 3]),
        ("dp1", [4, 4]),
    ]
    assert document["nodes"] == sum(team["nodes"] for team in document["teams"])
    assert document["world"] == 5


@pytest.mark.parametrize(
    "words",
    [
        ("dump", "llama", "-s", TEAMS, "--stage", "annotated"),
        ("dump", "llama", "-s", TEAMS, "--rank", "1"),
        ("dump", "llama", "-s", TEAMS, "--format", "dot"),
    ],
)
def test_one_team_at_a_time(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = fxpar(*words)
    assert status == 1
    said = "looks at one strategy at a time, and 'cp2 | pp2 | dp1' is 3 side by side. Name one of them, such as 'cp2': "
    assert said in err
    assert not list(tmp_path.iterdir())


def test_each_team_is_explained_and_teams_alike_once():
    status, out, err = fxpar("explain", "mlp", "-s", "dp2 | tp2 | tp2 | dp1", "head.weight")
    assert status == 0, err
    heads = [line for line in out.splitlines() if line.startswith("mlp under")]
    assert heads == [
        "mlp under dp2, mesh dp2, on ranks 0-1",
        "mlp under tp2, mesh tp2, on ranks 2-3 and 4-5",
        "mlp under dp1, mesh dp1, on rank 6",
    ]
    document = json.loads(fxpar("explain", "mlp", "-s", "dp2+zero3 | tp2 | tp2", "head.weight", "--json", "-")[1])
    assert document["strategy"] == "dp2+zero3 | tp2 | tp2"
    assert [(team["strategy"], team["teams"]) for team in document["teams"]] == [
        ("dp2+zero3", ["0-1"]),
        ("tp2", ["2-3", "4-5"]),
    ]


def test_two_teams_are_compared_and_all_are_drawn(tmp_path):
    status, out, err = fxpar("diff", "mlp", "-s", "cp2 | tp2 | tp2", "--brief")
    assert status == 0, err
    assert out.startswith("model mlp\n--- cp2\n+++ tp2\n")
    status, _, err = fxpar("diff", "mlp", "-s", TEAMS)
    assert (status, "3 strategies are given" in err) == (1, True)
    page = tmp_path / "page.json"
    status, _, err = fxpar("viz", "mlp", "-s", "dp2 | tp2,tp2", "--format", "json", "-o", str(page))
    assert status == 0, err
    assert json.loads(page.read_text())["strategies"] == ["dp2", "tp2"]


def test_check_takes_all_formations():
    status, out, err = fxpar("check", "mlp", "-s", "rounds(cp2),dp1", "--json", "-")
    assert status == 0, err
    assert [one["strategy"] for one in json.loads(out)["results"]] == ["cp2", "dp2", "dp1"]


def test_memory_takes_all_formations():
    """With as many tokens per rank."""
    status, out, err = fxpar(
        "memory", "llama", "--set", "layers=1", "-s", "rounds(cp4, 2)", "--tokens", "64", "--json", "-"
    )
    assert status == 0, err
    found = [(one["strategy"], one["sizes"]["T"]) for one in json.loads(out)["strategies"]]
    assert found == [("cp4", 64), ("dp2.cp2", 32)]


@pytest.mark.parametrize("command", ["dump", "explain", "diff", "order"])
def test_one_formation_at_a_time(command):
    status, _, err = fxpar(command, "mlp", "-s", "rounds(cp4)")
    assert status == 1
    assert "'rounds(cp4)' stands for 4 strategies: cp4, dp2.cp2, cp2 | dp2, dp4. `fxpar check` and" in err


def test_teams_in_step_are_looked_at_as_they_are_lowered():
    teams = "cp2+zero3 | dp2+zero3"
    status, _, err = fxpar("dump", "mlp", "-s", teams, "--rank", "1")
    assert status == 1
    assert "Name one of them, such as 'dp2.cp2+zero3': " in err
    out = fxpar("explain", "mlp", "-s", teams)[1]
    heads = [line for line in out.splitlines() if line.startswith("mlp under")]
    assert heads == [
        "mlp under dp2.cp2+zero3, mesh dp2 x cp2, on ranks 0-1",
        "mlp under dp4+zero3, mesh dp4, on ranks 2-3",
    ]


@pytest.mark.parametrize(
    ("old", "new"), [("dp1 | cp2 | dp1", "cp2 | dp2"), ("cp2+zero3 | dp2+zero3", "dp4+zero3")], ids=["apart", "in step"]
)
def test_switch_between_formations_moves_nothing(old, new):
    status, out, err = fxpar("switch", "llama", "--from", old, "--to", new, "--json", "-")
    assert status == 0, err
    found = json.loads(out)
    assert [value for name, value in found.items() if name.endswith("node_bytes")] == [0, 0]
