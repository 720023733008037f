"""`fxpar plan --verify N`: what is said of runs, and one real run on two ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxpar.cli.plan import ROUNDS, remarks
from fxpar.cli.plan_verify import check_verify, far_off, kind_here, other_devices, verdict, verified_json
from fxpar.cli.plan_verify_rank import known_ids
from fxpar.errors import MeasuredElsewhereError, PlanOptionError
from fxpar.models.loaded import LoadedModel
from fxpar.profiling.record import device_name
from fxpar.search.plan_file import read_plan
from fxpar.search.verify import StepSeconds, VerifiedPlan, refit
from tests.cli.helpers import fxpar

WORDS = ["plan", "llama", "--set", "layers=1", "--world", "2", "--lengths", "github:64", "--tokens-per-step", "256"]


def plans(*steps):
    return [VerifiedPlan((StepSeconds(*one),) * 2) for one in steps]


def test_what_changed_is_said():
    found = plans((1.0, 0.1, 2.5), (1.05, 0.06, 2.4))  # 2 and 5 times as long
    names = [ROUNDS, "plan 1"]
    lines = verdict(found, refit(found), names)
    assert lines == [
        "refitted: compute takes 2 times the predicted time, links 5 times",
        "order refitted: plan 1, the plan of rounds, fastest first",
        "order measured: plan 1, the plan of rounds, fastest first",
    ]
    one = plans((1.0, 0.0, 2.0))
    assert verdict(one, refit(one), names[1:]) == [
        "refitted: a step takes 2 times the predicted time (compute and links cannot be told apart)"
    ]
    same = plans((1.0, 0.1, 2.2), (2.0, 0.1, 4.2))
    assert verdict(same, refit(same), names)[1:] == ["order refitted: as predicted", "order measured: as predicted"]
    data = verified_json(found)
    assert (data["compute_factor"], data["link_factor"]) == pytest.approx((2.0, 5.0))
    assert [plan["measured_s"] for plan in data["plans"]] == [2.5, 2.4]


def test_what_is_far_off_is_said(tmp_path):
    """With what to do, by where the figures come from."""
    names, close = ["plan 1", "plan 2"], plans((1.0, 0.0, 1.14), (1.0, 0.0, 0.86))
    assert far_off(close, names, None) == []
    far, measured = plans((1.0, 0.0, 1.25), (0.75, 0.25, 0.5)), tmp_path / "cluster.json"
    measured.write_text('{"measured": {"device": "a device", "torch": "2.0"}}')
    for cluster, do in (
        (None, "measure this machine with fxpar profile and name its file with --cluster"),
        ("h100", "figures of h100 were not measured here: name a file that fxpar profile"),
        (str(measured), f"measure it anew, while nothing else runs here: fxpar profile -o {measured} --force"),
    ):
        (line,) = far_off(far, names, cluster)
        assert line.startswith(f"more than 15% off: plan 2 took 0.5 times the predicted time; {do}")
    assert far_off(far[:1], names, None)[0].startswith("more than 15% off: plan 1 took 1.25 times")


def test_what_cannot_run_here_is_said_before_the_search(tmp_path):
    with pytest.raises(PlanOptionError, match="--verify = 2: plans for 4,096 ranks cannot run on this machine"):
        check_verify(2, 4096, False, None)
    with pytest.raises(PlanOptionError, match="a graph file has no weights to run; name its model"):
        check_verify(2, 1, True, None)
    check_verify(2, 1, False, None)
    check_verify(2, 1, False, "h100")
    measured = tmp_path / "cluster.json"
    measured.write_text('{"measured": {"device": "a device", "torch": "2.0"}}')
    with pytest.raises(MeasuredElsewhereError, match="measured on a device"):
        check_verify(2, 1, False, str(measured))


def test_devices_that_differ_are_said(tmp_path):
    """Plans for an H100 run on whatever is here; figures that were measured here need no word, nor do usual ones."""
    (line,) = other_devices("h100", 2)
    here = device_name(torch.device(kind_here(2)))
    assert line.startswith(f"plans were predicted for h100 nodes, from data sheets, and run on 2 ranks of {here}, ")
    measured = tmp_path / "cluster.json"
    measured.write_text(json.dumps({"measured": {"device": here, "torch": torch.__version__}}))
    assert other_devices(None, 2) == other_devices(str(measured), 2) == []


def test_a_plan_that_is_not_predicted_best_says_so():
    """It is written where it was measured fastest."""
    best, other = (SimpleNamespace(predicted_s=s, strategies=(name,)) for s, name in ((1.0, "dp2"), (1.25, "cp2")))
    found = SimpleNamespace(best_static=best, plans=[best, other])
    assert remarks(found, "plan.toml", best, None)[0] == "predicted: no set of strategies is faster than dp2 alone"
    slower = "predicted: 1.25 times as long as dp2, the best single strategy"
    assert remarks(found, "plan.toml", other, None)[0] == slower
    teams = SimpleNamespace(predicted_s=0.8, strategies=("cp2 | dp2",))
    faster = "predicted: 1.25 times as fast as the best single strategy, dp2"
    assert remarks(found, "plan.toml", teams, None)[0] == faster
    found.plans.insert(0, teams)
    assert remarks(found, "plan.toml", best, None)[0] == "predicted: plan 1 is 1.25 times as fast as this one"


def test_a_plan_says_how_to_train_at_the_prices_it_was_made_for():
    """Without the cluster a run predicts for usual devices, and plans anew as if the plan had been wrong."""
    best = SimpleNamespace(predicted_s=1.0, strategies=("dp2",))
    found = SimpleNamespace(best_static=best, plans=[best])
    use = "train with it: fxpar train run.toml --plan plan.toml"
    assert remarks(found, "plan.toml", best, None)[1] == use
    assert remarks(found, "plan.toml", best, "here.json")[1] == use + " --set engine.cluster=here.json"


def test_ids_are_those_of_the_model():
    """The table of positions has more rows than that of tokens."""
    tables = nn.ModuleDict({"tokens": nn.Embedding(9, 2), "positions": nn.Embedding(99, 2)})
    loaded = LoadedModel("mine", tables, lambda model, batch: batch["input_ids"], {"input_ids": torch.arange(5)}, ())
    assert known_ids(loaded) == 5
    tables.get_input_embeddings = lambda: tables["tokens"]
    assert known_ids(loaded) == 9


PROMPTS = """
import torch
from fxpar import losses


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61)

    def forward(self, input_ids, prompt):
        return self.head(self.table(input_ids) * prompt[..., None])


def make():
    ids = torch.arange(13)[None]
    return Model(), losses.causal_lm, {"input_ids": ids, "labels": ids.roll(-1, 1), "prompt": torch.ones(1, 13)}
"""


def test_a_batch_that_has_more_than_tokens_is_refused_before_the_search(tmp_path):
    (tmp_path / "prompts.py").write_text(PROMPTS)
    words = ["--world", "2", "--lengths", "github:64", "--tokens-per-step", "256", "--verify", "2"]
    status, _, err = fxpar("plan", f"{tmp_path / 'prompts.py'}:make", *words)
    assert status == 1
    assert "--verify = 2: it runs " in err
    assert "random token ids, and its batch has more: prompt." in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*WORDS, "--verify", "0"], "--verify"),
        ([*WORDS[:5], "65536", *WORDS[6:], "--verify", "1"], "cannot run on this machine"),
        (["plan", "--cost", "galvatron", "--verify", "1"], "it is for a MODEL; --cost galvatron has --profiles"),
    ],
)
def test_bad_words_are_one_error(words, why):
    status, out, err = fxpar(*words)
    assert status in (1, 2)
    assert why in " ".join(err.replace("│", " ").split())
    assert not out


@pytest.mark.slow
def test_a_plan_is_run_and_measured(tmp_path):
    paths = ["-o", str(tmp_path / "plan.toml"), "--json", str(tmp_path / "plan.json")]
    status, text, err = fxpar(*WORDS, "--samples", "2", "--memory", "1GB", "--verify", "1", *paths)
    assert status == 0, text + err
    assert "predicted for usual CPUs" in text
    data = json.loads((tmp_path / "plan.json").read_text())
    (plan,) = data["verified"]["plans"]
    assert len(plan["steps"]) == 2
    assert plan["measured_s"] > 0
    assert plan["predicted_s"] == pytest.approx(data["plans"][0]["predicted_s"], rel=1e-6)  # the engine plans the same
    assert "the fastest as measured, is in" in text
    assert "# measured: " in (tmp_path / "plan.toml").read_text()
    assert read_plan(str(tmp_path / "plan.toml")).world == 2
