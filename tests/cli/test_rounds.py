"""`fxpar rounds`: the table, the JSON, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import typer

from fxpar.cli.options import GraphSource
from fxpar.cli.rounds import _total, run_rounds
from fxpar.cli.rounds_commands import RoundsRequest
from fxpar.cli.shallow import Shallow
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import group_cost
from fxpar.errors import (
    BatchRangeError,
    DegreeError,
    LengthsError,
    OutputError,
    RoundCostError,
    SequenceFitsNoTeamError,
    UnknownRoundCostError,
)
from fxpar.ir.strategy import Strategy
from fxpar.memory import predict_memory
from fxpar.rounds import PUBLISHED
from fxpar.search.chosen import of_ranks
from tests.rounds.plain import team_ms


@pytest.fixture
def lengths(tmp_path):
    """A file of 100 lengths; the second batch of 40 has one that is too long."""
    found = np.random.default_rng(0).integers(50, 3000, 100)
    found[5], found[41] = 30_000, 50_000
    np.savez(tmp_path / "lengths.npz", lengths=found)
    return found, str(tmp_path / "lengths.npz")


def words(path: str, **changed: object) -> RoundsRequest:
    return RoundsRequest(
        **({"source": GraphSource(""), "devices": 16, "lengths": path, "max_length": 40_000, "batch": 40} | changed)
    )


def test_the_plan_as_json(lengths, tmp_path, capsys):
    given, path = lengths
    run_rounds(words(path, batches="0:3", min_degree=2, json=str(tmp_path / "plan.json")))
    data = json.loads((tmp_path / "plan.json").read_text())
    costs = PUBLISHED["flexsp-7b"].teams((2, 4, 8, 16), 16, 40_000)
    assert [one["batch"] for one in data["batches"]] == [0, 1, 2]
    assert [one["sequences"] for one in data["batches"]] == [40, 39, 20]
    for number, one in enumerate(data["batches"]):
        mine = given[40 * number : 40 * number + 40]
        padded = sorted(-(-int(length) // 32) * 32 for length in mine if length <= 40_000)
        assert (
            sorted(length for each in one["micro_batches"] for g in each["groups"] for length in g["lengths"]) == padded
        )
        total = 0.0
        for each in one["micro_batches"]:
            for group in each["groups"]:
                first, last = group["ranks"]
                cost = costs[last - first + 1]
                assert group["predicted_ms"] == pytest.approx(team_ms(cost, group["lengths"]), rel=1e-10)
                assert sum(group["lengths"]) <= cost.tokens
                assert [-(-int(given[at]) // 32) * 32 for at in group["sequences"]] == group["lengths"]
            total += max(group["predicted_ms"] for group in each["groups"])
        assert one["predicted_ms"] == pytest.approx(total, rel=1e-10)
        assert one["any_cut_lower_bound_ms"] <= one["lower_bound_ms"] <= one["predicted_ms"]
        assert one["predicted_ms"] <= one["best_homogeneous_ms"] <= one["static_ms"]
        assert one["plan_cpu_s"] > 0
    assert data["total_s"] == pytest.approx(sum(one["predicted_ms"] for one in data["batches"]) / 1000)
    assert data["degrees"] == [2, 4, 8, 16]
    out = capsys.readouterr().out
    assert "flexsp-7b on 16 devices: up to 5,342 tokens" in out
    assert f"total: {data['total_s']:.2f} s" in out
    assert "left out: 1 longer than 40,000 tokens" in out


def test_a_model_on_a_cluster(tmp_path):
    """Each team takes and holds what its strategy on all devices is predicted to."""
    (tmp_path / "lengths.txt").write_text("700\n90\n80\n")
    asked = {"source": GraphSource("llama", options=("layers=1",)), "devices": 2, "cluster": "h100", "max_length": None}
    asked |= {"lengths": str(tmp_path / "lengths.txt"), "memory": "3MB", "json": str(tmp_path / "plan.json")}
    run_rounds(words(**{"path": asked.pop("lengths"), **asked}))
    data = json.loads((tmp_path / "plan.json").read_text())
    cluster, model = of_ranks(ClusterSpec.from_file("h100"), 2), Shallow(asked["source"])
    groups = [group for each in data["batches"][0]["micro_batches"] for group in each["groups"]]
    assert {group["ranks"][1] - group["ranks"][0] + 1 for group in groups} == {1, 2}
    for group in groups:
        team = "dp2+zero3" if group["ranks"][0] == group["ranks"][1] else "cp2+zero3"
        program = model.lower(Strategy.parse(team), 1)
        assert group["predicted_ms"] == pytest.approx(1e3 * group_cost(program, cluster).seconds(group["lengths"]))
        assert predict_memory(program, {"T": sum(group["lengths"])}, cluster=cluster).peak_bytes <= 3e6
    long = predict_memory(model.lower(Strategy.parse("dp2+zero3"), 1), {"T": 700}, cluster=cluster)
    assert long.peak_bytes > 3e6


def test_totals_that_are_short_are_no_0():
    assert [_total(16.428), _total(16.404), _total(0.00118)] == ["16.43 s", "16.40 s", "1.18 ms"]


def test_only_json_on_stdout(lengths, capsys):
    run_rounds(words(lengths[1], json="-"))
    assert json.loads(capsys.readouterr().out)["batches"][0]["static_degree"] == 16


def test_a_file_of_constants_and_degrees_of_its_own(lengths, tmp_path, capsys):
    data = {"square_ms": 1e-6, "token_ms": 0.1, "fixed_ms": 5, "token_mib": 1, "sent_mib": 1, "gi_parameters": 0.1}
    (tmp_path / "mine.json").write_text(json.dumps(data | {"mib_per_ms": {"4": 50, "8": 9}, "memory_gib": 20}))
    run_rounds(words(lengths[1], devices=12, degrees="12,1,3,6", cost=str(tmp_path / "mine.json"), memory="8GiB"))
    out = capsys.readouterr().out
    assert "up to 8,055 tokens per device, teams of 1, 3, 6, 12" in out  # (8 - 16 * 0.1 / 12) * 1024


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_length": None, "batches": "1:2", "memory": "14GiB"}, SequenceFitsNoTeamError, "needs about"),
        ({"batches": "0:4"}, BatchRangeError, "100 lengths make 3 batches of 40. Write at most 0:3"),
        ({"batches": "2:2"}, BatchRangeError, "the range is empty. Write FIRST:END"),
        ({"max_length": 10}, BatchRangeError, "no sequence of batch 0 has at most 10 tokens"),
        ({"min_degree": 32}, DegreeError, "degree 32: no team of so many ranks is left on 16 devices"),
        ({"degrees": "1,3"}, DegreeError, "degree 3: it does not divide the 64 heads.*; leave it out"),
        ({"degrees": "1,32"}, DegreeError, "degree 32: a team has from 1 to 16 ranks"),
        ({"cost": "flexsp-70b"}, UnknownRoundCostError, "did you mean 'flexsp-7b'"),
        ({"memory": "1GiB"}, RoundCostError, "nothing is left"),
        ({"cost": "h100"}, UnknownRoundCostError, "fxpar rounds MODEL --cluster h100"),
        ({"json": "no/such/folder.json"}, OutputError, "folder"),
    ],
)
def test_mistakes(lengths, changed, error, message):
    with pytest.raises(error, match=message):
        run_rounds(words(lengths[1], **changed))


def test_a_cluster_needs_a_model(lengths, tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": 1, "devices_per_node": 8}))
    with pytest.raises(RoundCostError, match="it describes a cluster, and there is no model"):
        run_rounds(words(lengths[1], cost=str(tmp_path / "cluster.json")))


@pytest.mark.parametrize("text", ["1\nnan\n", "1\n-5\n", ""])
def test_lengths_that_are_none(tmp_path, text):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(LengthsError):
        run_rounds(words(str(tmp_path / "lengths.txt")))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None}, "it is missing"),
        ({"batches": "3"}, "is not FIRST:END"),
        ({"degrees": "a"}, "is not a list such as"),
        ({"degrees": "0,1"}, "is not a list such as"),
        ({"memory": "lots"}, "is not a size"),
        (
            {"source": GraphSource("llama"), "cost": "flexsp-13b"},
            "it is of no MODEL; name the devices .* --cluster h100",
        ),
        ({"source": GraphSource("llama"), "cost": "flexsp-7b"}, "it is of no MODEL"),  # the default, but named
        ({"cluster": "h100"}, "a model is priced on it; name MODEL"),
        ({"strategy": "cp16"}, "it is of a model; name MODEL"),
        ({"source": GraphSource("", options=("dim=8",))}, "it is of a model; name MODEL"),
        ({"source": GraphSource("", precision="bf16")}, "it is of a model; name MODEL"),
        ({"source": GraphSource("llama"), "devices_per_node": 4}, "as its --cluster says"),
        ({"strategy": " "}, "it is empty; name a strategy"),
    ],
)
def test_words_that_cannot_be_read(changed, message):
    with pytest.raises(typer.BadParameter, match=message):
        words("x", **changed)


def test_no_torch_is_imported(lengths):
    code = (
        "import sys; from fxpar.cli.app import app; "
        f"app(['rounds', '--lengths', {lengths[1]!r}, '--devices', '8', '--max-length', '20000', '--batch', '20'], "
        "standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
