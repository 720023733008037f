"""`fxpar profile`: a file that other commands read, ranks of its own, nothing lost by mistake."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fxpar.cli import profile
from fxpar.cli.run_commands import ProfileRequest
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import LauncherSignalError
from fxpar.profiling import points
from tests.cli.helpers import fxpar

TINY = ("--seconds", "0.002")


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small matrices and arrays, in an empty folder."""
    monkeypatch.setattr(profile, "device_series", lambda device: SERIES(device, (16, 32), (1 << 12,)))
    monkeypatch.chdir(tmp_path)


SERIES = profile.device_series


def test_a_file_that_other_commands_read():
    status, out, _ = fxpar("profile", *TINY)
    assert status == 0
    lines = [line.split()[0] for line in out.splitlines()]
    assert lines == [
        "cluster.json:",
        "sustained",
        "products",
        "products",
        "memory",
        "launch",
        "links",
        "links",
        "latency",
    ]
    assert out.count("usual figure, not measured") == 3
    cluster = ClusterSpec.from_file("cluster.json")
    assert cluster.world == 1
    assert set(cluster.device.tflops) == {"float32", "bfloat16"}
    status, out, _ = fxpar("switch", "mlp", "--from", "dp1", "--to", "tp1", "--cluster", "cluster.json")
    assert status == 0


def test_a_terminal_sees_at_once_what_is_measured(monkeypatch):
    """On stderr: stdout may be the file."""
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("fxpar.cli.console.stderr_console", lambda: terminal)
    status, out, _ = fxpar("profile", *TINY, "-o", "-")
    assert status == 0
    assert json.loads(out)
    assert re.search(r"measuring (\d+) of \1 \(round 3 of 3\) launch of a kernel, \d+ s", shown.getvalue())


def test_stdout(tmp_path):
    status, out, _ = fxpar("profile", *TINY, "-o", "-")
    assert status == 0
    assert ClusterSpec.from_dict(json.loads(out)).world == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_when_told(tmp_path):
    (tmp_path / "cluster.json").write_text("mine")
    status, _, err = fxpar("profile", *TINY)
    assert (status, (tmp_path / "cluster.json").read_text()) == (1, "mine")
    assert "'cluster.json'" in err
    assert "--force" in err
    assert fxpar("profile", *TINY, "--force")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    assert ClusterSpec.from_file("cluster.json").world == 1


def test_what_was_interrupted_goes_on(monkeypatch, tmp_path):
    """Nothing is measured twice, unless it was measured otherwise; a line that was torn is measured again."""
    runs: list[str] = []
    taken_s = points._taken_s

    def counted(trial, *rest):
        runs.append(trial.words())
        if len(runs) == 9:
            raise KeyboardInterrupt
        return taken_s(trial, *rest)

    monkeypatch.setattr(points, "_taken_s", counted)
    assert fxpar("profile", *TINY)[::2] == (130, "The same command goes on from cluster.json.part\ninterrupted\n")
    part = tmp_path / "cluster.json.part"
    assert len(part.read_text().splitlines()) == 1 + 8
    part.write_text(part.read_text()[:-5])
    status, out, _ = fxpar("profile", *TINY)
    assert status == 0
    assert "going on where it was interrupted: cluster.json.part has 7 measurements\n" in out
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    assert runs[9] == runs[7] not in runs[:7]
    settings = profile._settings(ProfileRequest(), torch.device("cpu"), 4, 1)
    assert settings != profile._settings(ProfileRequest(), torch.device("cpu"), 4, 2)  # other links are "inside a node"
    part.write_text('{"seconds": 1}\n["x", 1.0]\n')
    first, runs[:] = runs[0], [""] * 9
    status, out, _ = fxpar("profile", *TINY, "--force")
    assert (status, "going on" in out, runs[9]) == (0, False, first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "c.toml"], "'c.toml' would be read as TOML. Call it FILE.json"),
        (["-o", "none/c.json"], "there is no folder 'none'"),
        (["--device", "cuda"], "torch sees 0"),
    ],
)
def test_refusals(words, message, tmp_path):
    status, out, err = fxpar("profile", *TINY, *words)
    assert (status, out) == (1, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "cluster.json").write_text("mine")
    monkeypatch.setattr("fxpar.cli.request.os.access", lambda path, mode: Path(path).name == "cluster.json")
    status, _, err = fxpar("profile", *TINY, "--force")
    assert status == 1
    assert "nothing can be written in '.'" in err
    assert (tmp_path / "cluster.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "3 ranks are not a multiple of 2"), (["--ranks", "2"], "on the 3 ranks of a launcher, not on 2")],
)
def test_ranks_of_a_launcher(words, message, monkeypatch):
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(key, str(value))
    status, _, err = fxpar("profile", *TINY, *words)
    assert status == 1
    assert message in err


def test_what_ranks_measure_is_seen(tmp_path):
    """The last whole line that counts, of rank 0 alone."""
    for rank, text in enumerate(
        ["1 of 9 (round 1 of 3) copy\n2 of 9 (round 1 of 3) add\na warning\n3 of", "3 of 9 (round 1 of 3) x\n"]
    ):
        log = tmp_path / "ranks_x" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    said: list[str] = []
    heard = threading.Event()
    with profile.followed(tmp_path, lambda text: (said.append(text), heard.set()), every_s=0.001):
        assert heard.wait(10)
    assert set(said) == {"2 of 9 (round 1 of 3) add"}


def test_what_is_said_if_the_launcher_is_told_to_end(monkeypatch, tmp_path):
    def ended(*_, **__):
        raise LauncherSignalError("SIGTERM")

    monkeypatch.setattr(profile, "run_ranks", ended)
    said = "ended by SIGTERM; all ranks were ended too"
    assert fxpar("profile", "--ranks", "2")[2] == f"error: {said}\n"
    (tmp_path / "cluster.json.part").write_text("")
    assert said + ". The same command goes on from cluster.json.part" in fxpar("profile", "--ranks", "2")[2]
    assert fxpar("profile", "--ranks", "2", "-o", "-")[2].endswith(f"{said}\n")


@pytest.mark.nightly  # the page on clusters runs it too
def test_two_ranks_of_its_own(capfd, monkeypatch):
    """The real thing: the launcher starts them, they measure each other."""
    shown = io.StringIO()
    monkeypatch.setattr("fxpar.cli.console.stderr_console", lambda: Console(file=shown, force_terminal=True, width=90))
    status, out, err = fxpar("profile", "--seconds", "0.001", "--ranks", "2")
    assert status == 0, err + capfd.readouterr().err
    assert re.search(r"measuring with 2 ranks: \d+ of \d+ \(round \d of 3\) ", shown.getvalue())
    assert "links inside a node" in out
    content = json.loads(Path("cluster.json").read_text())
    assert (content["devices_per_node"], content["measured"]["assumed"]) == (2, ["inter_gb_per_s"])
    assert {point["kind"] for point in content["measured"]["points"]} >= {"send", "all_reduce", "all_gather"}
