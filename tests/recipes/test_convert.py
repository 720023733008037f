"""`to_fxpar` changes what it says it changes, and nothing of the recipe that it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel

import fxpar
from fxpar.errors import PlanFileError, UnsupportedRecipeError
from fxpar.recipes import cpu
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.attention import FOR_FXPAR, FOR_STOCK_ON_CPU
from fxpar.recipes.checks import check_recipe
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.plans import with_plan
from fxpar.recipes.stock import stock
from fxpar.recipes.trainer import FxparConfig, FxparTrainer, one_device
from fxpar.search.plan_file import Plan, PlanGroup

SWITCHED = {
    "fxpar",
    "model_spec",
    "parallelism",
    "loss",
    "activation_checkpoint",
    "training",
    "override",
    "dataloader",
    "checkpoint",
    "validator",
    "debug",
}
ON_CPU = {"training", "override"}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same on every machine; `enable()` stays, as it would in a training process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return


def recipe(name: str = "llama3_debugmodel") -> Any:
    return titan.stock_recipe("llama3", name)


def changed_fields(config: Any, given: Any) -> set[str]:
    """Fields that are no longer the very objects of the given recipe."""
    return {f.name for f in fields(config) if getattr(config, f.name) is not getattr(given, f.name, None)}


def test_the_given_recipe_is_left_alone():
    given = recipe()
    before = repr(given)
    to_fxpar(given, strategies={2048: "dp2"}, merge=False)
    to_fxpar(given, strategies=None)
    assert repr(given) == before


def switched(given: Any, strategies: dict[int, str], world: int = 2, **settings: Any) -> Any:
    """What the trainer makes of it."""
    return one_device(to_fxpar(given, strategies=strategies, **settings), world, lambda model, **_: model)


def test_only_fxpars_settings_are_added():
    given = recipe()
    config = to_fxpar(given, strategies={2048: "dp2"})
    assert type(config) is FxparTrainer.Config
    assert changed_fields(config, given) == {"fxpar"}
    assert cpu.is_enabled()


def test_what_the_trainer_changes_with_strategies():
    given = recipe()
    config = switched(given, {2048: "dp2"})
    assert changed_fields(config, given) == SWITCHED
    assert config.activation_checkpoint is None
    rows = 2 * given.training.local_batch_size
    sizes = {"local_batch_size": rows, "global_batch_size": rows}
    assert config.training == replace(given.training, disable_cuda_graphs=True, **sizes)
    assert isinstance(given.loss, ChunkedLossWrapper.Config)
    assert config.loss is given.loss.loss_fn
    assert config.override.imports == list(FOR_FXPAR)
    assert config.model_spec.model is given.model_spec.model
    assert (config.dataloader.inner, config.dataloader.rows) == (given.dataloader, given.training.local_batch_size)


def test_without_strategies_it_is_torchtitans_recipe():
    """Only what this torch and a CPU need is added; trained numbers are held by tests/titan."""
    given = recipe()
    config = stock(to_fxpar(given, strategies=None))
    assert type(config) is FxparTrainer.Config
    assert config.fxpar == FxparConfig()
    needs = set() if titan.has_spmd_types() else {"spmd_backend"}
    assert changed_fields(config, given) <= {"fxpar", "parallelism"} | ON_CPU
    assert {f for f in config.parallelism.__slots__ if differs(config.parallelism, given.parallelism, f)} == needs
    assert config.training == replace(given.training, disable_cuda_graphs=True)
    assert config.override.imports == [FOR_STOCK_ON_CPU]


def differs(a: Any, b: Any, name: str) -> bool:
    return getattr(a, name) != getattr(b, name)


def test_a_torch_with_spmd_types_keeps_the_recipes_backend(monkeypatch):
    monkeypatch.setattr(titan, "has_spmd_types", lambda: True)
    given = recipe()
    assert stock(to_fxpar(given, strategies=None)).parallelism is given.parallelism


def test_settings():
    config = to_fxpar(recipe(), strategies={2048: "dp2"}, token_budget=4096, data_ranks=2, nan="skip", merge=False)
    assert config.fxpar == FxparConfig(
        strategies={2048: "dp2"}, token_budget=4096, data_ranks=2, nan="skip", merge=False
    )
    with pytest.raises(TypeError, match="no_such_setting"):
        to_fxpar(recipe(), strategies={2048: "dp2"}, no_such_setting=1)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    groups = (PlanGroup(512, "dp2", 1024), PlanGroup(2048, "tp2+sp", 2048))
    return Plan("llama", 2, 4096, groups, memory_budget_bytes=3 * 2**30 + 1, parameters=6163712)


def test_a_plan_says_strategies_and_budgets(plan, tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = recipe()
    before = repr(given)
    config = to_fxpar(given, plan=tmp_path / "plan.toml", merge=False)
    budget = config.fxpar.memory_budget_gib
    assert config.fxpar == FxparConfig(
        strategies={512: "dp2", 2048: "tp2+sp"},
        token_budgets={512: 1024, 2048: 2048},
        memory_budget_gib=budget,
        merge=False,
    )
    assert int(budget * 2**30) == plan.memory_budget_bytes
    assert repr(given) == before
    assert to_fxpar(recipe(), plan=plan, memory_budget_gib=1.0).fxpar.memory_budget_gib == 1.0


def test_the_trainer_is_told_the_budgets_of_a_plan(plan, monkeypatch):
    told = {}
    monkeypatch.setattr(fxpar, "parallelize", lambda model, **options: told.update(options))
    trainer = object.__new__(FxparTrainer)
    trainer.config = to_fxpar(recipe(), plan=plan)
    trainer.config.debug.seed = 7
    trainer.fxpar_settings = trainer.config.fxpar
    config = trainer.config
    trainer._fxpar_parallelize(torch.nn.Linear(2, 2), training=config.training, compile_config=config.compile)
    assert told["strategies"] == plan.strategies
    assert told["token_budget"] == plan.token_budgets
    assert told["memory_budget_bytes"] == plan.memory_budget_bytes


def test_a_plan_for_something_else_is_refused(plan, monkeypatch):
    for name, value in (("strategies", {2048: "dp2"}), ("token_budget", 64), ("token_budgets", {512: 64})):
        with pytest.raises(UnsupportedRecipeError, match=f"{name}.*the plan says it already.*Leave out {name}="):
            to_fxpar(recipe(), plan=plan, **{name: value})
    with pytest.raises(PlanFileError, match="for llama with 7 parameters, and this model has 6,163,712"):
        to_fxpar(recipe(), plan=replace(plan, parameters=7))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanFileError, match="it is for 2 ranks, not 4"):
        to_fxpar(recipe(), plan=plan)


def test_strategies_are_copied():
    strategies = {2048: "dp2"}
    config = to_fxpar(recipe(), strategies=strategies)
    strategies[4096] = "tp2"
    assert config.fxpar.strategies == {2048: "dp2"}


def test_a_plain_loss_stays():
    given = recipe("llama3_debugmodel_ce_loss")
    config = switched(given, {2048: "dp2"})
    assert config.loss is given.loss
    assert type(config.loss) is CrossEntropyLoss.Config


def test_overrides_of_the_recipe_come_first():
    given = recipe()
    given.override.imports = ["my.overrides.rope", ("my.overrides.norm", {"eps": 1e-6})]
    assert switched(given, {2048: "dp2"}).override.imports == [*given.override.imports, *FOR_FXPAR]
    assert stock(given).override.imports == [*given.override.imports, FOR_STOCK_ON_CPU]


def test_a_recipe_may_keep_its_attention():
    given = recipe()
    given.override.imports = ["my.overrides.attention"]
    kept = switched(given, {2048: "dp2"}, override_attention=False)
    assert kept.override.imports == given.override.imports


def test_the_saved_configuration_is_the_users(monkeypatch, tmp_path):
    """With the seed that was drawn for it; not the one device that torchtitan is shown."""
    given = to_fxpar(recipe(), strategies={2048: "dp2"})
    given.dump_folder, given.debug.save_config_file = str(tmp_path), "saved/config.json"
    trainer = object.__new__(FxparTrainer)
    trainer.is_hot, trainer.fxpar_given = True, given
    trainer.config = one_device(given, 2, lambda model, **_: model)
    trainer.config.debug.seed = 7
    monkeypatch.setattr(titan.dist_utils, "init_distributed", lambda *_, **__: 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    trainer.init_distributed()
    saved = tmp_path / "saved" / "config.json"
    found = json.loads(saved.read_text())
    assert found["training"]["local_batch_size"] == given.training.local_batch_size
    assert found["debug"]["seed"] == 7
    assert given.debug.seed is None
    saved.unlink()
    trainer.config.maybe_log()  # as torchtitan does next
    assert not saved.exists()


def test_converted_twice():
    hot = to_fxpar(to_fxpar(recipe(), strategies={2048: "dp2"}), strategies={256: "dp2", 2048: "tp2"})
    assert hot.fxpar.strategies == {256: "dp2", 2048: "tp2"}
    again = to_fxpar(to_fxpar(recipe(), strategies=None), strategies={2048: "dp2"})
    assert switched(again, {2048: "dp2"}).override.imports == list(FOR_FXPAR)
    assert stock(stock(recipe())).override.imports == [FOR_STOCK_ON_CPU]


@pytest.mark.parametrize("strategies", [None, {2048: "dp2"}])
def test_a_recipe_of_another_trainer_is_refused(strategies):
    """Its own fields and its own train_step would be lost without a word."""
    with pytest.raises(UnsupportedRecipeError, match=r"fault_tolerance"):
        to_fxpar(llama3_torchft_debugmodel(), strategies=strategies)
    with pytest.raises(UnsupportedRecipeError, match=r"FluxTrainer"):
        to_fxpar(titan.stock_recipe("flux", "flux_debugmodel"), strategies=strategies)


def test_parallelism_of_the_recipe_stays_as_given():
    """It says how many rows a step takes; the trainer runs none of it."""
    given = recipe("llama3_70b")
    given.activation_checkpoint = FullAC.Config()
    assert to_fxpar(given, strategies={8192: "tp8"}).parallelism is given.parallelism
    config = switched(given, {8192: "tp8"}, world=16)
    assert config.parallelism.tensor_parallel_degree == 1
    assert config.training.local_batch_size == 2 * given.training.local_batch_size


def test_an_unsupported_option_is_refused_when_converting():
    predicts_further = titan.stock_recipe("deepseek_v3", "deepseek_v3_debugmodel_mtp")
    with pytest.raises(UnsupportedRecipeError, match=r"model_spec: deepseek_v3 has mtp_layers"):
        to_fxpar(predicts_further, strategies={2048: "dp2"})
    assert to_fxpar(predicts_further, strategies=None).fxpar.strategies is None


def with_plan_file(plan: Plan, tmp_path: Path, **settings: object) -> Any:
    """A recipe with strategies, told a plan as on the command line."""
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    config = to_fxpar(recipe(), strategies={2048: "dp2"})
    config.fxpar = replace(config.fxpar, plan=str(tmp_path / "plan.toml"), **settings)
    return config


def test_a_plan_on_the_command_line_goes_before_the_strategies_of_the_recipe(plan, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("fxpar.recipes.plans.logger.warning", said.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = with_plan_file(plan, tmp_path)
    made = with_plan(config)
    assert made.fxpar.strategies == plan.strategies
    assert made.fxpar.token_budgets == plan.token_budgets
    assert int(made.fxpar.memory_budget_gib * 2**30) == plan.memory_budget_bytes
    assert config.fxpar.strategies == {2048: "dp2"}
    assert said[-1:] == [f"[fxpar] fxpar.strategies are not used: {config.fxpar.plan} says strategies"]
    check_recipe(made, made.fxpar, 2)
    plain = to_fxpar(recipe(), strategies={2048: "dp2"})
    assert with_plan(plain) is plain
    config.checkpoint.create_seed_checkpoint = True
    assert with_plan(config) is config


def test_the_trainer_takes_the_plan_of_the_command_line(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = []
    monkeypatch.setattr("fxpar.recipes.trainer.check_recipe", lambda config, settings, world: asked.append(settings))
    monkeypatch.setattr("fxpar.recipes.trainer.one_device", lambda *given: 1 / 0)  # far enough
    with pytest.raises(ZeroDivisionError):
        FxparTrainer(with_plan_file(plan, tmp_path))
    assert asked[0].strategies == plan.strategies


def test_a_plan_on_the_command_line_that_does_not_fit(plan, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedRecipeError, match="token_budget: the plan says it already"):
        with_plan(with_plan_file(plan, tmp_path, token_budget=64))
    with pytest.raises(PlanFileError, match="for llama with 7 parameters, and this model has 6,163,712"):
        with_plan(with_plan_file(replace(plan, parameters=7), tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanFileError, match="it is for 2 ranks, not 4"):
        with_plan(with_plan_file(plan, tmp_path))
