"""`fxpar train` on local ranks. Slow: ranks are processes that import torch, and so is the command where it counts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from fxpar.api import parallelize
from fxpar.runtime.forked import reserved_port
from tests.cli.helpers import fxpar
from tests.cli.training import BIGRAMS, BIGRAMS_PY, CONFIG, finish, start, write_corpus


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    return finish(start(folder, *words))


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a configuration, a corpus, and the results of a whole run with a comparison."""
    folder = tmp_path_factory.mktemp("train")
    write_corpus(folder / "corpus")
    (folder / "tiny.toml").write_text(CONFIG)
    status, out, err = run(folder, "tiny.toml", "--compare", "static")
    assert status == 0, out + err
    return folder, out


@pytest.fixture
def prepared(trained, tmp_path):
    """A folder of its own with the same corpus and cache, without results."""
    for name in ("corpus", "cache"):
        shutil.copytree(trained[0] / name, tmp_path / name)
    shutil.copy(trained[0] / "tiny.toml", tmp_path)
    (tmp_path / "bigrams.py").write_text(BIGRAMS_PY)
    return tmp_path


@pytest.fixture
def one_rank(prepared, monkeypatch):
    """`fxpar train` in this process, as the only rank of a torchrun."""
    monkeypatch.chdir(prepared)

    def train(*words: str) -> tuple[int, str, str]:
        assignments = ("strategies.static=dp1", "data.max_length=128", "run.tensorboard=false", *words)
        return fxpar(
            "train", "tiny.toml", *(word for a in assignments for word in (("--set", a) if "=" in a else (a,)))
        )

    with reserved_port() as port:
        torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**torchrun, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        yield train


@pytest.mark.slow
def test_what_a_run_prints(trained):
    _, out = trained
    assert "\x1b" not in out
    begun = ["starting 2 ranks", "preparing the data: corpus", "capturing llama and lowering it for dp2, tp2+sp"]
    assert [line for line in out.splitlines() if line in begun] == begun
    assert re.search(r"^60 documents give \d+ sequences, ", out, re.MULTILINE)
    assert "on 2 ranks (cpu)" in out
    assert re.search(r"^strategies <=.*; sequences packed in rows; set up in \d", out, re.MULTILINE)
    assert len(re.findall(r"^step \d/6  loss \d\.\d{4}  [\d,]+ tok/s  lr 1\.00e-02  norm ", out, re.MULTILINE)) == 12
    first, last = re.findall(r"^loss     (\S+) -> (\S+)$", out, re.MULTILINE)[0]
    assert float(last) < float(first) - 0.5
    assert re.search(r"^ *128 +tp2\+sp +\d+ ", out, re.MULTILINE)


@pytest.mark.slow
def test_what_a_run_writes(trained):
    folder = trained[0] / "out"
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert sum(g["sequences"] for g in line["groups"]) == line["sequences"] == 8
        assert sum(g["tokens"] for g in line["groups"]) == line["tokens"] == line["valid_tokens"] + 8
        assert line["cpu_s"] > 0
    both = [line for line in lines if len(line["groups"]) == 2]
    assert both
    assert all(sum(g["switch_bytes"] for g in line["groups"]) > 0 for line in both)
    assert sorted(p.name for p in (folder / "checkpoints").glob("step*")) == ["step-00000003", "step-00000006"]
    assert list((folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_report_of_a_run(trained):
    pytest.importorskip("plotly")
    folder, out = trained[0] / "out", trained[1]
    assert re.search(r"^report   out/report\.html$", out, re.MULTILINE)
    sections = report_sections(folder)
    assert set(sections) == {"run", "graph", "mesh", "timeline", "memory"}
    assert sections["run"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert sections["run"]["comparison"]["strategy"] == "tp2+sp"
    assert all(group["lengths"] and group["points"] for group in sections["run"]["groups"])
    assert sections["timeline"]["steps"][0]["title"] == "Step 6, the last one"
    lines = metrics(folder)
    for step in sections["timeline"]["steps"]:
        predicted, measured = step["timelines"]
        assert [lane["name"] for lane in measured["lanes"]] == ["rank 0", "rank 1"]
        line = lines[int(re.findall(r"\d+", step["title"])[0]) - 1]
        assert [group["strategy"] for group in step["groups"]] == [group["strategy"] for group in line["groups"]]
        assert [group["tokens"] for group in step["groups"]] == [group["tokens"] for group in line["groups"]]
        for group, shown in zip(line["groups"], predicted["groups"], strict=True):  # a run hides what flows beside it
            assert shown["reduce"] <= 1e3 * group["predicted_reduce_s"] + 1e-6
            assert shown["switch"] <= 1e3 * group["predicted_switch_s"] + 1e-6
        # The last bucket of the step has no run beside it, nor has the first one.
        assert predicted["groups"][-1]["reduce"] > 0
        assert (predicted["groups"][0]["switch"] > 0) == (line["groups"][0]["predicted_switch_s"] > 0)
        for number, group in enumerate(line["groups"]):
            mine = [span for span in measured["spans"] if span[0] == 0 and span[2] == number]
            assert {"switch", "micro_batch", "epilogue", "reduce"} <= {span[1] for span in mine}
            assert 0 < sum(span[4] for span in mine) <= 1e3 * group["wall_s"] + 1
        assert measured["end_ms"] >= max(span[3] + span[4] for span in measured["spans"]) - 1
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def report_sections(folder: Path) -> dict:
    """The data of the tabs of a run's report."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="fxpar-view">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.replace("<\\/", "</"))["sections"]


@pytest.mark.slow
def test_comparison(trained):
    folder, out = trained
    assert "the same 6 steps under tp2+sp alone" in out
    assert "losses   agree" in out
    found = json.loads((folder / "out" / "summary.json").read_text())["comparison"]
    assert found["steps"] == 5
    assert 0 < found["loss_diff"] < 1e-5
    assert found["speedup"] == pytest.approx(found["static_s"] / found["hot_s"])
    assert found["hot_cpu_ms"] > 0 < found["static_cpu_ms"]


@pytest.mark.slow
def test_resumed_equals_uninterrupted(prepared, one_rank, monkeypatch):
    """The data, the schedule and the optimizer go on where they were, in the very same numbers."""
    asked: list[int] = []

    def noted(module, **options):
        asked.append(options["length_multiple"])
        return parallelize(module, **options)

    monkeypatch.setattr("fxpar.train.session.parallelize", noted)
    even = (*BIGRAMS, "engine.length_multiple=4")
    assert one_rank(*even)[0] == 0
    whole = metrics(prepared / "out")
    assert asked == [4]
    assert not any(line["tokens"] % 4 for line in whole)
    shutil.rmtree(prepared / "out/checkpoints/step-00000006")
    status, out, err = one_rank(*even, "--resume")
    assert status == 0, out + err
    assert "resumed from out/checkpoints/step-00000003, after step 3" in out
    resumed, keys = metrics(prepared / "out"), ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[line[k] for k in keys] for line in resumed] == [[line[k] for k in keys] for line in whole]
    assert [line["wall_s"] for line in resumed][:3] == [line["wall_s"] for line in whole][:3]
    assert [line["wall_s"] for line in resumed][3:] != [line["wall_s"] for line in whole][3:]
    if importlib.util.find_spec("plotly"):
        assert report_sections(prepared / "out")["run"]["steps"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.nightly  # two processes that import torch; tests/checkpoint/test_resume.py resumes several strategies
def test_resumed_equals_uninterrupted_on_two_ranks(trained, prepared, monkeypatch, capfd):
    shutil.copytree(trained[0] / "out/checkpoints/step-00000003", prepared / "out/checkpoints/step-00000003")
    shutil.copy(trained[0] / "out/metrics.jsonl", prepared / "out")
    monkeypatch.chdir(prepared)
    status, out, err = fxpar("train", "tiny.toml", "--resume", "--json", "-")
    assert status == 0, out + err
    assert "resumed from out/checkpoints/step-00000003, after step 3" in capfd.readouterr().err  # rank 0's
    assert json.loads(out) == json.loads((prepared / "out/summary.json").read_text())
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    whole, resumed = metrics(trained[0] / "out"), metrics(prepared / "out")
    assert [[line[k] for k in keys] for line in resumed] == [[line[k] for k in keys] for line in whole]
    assert [line["wall_s"] for line in resumed][3:] != [line["wall_s"] for line in whole][3:]
    if importlib.util.find_spec("plotly"):
        assert report_sections(prepared / "out")["run"]["steps"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_resume_with_another_strategy_on_another_number_of_ranks(trained, prepared, one_rank):
    shutil.copytree(trained[0] / "out/checkpoints/step-00000003", prepared / "out/checkpoints/step-00000003")
    status, out, err = one_rank("--resume")
    assert status == 0, out + err
    losses = [line["loss"] for line in metrics(trained[0] / "out")]
    assert [line["loss"] for line in metrics(prepared / "out")] == pytest.approx(losses[3:], rel=1e-5)


@pytest.mark.slow
def test_strategies_that_are_chosen(prepared, one_rank):
    status, out, err = one_rank(*BIGRAMS, "strategies=auto", "run.ranks=1", "--compare", "static", "run.steps=3")
    assert status == 0, out + err
    assert re.search(r"^chosen strategies <=128 dp1: \S+ s per step predicted, no set below", out, re.MULTILINE)
    assert "the same 3 steps under dp1 alone" in out
    assert len(metrics(prepared / "out")) == 3


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_clean(prepared):
    one = ("strategies.static=dp1", "data.max_length=64", "checkpoint.every=0", *BIGRAMS)
    process = start(prepared, "tiny.toml", "--steps", "100000", *(word for each in one for word in ("--set", each)))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step      2/"):
            break
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, out + err
    assert "stopping after this step" in out
    (step,) = re.findall(
        r"^stopped after step (\d+)\. Checkpoint out/checkpoints/step-\d+; go on with", out, re.MULTILINE
    )
    assert [line["step"] for line in metrics(prepared / "out")] == list(range(1, int(step) + 1))
    assert [p.name for p in (prepared / "out/checkpoints").glob("step*")] == [f"step-{int(step):08d}"]
    if importlib.util.find_spec("plotly"):
        assert report_sections(prepared / "out")["run"]["steps"] == list(range(1, int(step) + 1))


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_ends_at_once(prepared):
    """There is nothing to finish, and the ranks are busy for seconds: they import torch, capture and lower."""
    process = start(prepared, "tiny.toml", "--set", "strategies.static=dp1", "--set", "data.max_length=64")
    assert process.stdout is not None
    begun = time.monotonic()
    while not (ranks := children(process.pid)):
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    said = "starting 1 rank\ninterrupted; finished checkpoints, if any, are in out/checkpoints\n"
    assert (status, out) == (130, said), out + err
    assert err == ""
    assert time.monotonic() - begun < 15  # 2 on an idle machine; others may keep this one busy
    while left := [rank for rank in ranks if Path(f"/proc/{rank}").exists()]:  # until init has buried them
        assert time.monotonic() - begun < 30, left
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Processes of the launcher that are ranks."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if b"fxpar.train.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.nightly  # what is said is tested in tests/train/test_launch.py
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"SIGKILL \(out of memory\?\); it wrote nothing"),
        (signal.SIGSEGV, r"SIGSEGV; what it wrote is in '(.*stderr\.log)'"),
    ],
)
def test_a_killed_rank(prepared, number, said):
    """Before: a second run is told the process to end. After: the command that goes on, and the log if it wrote one."""
    process = start(prepared, "tiny.toml", "--steps", "100000", "--set", "checkpoint.every=1")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("checkpoint"):
            break
    status, _, err = run(prepared, "tiny.toml")
    assert status == 1
    ((command, rank_0),) = re.findall(
        r"in use by process (\d+) on \S+ \(fxpar train of .*, its rank is process (\d+)", err
    )
    assert int(command) == process.pid
    others = [child for child in children(process.pid) if child != int(rank_0)]
    os.kill(others[0], number)
    status, out, err = finish(process)
    assert status == 1, out + err
    found = re.fullmatch(
        rf"error: rank 1 was ended by {said}\. Go on from "
        r"out/checkpoints/step-\d+ with: fxpar train tiny\.toml --set checkpoint\.every=1 --steps 100000 --resume\n",
        err,
    )
    assert found, err
    for log in found.groups():
        assert re.search(
            r"Fatal Python error: Segmentation fault(.|\n)*, line \d+ in run_rank", (prepared / log).read_text()
        )


@pytest.mark.slow
def test_a_loss_that_is_no_number(prepared, one_rank, monkeypatch):
    (prepared / "bad.py").write_text(
        "import torch\n"
        "from fxpar import losses\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(320, 320)\n"
        "    def forward(self, input_ids):\n"
        "        return self.table(input_ids) * float('inf')\n"
        "def make():\n"
        "    ids = torch.zeros(1, 9, dtype=torch.int64)\n"
        "    return Model(), losses.causal_lm, {'input_ids': ids, 'labels': ids}\n"
    )
    words = ("model.name=bad.py:make", "model.options={}", "run.steps=2")
    status, out, err = one_rank(*words)
    assert status == 1
    assert err.startswith("error: the loss of step 1 is nan"), err
    assert not (prepared / "out/metrics.jsonl").read_text()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)  # as if it were not installed
    status, out, err = one_rank(*words, "run.nan=skip")
    assert status == 0, out + err
    assert out.count("loss nan skipped") == 2
    assert re.search(r"^no report\.html: .* plotly, .*fxpar\[viz\]", out, re.MULTILINE)
    assert (prepared / "out/trace.json").exists()


@pytest.mark.slow
def test_the_first_error_of_a_rank_is_shown(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    one = ("--set", "strategies.static=dp1", "--set", "data.max_length=64")
    status, _, err = fxpar("train", "tiny.toml", *one, "--set", "model.options.vocab=100")
    assert status == 1
    assert re.fullmatch(r"error: VocabularyError on rank \d: tokenizer .* has 300 ids.*\n", err), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.source=nowhere", "nowhere"),
        ("model.options.vocab=100", "has 300 ids, but the model's vocabulary has 100"),
        ("data.overlong=error", "longest"),
        ("model.name=mlp", "model 'mlp' takes no tokens"),
        ("strategies.static=dp2", "is for 2 ranks ('dp2'), but 1 were started"),
        ("run.device=cuda", "1 local ranks need 1 GPUs"),
    ],
)
def test_bad_input_that_a_rank_finds(one_rank, word, expected):
    if word == "run.device=cuda" and torch.cuda.is_available():
        pytest.skip("has a GPU")
    status, _, err = one_rank("data.max_length=64", word)
    assert status == 1
    assert err.startswith("error: ")
    assert expected in err, err
