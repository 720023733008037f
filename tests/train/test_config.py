from __future__ import annotations

import json
import re

import pytest

from fxpar import errors
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.train.config import config_from_json, described_cluster, parse_config, read_config
from fxpar.train.demo import DEMO

SMALL = """
[model]
name = "llama"
options = { layers = 1 }
[data]
source = "python-stdlib"
batch_tokens = 1000
[strategies]
2048 = "dp2.tp2"
512 = "dp4"
"""


def parse(text=SMALL, *words):
    return parse_config(text, "x.toml", "x", words)


def message(*words, text=SMALL, error=errors.ConfigError):
    with pytest.raises(error) as caught:
        parse(text, *words)
    return str(caught.value)


def test_values_and_defaults():
    config = parse()
    assert config.strategies == ((512, "dp4"), (2048, "dp2.tp2"))
    assert (config.world, config.max_length) == (4, 2048)
    assert config.model.options == {"layers": 1}
    assert str(config.folder) == "runs/x"
    assert str(config.checkpoints) == "runs/x/checkpoints"
    assert config.optimizer.betas == (0.9, 0.95)


def test_assignments_replace_values():
    words = ["run.steps=7", "run.folder=out/a b", "optimizer.lr=1", "optimizer.betas=[0.5, 1]", "model.options.dim=32"]
    config = parse(SMALL, *words)
    assert (config.run.steps, config.run.folder, config.optimizer.lr) == (7, "out/a b", 1.0)
    assert config.optimizer.betas == (0.5, 1.0)
    assert config.model.options == {"layers": 1, "dim": 32}


def test_a_word_in_place_of_strategies():
    text = 'strategies = "atuo"\n' + SMALL[: SMALL.index("[strategies]")]
    assert 'strategies = "atuo" must be "auto", or a section: [strategies]' in message(text=text)


def test_all_strategies_are_replaced():
    """`--set strategies=...` stands for the whole section; single keys come on top of those of the file."""
    assert parse(SMALL, 'strategies={64 = "cp4", 2048 = "tp4"}').strategies == ((64, "cp4"), (2048, "tp4"))
    assert parse(SMALL, "strategies=cp4", "data.max_length=99").strategies == ((99, "cp4"),)
    assert len(parse(SMALL, "strategies.64=cp4").strategies) == 3


def test_static_strategy():
    text = SMALL.replace('2048 = "dp2.tp2"\n512 = "dp4"', 'static = "cp4"')
    assert parse(text, "data.max_length=300").strategies == ((300, "cp4"),)
    assert "needs data.max_length: the longest sequence in tokens, such as 4096" in message(text=text)
    assert parse(SMALL, "strategies.static=dp4", "data.max_length=99").strategies == ((99, "dp4"),)
    assert parse(text, "strategies.64=dp2").strategies == ((64, "dp2"),)


def test_strategies_of_another_world_are_told_with_other_problems():
    text = SMALL.replace('512 = "dp4"', '512 = "tp3"')
    alone = message(text=text, error=errors.StrategyWorldsError)
    for words in (("run.stpes=7",), ("data.batch_sequences=8",), ("engine.token_budgets={x=1}",)):
        both = message(*words, text=text)
        assert alone in both
        assert len(both.splitlines()) == 3 + alone.count("\n")
    for ranks in ("'four'", 0):  # it is not known how many there are
        assert "must use all" not in message(f"run.ranks={ranks}", text=text)


def test_json_holds_everything():
    config = parse(SMALL, "engine.token_budgets={512=600}", "engine.order=['dp4', 'dp2.tp2']", "data.glob=*.py")
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_cluster_is_a_file_or_a_table(tmp_path):
    table = (
        "[engine.cluster]\nnodes = 1\ndevices_per_node = 4\nintra_gb_per_s = 2\ninter_gb_per_s = 1\nlatency_us = 90\n"
    )
    device = "[engine.cluster.device]\ntflops = { float32 = 0.1 }\nmemory_gb_per_s = 20\nlaunch_us = 2\n"
    described = described_cluster(parse(SMALL + table + device).engine)
    assert described == ClusterSpec(1, 4, 2, 1, 90, device=Device({"float32": 0.1}, 20, 2))
    config = parse(SMALL + table + device, "engine.cluster.nodes=3")
    assert described_cluster(config_from_json(json.loads(json.dumps(config.to_json()))).engine).nodes == 3
    (tmp_path / "c.json").write_text(json.dumps(described.to_json()))
    assert described_cluster(parse(SMALL, f"engine.cluster={tmp_path / 'c.json'}").engine) == described
    assert described_cluster(parse().engine) is None
    with pytest.raises(errors.ClusterError, match=r"\[engine.cluster\]: lacks devices_per_node"):
        described_cluster(parse(SMALL, "engine.cluster.nodes=3").engine)


def test_the_demo_is_valid():
    assert parse_config(DEMO, "demo", "demo").world == 4


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("run.step=3", "run.step is not a known key; did you mean 'steps'?"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate is not a known key; did you mean 'lr'?"),
        ("run.zzz=3", "run.zzz is not a known key; [run] has steps, ranks"),
        ("optimiser.lr=3", "[optimiser] is not a section; did you mean 'optimizer'?"),
        ("run.steps=many", 'run.steps = "many" must be an integer'),
        ("run.steps=true", "run.steps = true must be an integer"),
        ("run.steps=0", "run.steps = 0 must be 1 or more"),
        ("optimizer.lr=0", "optimizer.lr = 0 must be more than 0"),
        ("optimizer.lr=nan", "--set optimizer.lr: lr = nan cannot be used: a number is finite and below 2**63"),
        ("run.seed=" + "9" * 400, "--set run.seed: seed = a number of 400 digits cannot be used"),
        ("model.options.dim=99999999999999999999", "dim = 99999999999999999999 cannot be used"),
        ("run.name=" + "[" * 5000, "--set run.name: its brackets are nested more than 50 deep"),
        ("run.ranks=1048577", "run.ranks = 1048577 must be 1,048,576 or less"),
        ("run.timeout_s=1e18", "run.timeout_s = 1e+18 must be 1,000,000,000 or less"),
        ("data.max_length=1073741825", "data.max_length = 1073741825 must be 1,073,741,824 or less"),
        ("strategies.1073741825=dp4", "strategies.1073741825 is not a length in tokens: those are from 1 to"),
        (f"strategies.{'9' * 5000}=dp4", f"strategies.{'9' * 40} is not a length in tokens"),
        ("optimizer.betas=[1]", "optimizer.betas = [1] must be a list of 2 numbers"),
        ("optimizer.name=adamv", "optimizer.name = \"adamv\" must be one of 'adamw', 'adam', 'sgd'"),
        ("run.tensorboard=1", "run.tensorboard = 1 must be true or false"),
        ("model.name=3", "model.name = 3 must be a text"),
        ("model.options=3", "model.options = 3 must be a table"),
        ("engine.order=[1]", "engine.order = [1] must be a list of texts"),
        ("engine.cluster=3", "engine.cluster = 3 must be a text or a table"),
        ("engine.device_tflops=3", "engine.device_tflops is not a known key; [engine] has token_budget"),
        ("strategies.512=dq4", "strategies.512: strategy 'dq4': unknown axis 'dq'"),
        ("strategies.many=dp4", "strategies.many is not a length in tokens"),
        ("strategies.512=4", "strategies.512 = 4 must be a strategy"),
        ("data.batch_sequences=3", "needs one of batch_tokens and batch_sequences"),
        ("run.steps", "--set run.steps: write section.key=value"),
        ("steps=3", "--set steps=3: write section.key=value"),
        ("model.name.x=3", "--set model.name.x=3: name is not a section"),
        ("engine.token_budgets={a=1}", "engine.token_budgets.a = 1 must be a length and a number of tokens"),
        ("engine.length_multiple=0", "engine.length_multiple = 0 must be 1 or more"),
        ("engine.length_multiple=4096", "engine.length_multiple = 4096 must be at most 2048, the longest length"),
    ],
)
def test_bad_values(word, expected):
    assert expected in message(word)


def test_all_problems_at_once():
    text = message("run.step=3", "optimizer.lr=fast", "data.sorce=x", "strategies.7=zz1")
    for part in ("run.step ", "optimizer.lr", "data.sorce", "strategies.7"):
        assert part in text
    assert len(text.splitlines()) == 5
    assert 'implementation = "fused" is not for sgd' in message("optimizer.name=sgd", "optimizer.implementation=fused")


def test_missing_sections_and_keys():
    text = message(text="[model]\n[data]\nbatch_tokens = 3\n")
    for part in ("model.name is missing (a text)", "data.source is missing", "section [strategies] is missing"):
        assert part in text
    assert "section [data] is missing (or [task.NAME])" in message(text="[run]")
    assert "section [model] is missing" in message(text="[run]")
    assert "model = 3 must be a section" in message(
        text=SMALL.replace('[model]\nname = "llama"\noptions = { layers = 1 }', "model = 3")
    )


@pytest.mark.parametrize(
    ("word", "error", "expected"),
    [
        ("strategies.512=dp2", errors.StrategyWorldsError, "'dp2' (up to 512 tokens) uses 2"),
        ("run.ranks=8", errors.StrategyWorldsError, "must use all 8 ranks"),
        ("data.max_length=4096", errors.MaxLengthError, "Add a strategy for 4096 tokens"),
        ("engine.token_budget=100", errors.TokenBudgetError, "token budget 100"),
        ("engine.token_budgets={100 = 5000}", errors.UnknownBudgetError, "limit 100"),
    ],
)
def test_values_that_do_not_fit_together(word, error, expected):
    assert expected in message(word, error=error)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan.exact_steps=3"], "plan.exact_steps is for experts that see means of rows: write +lsh(0.2)"),
        (
            ["strategies={512='dp4+lsh(0.2)'}", "plan.residual=0.5", "engine.compile=inductor"],
            "plan.residual is measured",
        ),
        (["plan.residual=0"], "plan.residual = 0 must be more than 0"),
    ],
)
def test_when_experts_see_all_rows(words, expected):
    assert expected in message(*words)


def test_a_model_in_place_of_a_configuration(tmp_path):
    script = tmp_path / "model.py"
    for path in (f"{script}:make", "hf:./folder"):
        with pytest.raises(errors.ConfigFileError, match=r"No such file.*name = \.\.\. under \[model\]"):
            read_config(path)
    script.write_text("import torch\n")
    with pytest.raises(errors.ConfigFileError, match=r"it is not TOML.*name = \.\.\. under \[model\]"):
        read_config(script)


def test_a_plan_in_place_of_a_configuration(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('fxpar_plan = 1\nmodel = "llama"\n[[groups]]\nlimit = 8\n')
    with pytest.raises(errors.ConfigFileError, match=r"is a plan of .* fxpar train CONFIG --plan \S+plan\.toml$"):
        read_config(path)


def test_files(tmp_path):
    path = tmp_path / "long-name.toml"
    with pytest.raises(errors.ConfigFileError, match="it is a folder; name the TOML file"):
        read_config(tmp_path)
    with pytest.raises(errors.ConfigFileError, match="No such file"):
        read_config(path)
    path.write_text("[model\n")
    with pytest.raises(errors.ConfigFileError, match=r"it is not TOML: [^.]*$"):
        read_config(path)
    path.write_text("[run]\nsteps = " + "9" * 400)
    with pytest.raises(errors.ConfigFileError, match=r"run\.steps = a number of 400 digits"):
        read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(errors.ConfigFileError):
        read_config(path)
    path.write_text(SMALL)
    assert read_config(path).name == "long-name"


def test_the_manual_names_every_key():
    """docs/train.md lists exactly the keys that there are."""
    from dataclasses import fields
    from pathlib import Path

    from fxpar.train.config import SECTIONS
    from fxpar.train.tasks import TaskConfig

    manual = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    for section, cls in {**SECTIONS, "task.NAME": TaskConfig}.items():
        (part,) = re.findall(rf"^### \[{section}\]\n(.*?)(?=^##|\Z)", manual, re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"^\| `(\w+)`", part, re.MULTILINE))
        assert named == {field.name for field in fields(cls)}, section


def test_the_examples_are_valid():
    from pathlib import Path

    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
    assert [read_config(path).name for path in examples] == ["clip", "llava", "long_tail", "static", "translate"]


def test_weights_need_their_folder_and_their_tokenizer(tmp_path):
    assert 'model.name: "nowhere/at/all" is not a folder here' in message('model.name="hf:nowhere/at/all"')
    assert 'model.weights: "nowhere" is not a folder here' in message('model.weights="nowhere"')
    for key in ("missing", "unused"):
        assert f"model.{key} is for weights from a folder" in message(f'model.{key}=["a"]')
    assert "would give its tokens other meanings" in message(f'model.weights="{tmp_path}"')
    config = parse(SMALL, f'model.weights="{tmp_path}"', 'data.tokenizer="mine.json"')
    assert config.data.tokenizer == "mine.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    config = parse(SMALL, f'model.weights="{tmp_path}"')
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
