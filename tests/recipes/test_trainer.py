"""Trainers of the user's own: their settings stay, and what they do in a step is called or refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import pytest

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import NOT_CALLED, REPLACED, check_trainer
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.settings import unheard
from fxpar.recipes.trainer import FxparConfig, FxparMixin, FxparTrainer, one_device

STRATEGIES = {2048: "dp2+remat"}


class Theirs(titan.Trainer):
    """A trainer that knows nothing of fxpar."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        note: str = "none"
        """What to write in the log."""


class Mixed(FxparMixin, Theirs):
    """Theirs, with fxpar."""


class Mine(FxparMixin, titan.Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        target_loss: float = 0.0


class Later(Mine):
    """A class of a class with the mixin."""


def recipe() -> Any:
    return titan.stock_recipe("llama3", "llama3_debugmodel")


def their_recipe() -> Any:
    given = recipe()
    return Theirs.Config(**{f.name: getattr(given, f.name) for f in fields(given)}, note="theirs")


@pytest.mark.parametrize("trainer", [Mixed, Mine, Later, FxparTrainer])
def test_a_recipe_of_the_trainer(trainer):
    config = to_fxpar(recipe(), trainer=trainer, strategies=STRATEGIES, merge=False)
    assert type(config) is trainer.Config
    assert type(config)._owner is trainer
    assert type(config).__qualname__ == f"{trainer.__name__}.Config"
    assert config.fxpar == FxparConfig(strategies=STRATEGIES, merge=False)
    assert config.training == recipe().training
    again = to_fxpar(config, strategies=None)
    assert type(again) is trainer.Config
    assert again.fxpar == FxparConfig()
    shown = one_device(config, 2, lambda model, **_: model)
    assert type(shown) is type(config)


def test_settings_of_ones_own_stay():
    config = to_fxpar(their_recipe(), trainer=Mixed, strategies=STRATEGIES)
    assert config.note == "theirs"
    assert one_device(config, 2, lambda model, **_: model).note == "theirs"
    assert replace(config, note="mine").note == "mine"
    assert unheard(config) == []  # what they do is not for fxpar to say


def test_on_the_command_line(monkeypatch, capsys):
    module = ModuleType("own_recipes")
    module.mixed = lambda: to_fxpar(their_recipe(), trainer=Mixed, strategies=STRATEGIES)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_recipes", module)
    manager = titan.config_manager.ConfigManager()
    start = ["--module", "own_recipes", "--config", "mixed"]
    config = manager.parse_args([*start, "--note", "typed", "--fxpar.strategies", "2048", "tp2", "--fxpar.no-merge"])
    assert type(config) is Mixed.Config
    assert (config.note, config.fxpar) == ("typed", FxparConfig(strategies={2048: "tp2"}, merge=False))
    with pytest.raises(SystemExit):
        manager.parse_args([*start, "--help"])
    said = capsys.readouterr().out
    assert "What to write in the log" in said
    assert "Strategy of each length group" in " ".join(said.replace("│", " ").split())


def test_a_trainer_without_the_mixin_is_refused_with_what_to_write():
    with pytest.raises(UnsupportedRecipeError) as error:
        to_fxpar(their_recipe(), strategies=STRATEGIES)
    assert "option note: the recipe is made for Theirs, not for torchtitan's Trainer." in str(error.value)
    assert str(error.value).endswith("or write class Mine(FxparMixin, Theirs), and trainer=Mine")
    with pytest.raises(UnsupportedRecipeError, match=r"note: the recipe is made for Theirs, not for Mine\. Use"):
        to_fxpar(their_recipe(), trainer=Mine, strategies=STRATEGIES)
    for other in (Theirs, FxparMixin):
        said = rf"trainer: {other.__name__} is not a trainer made with FxparMixin\. Write class Mine"
        with pytest.raises(UnsupportedRecipeError, match=said):
            to_fxpar(their_recipe(), trainer=other, strategies=STRATEGIES)  # type: ignore[arg-type]


def with_method(name: str, *bases: type) -> Any:
    return type("Own", bases, {name: lambda self, *args, **given: None})


@pytest.mark.parametrize("name", [*NOT_CALLED, *REPLACED])
def test_a_part_of_the_step_that_nobody_would_call(name):
    assert hasattr(titan.Trainer, name)  # torchtitan has not renamed it
    behind = type("Behind", (FxparMixin, with_method(name, titan.Trainer)), {})
    with pytest.raises(UnsupportedRecipeError, match=rf"trainer \(Behind\): Own has a {name} of its own, which"):
        to_fxpar(recipe(), trainer=behind, strategies=STRATEGIES)
    assert type(to_fxpar(recipe(), trainer=behind, strategies=None)) is behind.Config  # torchtitan calls it
    in_front = with_method(name, FxparMixin, titan.Trainer)
    if name in REPLACED:
        assert type(to_fxpar(recipe(), trainer=in_front, strategies=STRATEGIES)) is in_front.Config
    else:
        with pytest.raises(UnsupportedRecipeError, match=name):
            to_fxpar(recipe(), trainer=in_front, strategies=STRATEGIES)


def test_a_trainer_is_checked_before_it_starts(monkeypatch):
    """Strategies may come from the command line."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    behind = type("Behind", (FxparMixin, with_method("post_dataloading_process", titan.Trainer)), {})
    config = to_fxpar(recipe(), trainer=behind, strategies=None)
    config.fxpar = FxparConfig(strategies=STRATEGIES)
    with pytest.raises(UnsupportedRecipeError, match="post_dataloading_process"):
        config.build()


@pytest.mark.parametrize("trainer", [Mixed, Mine, Later, FxparTrainer])
def test_trainers_with_nothing_of_the_kind(trainer):
    check_trainer(trainer, FxparMixin)
