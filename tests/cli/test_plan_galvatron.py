"""Plans from Galvatron's profiles, and Galvatron's plans, on the command line: text, JSON, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fxpar.cli.plan_galvatron import GalvatronRequest, parse_memory, run_import_galvatron, run_plan_galvatron
from fxpar.errors import GalvatronKeyError, NothingFitsError, OutputError, PlanOptionError
from fxpar.search.plan_file import read_plan
from tests.cli.helpers import fxpar
from tests.cli.training import CONFIG, finish, start, write_corpus
from tests.search.profiles import SHIPPED

CASE = {"profiles": str(SHIPPED), "devices": 8, "batch": 64, "seq_len": 2048, "memory": "38GB"}
PLAN = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,2,2,1",
    "dp_types_enc": "1,1,0,0",
    "checkpoint": "1,1,0,0",
    "global_bsz": 8,
    "chunks": 4,
    "world_size": 4,
}


def test_the_plan_as_a_table(capsys):
    run_plan_galvatron(GalvatronRequest(**CASE))
    out = capsys.readouterr().out
    assert "llama2-7b on 8 devices, batch 64 of 2048 tokens, 38 GB per device (GB of 2^30 bytes)" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0-22", "dp8+zero3+remat", "37.7", "GB"] in rows
    assert ["0", "23-31", "dp8+zero2+remat"] in rows
    assert ["ends", "dp2.cp4+zero3"] in rows
    assert "predicted: 4.1808 s per step in 1 micro-batch; no plan takes less than 4.1808 s (gap 0.00%)" in out
    assert "best with one strategy: dp8+zero3+remat, 4.2006 s" in out
    assert "note" not in out


def test_the_plan_as_json(tmp_path, capsys):
    run_plan_galvatron(GalvatronRequest(**{**CASE, "devices": 16}, micro_batches=8, json=str(tmp_path / "plan.json")))
    data = json.loads((tmp_path / "plan.json").read_text())
    (plan,) = data["plans"]
    assert plan["predicted_s"] == pytest.approx(2.1572136, abs=1e-6)
    assert plan["lower_bound_s"] == pytest.approx(plan["predicted_s"], rel=1e-9)
    assert plan["division"] == [16, 16]
    assert plan["layers"] == ["dp8.pp2+zero2+remat"] * 5 + ["dp8.pp2+zero2"] * 27
    (group,) = plan["groups"]
    assert group["strategy"] == "5 x dp8.pp2+zero2+remat, 11 x dp8.pp2+zero2 > 16 x dp8.pp2+zero2"
    assert (group["limit"], group["seconds"]) == (2048, plan["predicted_s"])
    assert plan["memory_bytes"] == {group["strategy"]: max(plan["stage_memory_bytes"])}
    assert data["speedup"] == pytest.approx(data["best_static"]["predicted_s"] / plan["predicted_s"])
    assert data["search_cpu_s"] < 2
    assert data["evaluated"] > data["pruned"] > 0
    assert data["memory_bytes"] == 38 * 2**30
    assert "no sp_time_2nodes_8gpus_per_node.json" in capsys.readouterr().out


def test_one_strategy_for_all(capsys):
    run_plan_galvatron(GalvatronRequest(**CASE, uniform=True, json="-"))
    data = json.loads(capsys.readouterr().out)
    assert data["plans"][0]["predicted_s"] == data["best_static"]["predicted_s"] == pytest.approx(4.2006292, abs=1e-6)
    assert data["best_static"]["strategy"] == "dp8+zero3+remat"
    assert data["plans"][0]["groups"][0]["strategy"] == "32 x dp8+zero3+remat"
    assert data["speedup"] == 1


def test_a_plan_of_galvatrons(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    run_import_galvatron(str(tmp_path / "plan.json"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][1:] == ["4", "devices,", "batch", "8", "in", "4", "micro-batches,", "1f1b"]
    assert ["0", "0-1", "pp2.tp2+sp+remat"] in rows
    assert ["1", "2", "pp2.tp2+sp"] in rows
    assert ["1", "3", "dp2.pp2+zero2"] in rows
    run_import_galvatron(str(tmp_path / "plan.json"), json="-")
    data = json.loads(capsys.readouterr().out)
    assert data["layers"] == ["pp2.tp2+sp+remat"] * 2 + ["pp2.tp2+sp", "dp2.pp2+zero2"]
    assert data["runs"][0] == {"stage": 0, "layers": [0, 1], "strategy": "pp2.tp2+sp+remat"}
    assert (data["ends"], data["devices"], data["division"]) == ("dp2.pp2+zero2", 4, [2, 2])


def test_a_plan_that_does_not_say_for_how_many(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps({key: value for key, value in PLAN.items() if key != "world_size"}))
    with pytest.raises(GalvatronKeyError, match="--devices"):
        run_import_galvatron(str(tmp_path / "plan.json"))
    run_import_galvatron(str(tmp_path / "plan.json"), devices=4)
    assert "dp2.pp2+zero2" in capsys.readouterr().out


SMALL = {"pp_deg": 1, "tp_sizes_enc": "2,1", "dp_types_enc": "0,1", "checkpoint": "1,0", "global_bsz": 8, "chunks": 8}
OPTIONS = ("layers=2", "dim=32", "heads=4", "kv_heads=2", "ffn=48", "vocab=300")


def imported(folder, *words, model="llama"):
    (folder / "galvatron.json").write_text(json.dumps(SMALL | {"world_size": 2}))
    options = [word for option in OPTIONS for word in ("--set", option)] if model == "llama" else []
    return fxpar("plan", model, *options, "--import", folder / "galvatron.json", *words)


def test_an_imported_plan_is_one_of_fxpars(tmp_path):
    status, out, err = imported(tmp_path, "--seq-len", "64", "-o", tmp_path / "plan.toml")
    assert (status, err) == (0, "")
    assert f"the plan is in {tmp_path / 'plan.toml'}" in out
    plan = read_plan(str(tmp_path / "plan.toml"))
    assert (plan.model, plan.options, plan.world, plan.tokens_per_step) == ("llama", OPTIONS, 2, 8 * 64)
    (group,) = plan.groups
    assert group.strategy == "rows2+zero2[layers.0: tp2+sp+zero0+remat; layers.1: +zero3]"
    assert (group.limit, group.token_budget) == (64, 2 * 64)


OF_A_USER = """
from fxpar.models.load import load


def make(layers: int = 2):
    found = load("llama", options={"layers": str(layers), "dim": "32", "ffn": "48"})
    return found.model, found.loss_fn, found.example_batch
"""


def test_an_imported_plan_is_for_a_model_of_a_user(tmp_path):
    (tmp_path / "mine.py").write_text(OF_A_USER)
    words = ("--seq-len", "64", "-o", tmp_path / "plan.toml")
    status, _, err = imported(tmp_path, *words, model=f"{tmp_path / 'mine.py'}:make")
    assert (status, err) == (0, "")
    assert read_plan(str(tmp_path / "plan.toml")).groups[0].strategy.endswith("layers.1: +zero3]")


def test_an_imported_plan_is_for_as_many_layers(tmp_path):
    status, _, err = imported(tmp_path, "--set", "layers=3", "--seq-len", "64", "-o", tmp_path / "plan.toml")
    assert status == 1
    assert "it has 3 layers, and " in err
    assert "is for 2. Give it as many with --set" in err


def test_what_an_imported_plan_is_for_is_said(tmp_path):
    status, _, err = imported(tmp_path, "-o", tmp_path / "plan.toml")
    assert status != 0
    assert "--seq-len" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world", "4"), "'world_size' = 2: asked for is a plan on 4 devices"),
        (("--world", "2", "--devices", "4"), "--devices"),
    ],
)
def test_an_imported_plan_is_for_the_world_of_its_file(tmp_path, words, message):
    status, _, err = imported(tmp_path, *words, "--seq-len", "64", "-o", tmp_path / "plan.toml")
    assert status != 0
    assert message in err


@pytest.mark.nightly
def test_an_imported_plan_trains(tmp_path):
    """Two ranks, some steps."""
    assert imported(tmp_path, "--seq-len", "128", "-o", tmp_path / "plan.toml")[0] == 0
    write_corpus(tmp_path / "corpus")
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("layers = 1", "layers = 2"))
    status, out, err = finish(start(tmp_path, "tiny.toml", "--plan", "plan.toml", "--set", "run.steps=2"))
    assert status == 0, out + err
    assert "rows2+zero2[layers.0: tp2+sp+zero0+remat; layers.1: +zero3]" in out


@pytest.mark.parametrize(
    ("text", "size"),
    [("38GB", 38 * 2**30), ("38 GiB", 38 * 2**30), ("0.5g", 2**29), ("512MB", 2**29), (" 1GB ", 2**30)],
)
def test_memory(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "38", "-1GB", "0GB", "nan GB", "1e3GB", "38TB", "GB", "9999999GB", "\x1b[2J"])
def test_no_memory(text):
    with pytest.raises(PlanOptionError, match=r"--memory = .*such as 38GB") as caught:
        parse_memory(text)
    assert "\x1b" not in str(caught.value)


def test_what_cannot_be_written_is_told_first(tmp_path):
    with pytest.raises(OutputError):
        run_plan_galvatron(GalvatronRequest(**{**CASE, "profiles": "nowhere"}, json=str(tmp_path / "no" / "plan.json")))


def test_nothing_fits():
    with pytest.raises(NothingFitsError, match=r"4\.00 GB per device"):
        run_plan_galvatron(GalvatronRequest(**{**CASE, "memory": "4GB"}))


def test_torch_is_not_waited_for():
    code = "import sys, fxpar.cli.plan_galvatron; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
