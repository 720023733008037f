"""Folders of a run: locked by rank 0, refused on every rank where another run has them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxpar.checkpoint.lock import LOCK, release, take
from fxpar.errors import (
    MeasuredElsewhereError,
    ResumeError,
    RunFolderError,
    RunInUseError,
    TeamsGatherError,
    WeightsMismatchError,
)
from fxpar.profiling.record import device_name
from fxpar.runtime.forked import run_forked
from fxpar.train import preflight
from fxpar.train.config import parse_config
from fxpar.train.preflight import check_free, check_parts, check_resumed, lock_folders, unlock_folders
from fxpar.train.rank import _claim
from tests.cli.helpers import fxpar
from tests.models.folder import write_folder

CONFIG = """
[model]
name = "llama"
[data]
source = "corpus"
batch_sequences = 8
[strategies]
32 = "dp2"
[run]
steps = 2
folder = "{folder}"
[checkpoint]
folder = "{checkpoints}"
"""


@pytest.fixture
def config(tmp_path):
    text = CONFIG.format(folder=tmp_path / "run", checkpoints=tmp_path / "kept")
    return parse_config(text, "test.toml", "test", [])


def test_figures_of_another_machine_are_refused(config, tmp_path):
    """What `fxpar profile` wrote there; without the table that says where, figures are taken as they are."""
    path, figures = tmp_path / "cluster.json", {"nodes": 1, "devices_per_node": 2, "intra_gb_per_s": 4}
    figures |= {"inter_gb_per_s": 1, "latency_us": 9}
    here = {"device": device_name(torch.device("cpu")), "torch": torch.__version__}
    config = replace(config, engine=replace(config.engine, cluster=str(path)))
    for measured in ({"measured": here}, {"measured": {}}, {}):
        path.write_text(json.dumps(figures | measured))
        preflight.preflight(config)
    for key, other in (("device", "a device"), ("torch", "2.0")):
        path.write_text(json.dumps(figures | {"measured": here | {key: other}}))
        with pytest.raises(MeasuredElsewhereError, match=rf"measured on .*{other}.* or delete the table `measured`"):
            preflight.preflight(config)


@pytest.mark.parametrize("busy", ["run", "kept"])
def test_every_rank_is_told_who_has_the_folder(busy, config, tmp_path):
    folder = tmp_path / busy
    folder.mkdir()
    assert take(folder, "fxpar train of 'other'") is None

    def work(rank):
        try:
            _claim(config, rank)
        except RunInUseError as error:
            return str(error)
        return ""

    try:
        one, other = run_forked(2, work, 60)
    finally:
        release(folder)
    assert one == other
    assert one.startswith(f"{folder} is in use by process {os.getpid()} on ")
    assert "fxpar train of 'other'" in one
    assert list(tmp_path.glob(f"*/{LOCK}")) == []  # nothing is kept by who was refused
    assert run_forked(2, work, 60) == ["", ""]


def test_what_was_locked_is_given_back(config, tmp_path):
    lock_folders(config)
    lock_folders(config)
    assert sorted(path.parent.name for path in tmp_path.glob(f"*/{LOCK}")) == ["kept", "run"]
    check_free(config)  # its own
    unlock_folders(config)
    assert list(tmp_path.glob(f"*/{LOCK}")) == []


def test_a_folder_that_cannot_be_written(config, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunFolderError, match="cannot be written"):
        lock_folders(config)


def test_the_command_line_refuses_before_ranks_are_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    file = tmp_path / "c.toml"
    file.write_text(CONFIG.format(folder=tmp_path / "run", checkpoints=tmp_path / "kept"))
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(there, str(take(tmp_path / "run", "fxpar train of 'first'")).encode())
        time.sleep(60)
        os._exit(0)
    os.read(here, 10)
    try:
        status, _, err = fxpar("train", file)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert status == 1
    assert f"in use by process {pid} on" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


TASK = """
[model]
name = "towers.py:make"
[task.pairs]
loss = "pairs"
data = "drawn"
items = 2
strategies = { 8 = "dp2" }
[run]
steps = 9
"""


def test_a_run_whose_tasks_have_all_strategies_goes_on(monkeypatch):
    """As `fxpar tasks plan` writes it, without [strategies]; their lengths are of no corpus."""
    config = parse_config(TASK, "test.toml", "test", ["checkpoint.resume=true"])
    monkeypatch.setattr(preflight, "read_extra", lambda _: {"step": 4, "loader": {"tasks": {"pairs": 8}}})
    check_resumed(config, Path("step-4"))
    monkeypatch.setattr(preflight, "read_extra", lambda _: {"step": 9, "loader": {"tasks": {"pairs": 18}}})
    with pytest.raises(ResumeError, match="nothing is left"):
        check_resumed(config, Path("step-9"))
    of_text, of_tasks = {"step": 4, "loader": {"fingerprint": {}}}, {"step": 4, "loader": {"tasks": {"pairs": 8}}}
    monkeypatch.setattr(preflight, "read_extra", lambda _: of_text)
    with pytest.raises(ResumeError, match="written by a run without tasks"):
        check_resumed(config, Path("step-4"))
    monkeypatch.setattr(preflight, "read_extra", lambda _: of_tasks)
    with pytest.raises(ResumeError, match="written by a run of tasks"):
        check_resumed(replace(config, tasks={}, strategies=((8, "dp2"),)), Path("step-4"))


def test_weights_that_do_not_fit_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "load_tokenizer", lambda *_, **__: SimpleNamespace(vocab_size=40))
    folder = write_folder(tmp_path / "base")
    text = CONFIG.format(folder="run", checkpoints="kept").replace("llama", f"hf:{folder}")
    config = parse_config(text.replace('"corpus"', '"python-stdlib"'), "test.toml", "test", [])
    check_parts(config)
    write_folder(folder, num_hidden_layers=2)
    with pytest.raises(WeightsMismatchError, match=r"9 not in the folder: model.layers.1.self_attn"):
        check_parts(config)


def test_teams_that_cannot_gather_together_before_ranks_start(config):
    with pytest.raises(TeamsGatherError, match=r"'cp4\+zero3' has replicas of 4 ranks"):
        check_parts(replace(config, strategies=((32, "cp4+zero3 | tp3+zero3"),)))
    with pytest.raises(TeamsGatherError, match=r"'dp2\.cp2\+zero3' has other remat than 'cp4\+"):
        check_parts(replace(config, strategies=((32, "rounds(cp8, cp4+zero3+remat, cp2+zero3)"),)))
