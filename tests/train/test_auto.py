"""`strategies = "auto"`: what a run is planned for, and what it takes of the plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.train.auto import compared_with, plan_line, search_plan, with_plan
from fxpar.train.config import config_from_json, parse_config
from fxpar.train.model import build_model
from fxpar.train.text import make_loader, open_tokens, prepare

CPU = torch.device("cpu")
UNTIL = 0.25  # what a plan may drift, unless the configuration says something else
PLAN = Plan("llama", 2, 500, (PlanGroup(32, "dp2", 64), PlanGroup(128, "tp2+sp", 200)), predicted_s=0.25)
CONFIG = """
strategies = "auto"
[model]
name = "llama"
options = { layers = 5, dim = 32, heads = 4, kv_heads = 2, ffn = 48 }
[data]
vocab = 300
batch_tokens = 500
max_length = 128
[engine]
cluster = { nodes = 2, devices_per_node = 8, intra_gb_per_s = 2, inter_gb_per_s = 1, latency_us = 200 }
[run]
ranks = 2
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A configuration on a corpus, and its data."""
    folder = tmp_path_factory.mktemp("auto")
    (folder / "corpus").mkdir()
    draw = random.Random(0)
    for number in range(40):
        words = (draw.choice(["weights", "go", "home", "again"]) for _ in range(draw.choice([5, 20, 70])))
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(words))
    paths = [f"data.source={folder / 'corpus'}", f"data.cache={folder / 'cache'}"]
    config = parse_config(CONFIG, "auto.toml", "auto", paths)
    return config, prepare(config.data, print)


def test_a_plan_is_for_the_mini_batches_and_the_vocabulary_of_the_run(run, monkeypatch):
    asked = {}
    monkeypatch.setattr("fxpar.train.auto.Search.plan", lambda search: asked.update(vars(search)) or PLAN)
    config, prepared = run
    assert search_plan(config, prepared, CPU) == PLAN
    loader = make_loader(open_tokens(prepared, 0)[0], config, prepared.vocab_size)
    assert asked["batches"] == [[len(ids) for ids in batch] for batch in itertools.islice(loader, 8)]
    assert (asked["longest"], asked["tokens_per_step"], asked["world"]) == (128, 500, 2)
    assert asked["depth"].layers == 5
    assert asked["cluster"].devices_per_node == 8
    monkeypatch.setattr("fxpar.train.auto.layer_option", lambda name, given: None)  # a function of the user's
    search_plan(config, prepared, CPU)
    assert asked["depth"].samples(1) == (5,)
    assert asked["rows"](5) is asked["rows"](1)


@pytest.mark.slow
def test_the_plan_of_a_run(run):
    config, prepared = run
    # Deep models are priced by shallow ones: tests/search/test_price.py. Two layers are what they are.
    config = replace(config, model=replace(config.model, options={**config.model.options, "layers": 2}))
    plan = search_plan(config, prepared, CPU)
    model = build_model(config, prepared.vocab_size, prepared.tokenizer).model
    plan.check_module("p", sum(parameter.numel() for parameter in model.parameters()), 2)
    plan.check("p", "llama", [f"{key}={value}" for key, value in config.model.options.items()], 2)
    assert plan.groups[-1].limit == 128
    assert plan.world == 2  # of the 16 devices that the cluster has
    assert 0 < plan.lower_bound_s <= plan.predicted_s


def test_a_run_takes_the_plan(run):
    config = with_plan(run[0], PLAN)
    assert config.strategies == ((32, "dp2"), (128, "tp2+sp"))
    assert config.engine.token_budgets == {"32": 64, "128": 200}
    assert config.engine.memory_budget_bytes is None
    assert config_from_json(config.to_json()) == config
    assert config_from_json(run[0].to_json()) == run[0]  # before there are strategies
    assert (run[0].world, run[0].strategies) == (2, ())


def test_what_is_said_and_compared():
    assert plan_line(PLAN) == ("chosen strategies <=32 dp2, <=128 tp2+sp: 0.25 s per step predicted, no set below 0 s")
    assert [compared_with(word, PLAN) for word in (None, "static", "cp2")] == [None, "tp2+sp", "cp2"]


@pytest.mark.parametrize(("words", "drift"), [((), UNTIL), (("plan.drift=0",), 0.0), (("plan.drift=0.5",), 0.5)])
def test_a_plan_may_drift(words, drift):
    config = parse_config(CONFIG, "auto.toml", "auto", ["data.source=here", *words])
    assert with_plan(config, PLAN).plan.drift == drift
    assert config.plan.drift == (drift if words else None)
    assert config_from_json(config.to_json()) == config
