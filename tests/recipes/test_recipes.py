"""Every recipe that is shipped builds its configuration, and its strategies are what its docstring says."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from fxpar.cost.cluster import usual_cluster
from fxpar.errors import UnsupportedRecipeError
from fxpar.ir.strategy import Strategy
from fxpar.recipes import deepseek_v3, gpt_oss, llama3, qwen3
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import check_recipe
from fxpar.recipes.trainer import FxparConfig, FxparTrainer

DEBUG_RANKS = 2


def public(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """The config functions of a module: what `--config` may name."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }


RECIPES = public(llama3) | public(qwen3) | public(deepseek_v3) | public(gpt_oss)
STOCK = [name for name in RECIPES if name.endswith("_stock")]
HOT = [name for name in RECIPES if name not in STOCK]


@functools.cache
def built(name: str) -> Any:
    return RECIPES[name]()


def ranks_of(name: str) -> int:
    """As the docstring says it; debug recipes are for two."""
    said = re.search(r"on (\d+) GPUs", inspect.getdoc(RECIPES[name]) or "")
    return int(said[1]) if said else DEBUG_RANKS


def test_what_is_shipped():
    assert sorted(RECIPES) == [
        "deepseek_v3.debug_hot_switch",
        "deepseek_v3.debug_static",
        "deepseek_v3.debug_stock",
        "gpt_oss.debug_hot_switch",
        "gpt_oss.debug_static",
        "gpt_oss.debug_stock",
        "llama3.debug_hot_switch",
        "llama3.debug_static",
        "llama3.debug_stock",
        "llama3.llama3_70b_hot_switch",
        "llama3.llama3_70b_static",
        "llama3.llama3_8b_hot_switch",
        "llama3.llama3_8b_static",
        "qwen3.debug_hot_switch",
        "qwen3.debug_moe_hot_switch",
        "qwen3.debug_moe_static",
        "qwen3.debug_moe_stock",
        "qwen3.debug_static",
        "qwen3.debug_stock",
        "qwen3.qwen3_14b_hot_switch",
        "qwen3.qwen3_14b_static",
    ]
    assert {name: ranks_of(name) for name in HOT if "debug" not in name} == {
        "llama3.llama3_70b_hot_switch": 64,
        "llama3.llama3_70b_static": 64,
        "llama3.llama3_8b_hot_switch": 8,
        "llama3.llama3_8b_static": 8,
        "qwen3.qwen3_14b_hot_switch": 8,
        "qwen3.qwen3_14b_static": 8,
    }


@pytest.mark.parametrize("name", RECIPES)
def test_it_builds(name):
    config = built(name)
    assert type(config) is FxparTrainer.Config
    assert config.model_spec.name == name.partition(".")[0]
    assert config.training.seq_len <= config.model_spec.model.max_seq_len  # else torchtitan refuses it
    assert inspect.getdoc(RECIPES[name])


@pytest.mark.parametrize("name", HOT)
def test_strategies_fit_the_ranks_and_take_every_document(name):
    config, ranks = built(name), ranks_of(name)
    check_recipe(config, config.fxpar, ranks)
    strategies = config.fxpar.strategies
    assert max(strategies) == config.training.seq_len
    parsed = [Strategy.parse(text, world=ranks) for text in strategies.values()]
    assert [str(strategy) for strategy in parsed] == list(strategies.values())  # written as they are printed
    assert (len(parsed) > 1) == name.endswith("hot_switch")
    attention = config.model_spec.model.first_attention
    heads = getattr(attention, "n_kv_heads", None) or attention.n_heads
    layers = len(config.model_spec.model.layers)
    for strategy in parsed:
        assert heads % strategy.degree("tp") == 0
        assert layers >= strategy.stages


@pytest.mark.parametrize("name", STOCK)
def test_debug_stock_has_no_strategy(name):
    assert built(name).fxpar == FxparConfig()


@pytest.mark.parametrize("name", HOT)
def test_static_and_hot_differ_in_nothing_else(name):
    """They are there to be compared."""
    static = built(re.sub("(static|hot_switch)$", "static", name))
    config = built(name)
    for part in ("training", "parallelism", "optimizer", "lr_scheduler", "dataloader", "hf_assets_path"):
        assert getattr(config, part) == getattr(static, part)


# --------------------------------------------------------------------------------------------------------- command line
def parsed(config: str, *args: str, module: str = "fxpar.recipes.llama3") -> Any:
    """As `python -m torchtitan.train --module ... --config ...` reads them."""
    return titan.config_manager.ConfigManager().parse_args(["--module", module, "--config", config, *args])


@pytest.mark.parametrize("module", ["fxpar.recipes.llama3", "fxpar.recipes.qwen3"])
def test_nothing_given(module):
    config = parsed("debug_hot_switch", module=module)
    assert type(config) is FxparTrainer.Config
    assert config.fxpar == FxparConfig(strategies={256: "dp2", 1024: "tp2+sp", 2048: "cp2"})


def test_strategies_on_the_command_line():
    args = "--fxpar.strategies 256 dp2 512 tp2 --fxpar.no-merge --training.seq-len 512"
    config = parsed("debug_hot_switch", *args.split())
    assert config.fxpar == FxparConfig(strategies={256: "dp2", 512: "tp2"}, merge=False)
    check_recipe(config, config.fxpar, 2)


def test_every_field_is_an_option():
    given = {
        "--fxpar.strategies": ("2048", "cp2+zero3+remat(*.feed_forward|*.attention)"),
        "--fxpar.plan": ("plan.toml",),
        "--fxpar.token-budget": ("4096",),
        "--fxpar.token-budgets": ("2048", "8192"),
        "--fxpar.memory-budget-gib": ("2.5",),
        "--fxpar.no-merge": (),
        "--fxpar.nan": ("skip",),
        "--fxpar.cluster": ("cluster.toml",),
        "--fxpar.data-ranks": ("2",),
        "--fxpar.no-log-groups": (),
        "--fxpar.no-override-attention": (),
    }
    expected = FxparConfig(
        strategies={2048: "cp2+zero3+remat(*.feed_forward|*.attention)"},
        plan="plan.toml",
        token_budget=4096,
        token_budgets={2048: 8192},
        memory_budget_gib=2.5,
        merge=False,
        nan="skip",
        cluster="cluster.toml",
        data_ranks=2,
        log_groups=False,
        override_attention=False,
    )
    assert parsed("debug_static", *(word for option in given.items() for word in (option[0], *option[1]))).fxpar == (
        expected
    )
    default = FxparConfig()
    same = [f.name for f in fields(FxparConfig) if getattr(expected, f.name) == getattr(default, f.name)]
    assert not same  # a new field needs a line above


def test_no_strategies_on_the_command_line():
    config = parsed("debug_hot_switch", "--fxpar.strategies")
    with pytest.raises(UnsupportedRecipeError, match=r"fxpar\.strategies: there is none"):
        check_recipe(config, config.fxpar, 2)


def test_help_says_what_the_settings_are(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed("debug_hot_switch", "--help")
    assert stop.value.code == 0
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for f in fields(FxparConfig):
        assert f"--fxpar.{f.name.replace('_', '-')}" in said
    assert "Strategy of each length group by its longest sequence" in said
    assert "(default: 256 dp2 1024 tp2+sp 2048 cp2)" in said


def test_a_cluster_file_is_read(monkeypatch, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(usual_cluster(2, 1).to_json()))
    trainer = FxparTrainer.__new__(FxparTrainer)
    trainer.config = parsed("debug_hot_switch")
    trainer.config.debug.seed = 0
    trainer.fxpar_settings = replace(trainer.config.fxpar, cluster=str(tmp_path / "c.json"))
    monkeypatch.setattr("fxpar.recipes.trainer.fxpar.parallelize", lambda model, **given: given)
    words = {"training": trainer.config.training, "compile_config": trainer.config.compile}
    assert trainer._fxpar_parallelize(torch.nn.Linear(1, 1), **words)["cluster"] == usual_cluster(2, 1)
