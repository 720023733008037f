"""`fxpar tasks plan`: the table, the JSON, and mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from fxpar.cli.tasks import ranges, run_tasks
from fxpar.cli.tasks_commands import TasksRequest
from fxpar.cli.tasks_run import RunTasks, read_run_tasks, to_toml
from fxpar.errors import (
    ConfigError,
    DynamicDimError,
    FitsNoDevicesError,
    OutputError,
    RunMemoryError,
    TaskGraphError,
    TasksFileError,
)
from fxpar.train.config import read_config
from fxpar.waves.runs import Option, RunPlan, TaskRun
from tests.cli.helpers import fxpar


@pytest.fixture
def file(tmp_path):
    metaops = [
        {
            "name": "image",
            "layers": 6,
            "layer_ms": {"1": 4, "2": 2.2, "4": 1.3},
            "output_bytes": 1e6,
            "state_bytes": 1e8,
        },
        {"name": "text", "layers": 4, "layer_ms": {"1": 1.5, "2": 1}, "output_bytes": 1e6, "saved_bytes": 1e8},
        {"name": "lm", "layers": 8, "layer_ms": {"1": 3, "2": 1.6, "4": 0.9}},
    ]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"metaops": metaops, "edges": [["image", "lm"], ["text", "lm"]]}))
    return str(path)


def test_what_is_printed(file, capsys):
    run_tasks(TasksRequest("plan", 4, file))
    out = capsys.readouterr().out
    assert "on 4 devices: 3 MetaOps" in out
    assert "wave  MetaOp  layers  devices" in out
    assert "A image, B text, C lm" in out
    assert "no plan takes less than" in out
    assert "one after the other 19.1 ms" in out  # 6 * 1.3 + 4 * 1 + 8 * 0.9, and gradients behind the last backward


def test_the_plan_as_json(file, tmp_path, capsys):
    run_tasks(TasksRequest("plan", 4, file, json=str(tmp_path / "plan.json")))
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["lower_bound_ms"] <= data["step_ms"] <= data["spindle_ms"]
    assert data["gap"] == pytest.approx(data["step_ms"] / data["lower_bound_ms"] - 1)
    assert max(one["backward"]["end_ms"] for one in data["pieces"]) == data["step_ms"]
    for name, layers in (("image", 6), ("text", 4), ("lm", 8)):
        mine = [one["layers"] for one in data["pieces"] if one["metaop"] == name]
        assert [layer for first, last in mine for layer in range(first, last + 1)] == list(range(layers))
    assert len(data["peak_bytes"]) == 4
    assert {one["weights"] for one in data["reductions"]} <= {"image"}
    assert data["memory_bytes"] is None
    capsys.readouterr()
    run_tasks(TasksRequest("plan", 4, file, json="-"))
    assert json.loads(capsys.readouterr().out)["pieces"] == data["pieces"]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("plan", 4, "no.json"), TaskGraphError, r"no\.json': it cannot be read: No such file .* or the TOML"),
        (("plan", 4, "no.toml"), TasksFileError, r"no\.toml': it cannot be read: No such file or directory"),
        (("plan", 4, "", "clip-11"), TaskGraphError, "there is no such case"),
        (("plan", 4, "", "clip-4", 8, None, "no/such/folder.json"), OutputError, "folder"),
        (("plan", 4, "", "clip-4", 8, None, None, "run.toml"), TasksFileError, "'clip-4': it says nothing of data"),
    ],
)
def test_mistakes(words, error, message):
    with pytest.raises(error, match=message):
        run_tasks(TasksRequest(*words))


def test_a_tower_that_fits_nowhere(file):
    path = Path(file)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory_gib": 0.05}))
    with pytest.raises(FitsNoDevicesError, match=r"'image' fits on no devices: one layer takes 0.09 GiB"):
        run_tasks(TasksRequest("plan", 4, file))
    with pytest.raises(FitsNoDevicesError, match=r"one layer takes 0.09 GiB of a device that has 0.03"):
        run_tasks(TasksRequest("plan", 4, file, memory="30MB"))  # wins over the file


def test_memory_by_device(file, capsys):
    run_tasks(TasksRequest("plan", 4, file, memory="2GB"))
    out = capsys.readouterr().out
    assert re.search(r"gradients add [\d.]+ .?s at its end; planned in", out)
    assert re.search(r"devices hold at most \d+ MB of 2.0 GB: 0-3 \d+ MB|devices hold at most \d+ MB of 2.0 GB", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", 4, "x.json"), "'run' is none of plan"),
        (("plan", 4), "name a file or a --case"),
        (("plan", 4, "x.json", "clip-4"), "one of the two"),
        (("plan", None, "x.json"), "say how many devices there are"),
        (("plan", 4, "pic.py"), r"'pic.py' names a model, .* TOML file with \[model\] name = 'pic.py:function' and"),
        (("plan", 4, "llama"), r"'llama' names a model, .* with \[model\] name = 'llama' and \[task.NAME\]"),
        (("plan", 4, "x.json", None, 8, "lots"), "'lots' is not a size such as 80GB or 500MB"),
    ],
)
def test_words_that_cannot_be_read(words, message):
    with pytest.raises(typer.BadParameter, match=message):
        TasksRequest(*words)


def test_devices_as_ranges():
    assert ranges((3, 0, 1, 2, 6)) == "0-3,6"


def test_no_torch_is_imported(file):
    code = (
        "import sys; from fxpar.cli.app import app; "
        f"app(['tasks', 'plan', {file!r}, '--devices', '2'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))

def loss(model, batch):
    return model(batch["x"]).square().sum()

def example():
    return {"x": torch.ones(4, 8)}
"""
TASKS = """
[model]
name = "towers.py:build"

[run]
ranks = 1

[task.both]
loss = "loss"
items = 2
dynamic = {x = {0 = "B"}}
example = {x = "f32[4, 8]"}
"""


@pytest.fixture
def of_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("towers.py").write_text(MODEL)
    Path("tasks.toml").write_text(TASKS)
    return "tasks.toml"


def test_a_plan_of_a_model(of_model, capsys):
    warns = 'def loss(model, batch):\n    __import__("fxpar").errors.warn("that is slow")'
    Path("towers.py").write_text(MODEL.replace("def loss(model, batch):", warns))
    run_tasks(TasksRequest("plan", None, of_model, json="plan.json", output="plan.html"))
    out, err = capsys.readouterr()
    assert err.splitlines().count("note: that is slow") == 1
    assert "tasks.toml on 1 devices: 2 MetaOps; predicted for devices of " in out
    assert "strategy" in out
    piece = json.loads(Path("plan.json").read_text())["pieces"][0]
    assert (piece["task"], piece["strategy"], piece["layers"]) == ("both", "dp1", [0, 1])
    assert piece["modules"] == ["0", "1"]
    assert "layers 0 to 1, backward" in Path("plan.html").read_text()


RUN = """
[model]
name = "towers.py:build"

[run]
steps = 3
device = "cpu"

[task.first]
loss = "loss"
data = "item"
items = 2
weight = 0.5
dynamic = { x = { 0 = "B" } }
strategies = { 4 = "dp1", 16 = "dp7" }
ranks = [5]

[task."of many words"]
loss = "loss"
data = "item"
items = 1
"""


@pytest.fixture
def of_run(of_model):
    Path("towers.py").write_text(f"{MODEL}\ndef item(number):\n    return example()\n")
    Path("run.toml").write_text(RUN)
    return "run.toml"


def test_a_run_is_written_as_planned(of_run, capsys):
    """With strategies for as long sequences as it named, or else for the example; all else is as it was."""
    run_tasks(TasksRequest("plan", 2, of_run, json="plan.json", output="planned.toml"))
    out = capsys.readouterr().out
    assert "a run can follow this: step" in out
    assert "strategy   ms  moving ms" in out
    assert re.search(r"ranks hold at most [\d.]+ kB", out)
    found, before = read_config("planned.toml"), tomllib.loads(RUN)
    assert found.engine.memory_budget_bytes is None
    placed = {one["task"]: one for one in json.loads(Path("plan.json").read_text())["run"]["tasks"]}
    assert list(found.tasks) == list(placed)
    assert (found.run.ranks, found.run.steps, found.world) == (2, 3, 2)
    for name, limit in (("first", "16"), ("of many words", "4")):
        mine, one = placed[name], found.tasks[name]
        assert one.strategies == {limit: mine["strategy"]}
        assert one.ranks == (mine["ranks"] if len(mine["ranks"]) < 2 else None)
        assert (one.loss, one.items) == ("loss", before["task"][name]["items"])
    assert (found.tasks["first"].weight, found.tasks["first"].dims) == (0.5, {"x": {0: "B"}})
    assert read_run_tasks("planned.toml", None, 8).cluster.world == 2  # what a plan wrote can be planned again


def test_a_limit_of_memory_goes_into_the_run(of_run):
    """Without the states of the optimizer, of which the engine knows nothing; a run that is planned again keeps it."""
    run_tasks(TasksRequest("plan", 2, of_run, memory="900MB", json="plan.json", output="planned.toml"))
    budget = read_config("planned.toml").engine.memory_budget_bytes
    assert 0 < 900e6 - budget < 1e4
    assert json.loads(Path("plan.json").read_text())["memory_bytes"] == 900e6
    assert read_run_tasks("planned.toml", None, 8).budget_bytes == budget
    Path("planned.toml").write_text(Path("planned.toml").read_text().replace(str(budget), "1000"))
    with pytest.raises(RunMemoryError, match="no strategies of the tasks fit on 2 devices of"):
        run_tasks(TasksRequest("plan", None, "planned.toml"))


def test_runs_that_cannot_be_planned(of_run, of_model):
    with pytest.raises(TasksFileError, match=r"run.ranks: it is missing. Write it, or --devices N"):
        run_tasks(TasksRequest("plan", None, of_run))
    with pytest.raises(TasksFileError, match="it says nothing of data, so nothing can train as planned"):
        run_tasks(TasksRequest("plan", 2, of_model, output="planned.toml"))
    Path(of_run).write_text(RUN.replace("weight", "wieght"))
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        run_tasks(TasksRequest("plan", 2, of_run))
    Path(of_run).write_text(RUN.replace("{ x =", "{ y ="))
    with pytest.raises(DynamicDimError, match="task 'first': dynamic names 'y', but the batch has x"):
        run_tasks(TasksRequest("plan", 2, of_run))


def test_tables_are_written_as_they_were():
    tables = tomllib.loads(RUN + '[model.options]\n"a b" = [1.5, true, "c\\"d"]\n')
    assert tomllib.loads(to_toml(tables)) == tables


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[task.both]", "[tasks.both]", "this run has one loss. Plan it with fxpar plan, or add .task.NAME"),
        ("[task.both]", "[task.both", "it is not TOML"),
        ("ranks = 1", "", "run.ranks: it is missing"),
        ("items =", "itmes =", "task.both.itmes is not a known key; did you mean 'items'"),
        ('loss = "loss"', "", r"task.both.loss is missing \(a text\)"),
        ('example = {x = "f32[4, 8]"}', "", r"task.both.data is missing \(a text\), or, for a plan alone, an example"),
        ("example =", 'data = "item"\nexample =', "task.both.example is for a task without data"),
        ("f32[4, 8]", "f33[4, 8]", r'task.both.example.x = "f33\[4, 8\]" must be dtype and shape, such as'),
        ("f32[4, 8]", "f32[4 4, 8]", "must be dtype and shape"),
        ("f32[4, 8]", f"f32[{'9' * 5000}]", "must be dtype and shape"),
        ("f32[4, 8]", "f32[0, 8]", "must have sizes of 1 or more"),
        ("f32[4, 8]", f"f32[{2**40}, 8]", r"must have at most 2\*\*40 elements"),
        ("[task.both]", '[task."a:b/c"]', "is not a name for a task"),
        ("items = 2", "items = 0", "task.both.items = 0 must be 1 or more"),
        ('{0 = "B"}', "{0 = 1}", "task.both.dynamic.x = .* must name dims by number"),
    ],
)
def test_mistakes_in_a_file_of_a_model(of_model, old, new, message):
    Path(of_model).write_text(TASKS.replace(old, new))
    with pytest.raises((ConfigError, TasksFileError), match=message):
        read_run_tasks(of_model, None, 8)


def test_an_example_takes_no_memory(of_model):
    """8 TB of zeros would."""
    Path(of_model).write_text(TASKS.replace("f32[4, 8]", f"f32[{2**37}, 8]"))
    (step,) = read_run_tasks(of_model, None, 8).steps().values()
    assert step.logical.dims[0].symbol is not None


def test_a_model_by_name_brings_loss_and_batch(of_model):
    """And a task without data is not trained."""
    Path(of_model).write_text(
        '[model]\nname = "mlp"\n[task.one]\nitems = 1\n[task.two]\nitems = 1\nloss = "towers.py:loss"\n'
        'data = "towers.py:item"\n[strategies]\n8 = "dp2"'
    )
    Path("towers.py").write_text(f"{MODEL}\ndef item(number):\n    return example()\n")
    read = read_run_tasks(of_model, 2, 8)
    (one, _), (two, _) = read.tasks.values()
    assert one.example is not None
    assert two.example is not None
    assert two.example["x"].shape == (4, 8)
    assert read.cluster.world == 2
    assert not read.can_train
    _, _, told = fxpar("train", of_model)
    assert "task.one.data is missing: without it a task is planned, and not trained" in told


def test_a_task_on_all_ranks_names_none():
    """Only such a task may write buffers and run in plain calls."""
    tables = {"task": {"one": {"loss": "loss", "ranks": [5]}}}
    runs = RunTasks(tables, None, {}, None, None, {"one": 8})  # type: ignore[arg-type]
    plan = RunPlan(2, ((TaskRun("one", (0, 1), Option(2, 1.0, "dp2")),),), 1.0)
    task = {"loss": "loss", "strategies": {"8": "dp2"}}
    assert tomllib.loads(runs.planned(plan, {})) == {"run": {"ranks": 2}, "task": {"one": task}}


ONE_TASK = """
[model]
name = "towers.py:build"
[task.both]
loss = "loss"
data = "item"
items = 3
dynamic = {x = {0 = "B"}}
strategies = {8 = "dp2"}
[precision]
compute = "bf16"
"""


def test_the_configuration_of_a_run_is_planned(of_model, capsys):
    Path("towers.py").write_text(f"{MODEL}\ndef item(number):\n    return example()\n")
    Path("run.toml").write_text(ONE_TASK)
    read = read_run_tasks("run.toml", 2, 8)
    assert (read.cluster.world, read.precision, read.tasks["both"][1]) == (2, "bf16", 3)
    with pytest.raises(TasksFileError, match=r"run\.ranks: it is missing"):
        read_run_tasks("run.toml", None, 8)
    run_tasks(TasksRequest("plan", 2, "run.toml"))
    assert "run.toml on 2 devices: 3 MetaOps" in capsys.readouterr().out
    one = '[model]\nname = "llama"\noptions = {dim = 8}\n[data]\nsource = "a"\nbatch_sequences = 2\n'
    Path("one.toml").write_text(f'{one}[strategies]\n8 = "dp1"')
    with pytest.raises(TasksFileError, match=r"this run has one loss\. Plan it with fxpar plan"):
        read_run_tasks("one.toml", None, 8)
    Path("plan.toml").write_text('fxpar_plan = 1\nmodel = "gpt"\noptions = ["dim=8"]')
    for file, told in (
        ("one.toml", "Write its model: llama --set dim=8. Built-in"),
        ("run.toml", "Write FILE.py:FUNC"),
        ("plan.toml", "it is a plan, for fxpar train --plan and fxpar viz. Write its model: gpt --set dim=8. Built-in"),
    ):
        assert told in fxpar("memory", file, "-s", "dp1")[2]
    assert "it is the configuration of a run, not a plan. Name a file" in fxpar("viz", "one.toml", "-o", "x.html")[2]
