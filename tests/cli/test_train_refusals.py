"""What `fxpar train` refuses before any rank starts."""

from __future__ import annotations

import pytest
import torch

from fxpar.checkpoint import save_checkpoint
from fxpar.runtime.planned import parameters_of
from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.train.config import read_config
from fxpar.train.model import build_model, shapes_for
from fxpar.train.rank import Outcome
from tests.cli.helpers import fxpar
from tests.cli.training import CONFIG

STDLIB = ["tiny.toml", "--set", "data.source=python-stdlib"]
AUTO = ["tiny.toml", "--ranks", "2", "--set", "data.max_length=64", "--set", "strategies=auto"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A configuration in the current folder; nothing else is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give either a configuration file"),
        (["tiny.toml", "--demo"], "give either a configuration file"),
        (["nowhere.toml"], "config 'nowhere.toml': No such file"),
        (["tiny.toml", "--set", "run.step=3"], "run.step is not a known key; did you mean 'steps'?"),
        (["tiny.toml", "--set", "strategies.512=xp4"], "unknown axis 'xp'"),
        (["tiny.toml", "--set", "strategies.512=dp4"], "must use all 4 ranks"),
        (["tiny.toml", "--set", "strategies=auto", "--ranks", "2"], '"auto" needs data.max_length'),
        (["tiny.toml", "--set", "strategies=auto", "--set", "data.max_length=64"], "needs run.ranks, or --ranks N"),
        ([*AUTO, "--set", "engine.token_budget=64"], "engine.token_budget needs strategies that are known"),
        ([*AUTO, "--set", 'engine.order=["dp2"]'], "engine.order needs strategies that are known"),
        ([*AUTO, "--compare", "dp4"], "strategy 'dp4' needs 4 ranks"),
        ([*AUTO, "--set", "strategies.64=dp2"], "strategies is not a section"),
        ([*AUTO, "--set", "strategies=atuo"], "strategy 'atuo'"),
        (["tiny.toml", "--ranks", "8"], "must use all 8 ranks"),
        (["tiny.toml", "--set", "data.max_length=4096"], "Add a strategy for 4096 tokens"),
        ([*STDLIB, "--resume"], "there is no complete checkpoint"),
        (["tiny.toml", "--compare", "dp4"], "strategy 'dp4' needs 4 ranks"),
        (["tiny.toml", "--compare", "static", "--resume"], "cannot be combined with --resume"),
        (["tiny.toml", "--compare", "static", "--steps", "1"], "needs run.steps = 2 or more"),
        (
            [*STDLIB, "--set", "run.folder=tiny.toml"],
            "folder 'tiny.toml' cannot be written: 'tiny.toml' is a file. Set run.",
        ),
        (
            [*STDLIB, "--set", "checkpoint.folder=tiny.toml/a"],
            "'tiny.toml' is a file. Set checkpoint.folder to another",
        ),
        (["tiny.toml"], "corpus 'corpus'"),
        (["tiny.toml", "--set", "data.source=python-stdlib", "--set", "data.tokenizer=no.json"], "no.json"),
        ([*STDLIB, "--set", "model.name=lama"], "did you mean 'llama'"),
        ([*STDLIB, "--set", "model.options.dims=3"], "dims"),
        ([*STDLIB, "--set", 'model.train=["*.nothing"]'], "*.nothing"),
        ([*STDLIB, "--set", 'engine.order=["dp2"]'], "each strategy must appear once"),
        (["tiny.toml", "--set", 'strategies={64 = "xp2"}'], "strategies.64: strategy 'xp2'"),
        ([*STDLIB, "--set", "engine.cluster=none.toml"], "cluster 'none.toml': cannot be read"),
    ],
)
def test_bad_input_before_any_rank_starts(config, monkeypatch, words, expected):
    monkeypatch.setattr("fxpar.train.launch.launch", lambda *_: pytest.fail("ranks were started"))
    status, out, err = fxpar("train", *words)
    assert status == 1
    assert err.startswith("error: ")
    assert expected in err
    assert not out


def test_a_folder_without_files_before_any_rank_starts(config, monkeypatch):
    monkeypatch.setattr("fxpar.train.launch.launch", lambda *_: pytest.fail("ranks were started"))
    (config / "empty").mkdir()
    status, out, err = fxpar("train", "tiny.toml", "--set", "data.source=empty")
    assert (status, out) == (1, "")
    assert "corpus 'empty'" in err
    assert "it holds no file; put text, JSONL or parquet files there, or name another source" in err
    (config / "empty" / "one.txt").touch()
    assert "all of its files are empty" in fxpar("train", "tiny.toml", "--set", "data.source=empty")[2]
    (config / "empty" / "one.txt").write_text("words " * 40)
    words = ("--set", "data.source=empty", "--set", "data.glob=*.md")
    assert "none of its 1 files (1 .txt) matches *.md; change the glob" in fxpar("train", "tiny.toml", *words)[2]


def test_more_ranks_than_a_machine_can_mean(config, monkeypatch):
    """Before any of them is started; whoever says the number means it, and comes to the next check."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (config / "many.toml").write_text(CONFIG.replace("dp2", "dp2.tp2.pp9").replace("tp2+sp", "tp4.pp9+sp"))
    words = ("train", "many.toml", *STDLIB[1:], "--set", "engine.cluster=none.toml")
    status, out, err = fxpar(*words)
    assert (status, out) == (1, "")
    assert "strategy 'tp4.pp9+sp' needs 36 ranks, and this machine has 2 cores" in err
    assert "add --ranks 36" in err
    assert not (config / "out").exists()
    _, _, err = fxpar(*words, "--ranks", "36")
    assert "cluster 'none.toml': cannot be read" in err


def test_ranks_that_do_not_fit_into_the_cluster(config):
    text = "nodes = 1\ndevices_per_node = 1\nintra_gb_per_s = 1\ninter_gb_per_s = 1\nlatency_us = 1\n"
    (config / "small.toml").write_text(text)
    status, _, err = fxpar("train", *STDLIB, "--set", "engine.cluster=small.toml")
    assert (status, "is too small for strategies on 2 ranks" in err) == (1, True)


def test_a_corrupt_checkpoint(config):
    folder = config / "out" / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    status, _, err = fxpar("train", *STDLIB, "--resume")
    assert status == 1
    assert "step-00000003" in err
    status, _, err = fxpar("train", *STDLIB)
    assert status == 1
    assert "has checkpoints of an earlier run. Add --resume" in err
    _, _, err = fxpar("train", "tiny.toml")
    assert "corpus 'corpus'" in err  # whoever has mistyped the source learns it first


def test_a_resumed_run_over_other_sequences(config, monkeypatch):
    """Ranks would find it out only after data, capture and lowering."""
    monkeypatch.setattr("fxpar.train.launch.launch", lambda *_: pytest.fail("ranks were started"))
    model = torch.nn.Linear(2, 2)
    fingerprint = {"max_length": 64, "overlong": "split", "seed": 0, "shuffle": True}
    extra = {"step": 3, "loader": {"fingerprint": fingerprint}}
    save_checkpoint(config / "out" / "checkpoints", 3, model, torch.optim.SGD(model.parameters()), extra)
    status, out, err = fxpar("train", *STDLIB, "--resume")
    assert (status, out) == (1, "")
    assert "data.max_length = 64, and this configuration has 128, the longest length of [strategies]" in err
    assert "Go on with --set data.max_length=64" in err
    _, _, err = fxpar("train", *STDLIB, "--resume", "--set", "data.max_length=64", "--set", "run.seed=3")
    assert "run.seed = 0, and this configuration has 3" in err
    _, _, err = fxpar("train", *STDLIB, "--resume", "--set", "data.max_length=64", "--set", "engine.length_multiple=2")
    assert "engine.length_multiple = 1, and this configuration has 2" in err  # which that version did not know
    _, _, err = fxpar("train", *STDLIB, "--resume", "--steps", "3")
    assert "it has done 3 steps, and run.steps is 3: nothing is left. Raise run.steps" in err


def test_a_resumed_run_of_another_model(config, monkeypatch):
    """Nothing but the checkpoint knows what a trained vocabulary came to."""
    launched = []
    monkeypatch.setattr("fxpar.train.launch.launch", lambda job, say: launched.append(job) or Outcome("done", 6))
    words = [*STDLIB, "--resume"]
    model = build_model(read_config("tiny.toml"), 200, "").model  # the corpus gave no more; 320 are 300 rounded up
    save_checkpoint(config / "out" / "checkpoints", 3, model, torch.optim.AdamW(model.parameters()), {})
    for same in ([], ["--set", "precision.parameters=bfloat16"], ["--set", "model.options.vocab=256"]):
        status, _, err = fxpar("train", *words, *same)
        assert (status, err) == (0, "")
    assert len(launched) == 3
    for option, said in (
        ("layers=2", "9 missing in the checkpoint: layers.1."),
        ("dim=64", "embedding.weight (float32[256, 32] saved, float32[256, 64] here)"),
        ("vocab=320", "2 of another shape or dtype: embedding.weight (float32[256, 32] saved, float32[320, 32] here)"),
    ):
        status, out, err = fxpar("train", *words, "--set", f"model.options.{option}")
        assert (status, out) == (1, "")
        assert "step-00000003': is of another model; parameters" in err
        assert said in err
    assert len(launched) == 3


@pytest.mark.parametrize(
    ("extra", "was", "back"),
    [
        ({"train": ["head.*", "norm.*"]}, "model.train = ['head.*', 'norm.*']", "model.train=['head.*', 'norm.*']"),
        ({"train": None}, "all parameters trained (no model.train)", "Go on without model.train"),
        (
            {},
            "2 parameters trained",
            "Go on with the model.train of that run",
        ),  # an earlier fxpar did not write it down
    ],
    ids=["globs", "all", "unknown"],
)
def test_a_resumed_run_that_trains_other_parameters(config, monkeypatch, extra, was, back):
    """The optimizer would find it out, after data, capture and lowering."""
    launched = []
    monkeypatch.setattr("fxpar.train.launch.launch", lambda job, say: launched.append(job) or Outcome("done", 6))
    model = build_model(read_config("tiny.toml"), 320, "").model
    trained = [model.get_parameter("head.weight"), model.get_parameter("norm.weight")]
    save_checkpoint(config / "out" / "checkpoints", 3, model, torch.optim.AdamW(trained), extra)
    status, _, err = fxpar("train", *STDLIB, "--resume", "--set", 'model.train=["head.weight", "norm*"]')
    assert (status, err) == (0, "")  # other globs for the same parameters
    status, out, err = fxpar("train", *STDLIB, "--resume", "--set", 'model.train=["head.*"]')
    assert (status, out) == (1, "")
    err = " ".join(err.split())
    assert f"it was written with {was}, and this configuration has model.train = ['head.*']" in err
    assert "they differ in norm.weight. Go on" in err
    assert back in err
    assert len(launched) == 1


def test_a_folder_that_cannot_be_written(config):
    (config / "out").write_text("in the way")
    status, _, err = fxpar("train", *STDLIB)
    assert status == 1
    assert (
        "folder 'out' cannot be written: 'out' is a file. Set run.folder to another folder, or move 'out' away" in err
    )


def test_a_resumed_run_with_another_optimizer(config, monkeypatch):
    """Ranks would find it out only after data, capture and lowering."""
    launched = []
    monkeypatch.setattr("fxpar.train.launch.launch", lambda job, say: launched.append(job) or Outcome("done", 6))
    model = build_model(read_config("tiny.toml"), 320, "").model
    save_checkpoint(config / "out" / "checkpoints", 3, model, torch.optim.Adam(model.parameters()), {})
    status, out, err = fxpar("train", *STDLIB, "--resume")
    assert (status, out, launched) == (1, "", [])
    err = " ".join(err.split())
    assert 'it holds the state of Adam, and this configuration has optimizer.name = "adamw". Go on' in err
    assert "with --set optimizer.name=adam, or start another run" in err
    assert fxpar("train", *STDLIB, "--resume", "--set", "optimizer.name=adam")[0] == 0


def test_strategies_are_chosen_for_the_ranks_of_torchrun(config, monkeypatch):
    """It has started them: nobody needs to count them again. Without it the number is asked for, see above."""
    jobs = []
    monkeypatch.setattr("fxpar.cli.train._as_rank", lambda job: bool(jobs.append(job)))
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    words = ("tiny.toml", "--set", "data.max_length=64", "--set", "strategies=auto")
    status, _, err = fxpar("train", *words)
    assert (status, err, jobs[0].config.world) == (0, "", 4)
    assert fxpar("train", *words, "--ranks", "2")[0] == 0
    assert jobs[1].config.world == 2  # said: ranks refuse another number
    assert fxpar("train", "tiny.toml")[0] == 0
    assert jobs[2].config.run.ranks is None  # strategies that are known say it


def test_a_plan_for_other_parameters_before_any_rank_starts(config, monkeypatch):
    """Of a model as large as the plan says; a tokenizer that is yet to be trained may make it another one."""
    monkeypatch.setattr("fxpar.train.launch.launch", lambda *_: Outcome("done", 6))
    model = {"layers": "1", "dim": "32", "heads": "4", "kv_heads": "2", "ffn": "48", "vocab": "320"}
    count = parameters_of(shapes_for(read_config("tiny.toml"), 320, {}).model)
    options = tuple(f"{key}={value}" for key, value in model.items())
    words = [*STDLIB, "--plan", "plan.toml", "--set", "checkpoint.enabled=false"]
    for parameters, more, refused in ((count, ["vocab=320"], False), (count + 1, ["vocab=320"], True), (9, [], False)):
        groups = (PlanGroup(32, "dp2", 32), PlanGroup(128, "tp2+sp", 128))
        plan = Plan("llama", 2, 500, groups, options, parameters=parameters)
        (config / "plan.toml").write_text(plan.to_toml())
        given = [word for one in more for word in ("--set", f"model.options.{one}")]
        _, _, err = fxpar("train", *words, *given)
        assert (f"'plan.toml': it is for llama with {count + 1:,} parameters, and this model has" in err) == refused
        assert refused or "error" not in err, err


def test_a_run_of_tasks_is_of_no_plan_and_not_compared(tmp_path):
    file = tmp_path / "run.toml"
    task = 'loss = "a.py:loss"\ndata = "a.py:data"\nitems = 1\nstrategies = { 8 = "dp1" }\n'
    file.write_text(f'[model]\nname = "a.py:make"\n[task.one]\n{task}')
    status, _, err = fxpar("train", str(file), "--compare", "static")
    assert status == 1
    assert "--compare: it is for one loss, and this configuration has tasks" in err
    (tmp_path / "plan.toml").write_text(Plan("llama", 1, 500, (PlanGroup(8, "dp1", 8),)).to_toml())
    _, _, err = fxpar("train", str(file), "--plan", str(tmp_path / "plan.toml"))
    assert "a plan is for one loss, and this configuration has tasks. Leave --plan out" in err
    for word in ("strategies=auto", "strategies.8=dp1", "engine.token_budgets.8=9"):
        _, _, err = fxpar("train", "--demo", "--plan", str(tmp_path / "plan.toml"), "--set", word)
        assert f"it says what --set {word} says too. Leave one of them out, or edit the plan" in err
    many = file.read_text().replace("dp1", "dp2048")
    file.write_text(many)
    assert "strategy 'dp2048' needs 2048 ranks, and this machine has" in fxpar("train", str(file))[2]
