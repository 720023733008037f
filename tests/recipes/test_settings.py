"""Every setting of torchtitan's trainer has a row, and none that does nothing is set without a word."""

from __future__ import annotations

import fnmatch
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC

from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import REFUSALS
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.settings import SECTIONS, SETTINGS, Verdict, options, setting_of, table, unheard
from fxpar.recipes.trainer import FxparTrainer


def recipe(**sections: dict[str, Any]) -> Any:
    config = to_fxpar(titan.stock_recipe("llama3", "llama3_debugmodel"), strategies={2048: "dp2+remat"})
    for section, given in sections.items():
        setattr(config, section, replace(getattr(config, section), **given))
    return config


def test_every_setting_has_a_row_and_every_row_a_setting():
    names = [option for option, _, _ in options(FxparTrainer.Config())]
    assert {name.partition(".")[0] for name in names} == {f.name for f in fields(FxparTrainer.Config)}
    assert [name for name in names if setting_of(name) is None] == []
    used = {row.option for name in names if (row := setting_of(name)) is not None}
    assert used == {row.option for row in SETTINGS}
    assert {row.verdict for row in SETTINGS} == {*get_args(Verdict)}
    assert all(f"| `{row.option}` | {row.verdict} |" in table() for row in SETTINGS[:-1])


def test_what_is_refused_is_refused_by_name():
    rows = {row.option for row in SETTINGS if row.verdict == "refused"} - {"debug.batch_invariant"}
    refused = {r.option for r in REFUSALS}
    assert rows <= refused
    assert {option for option in refused - rows if option.partition(".")[0] in SECTIONS} == set()


def test_shipped_recipes_say_nothing():
    assert unheard(recipe()) == []


@pytest.mark.parametrize(
    ("section", "given", "said"),
    [
        ("parallelism", {"tensor_parallel_degree": 2}, "has no effect: `fxpar.strategies`; they only say"),
        ("parallelism", {"fsdp_reshard_after_forward": "never"}, "has no effect: `+zero2` keeps weights whole"),
        ("debug", {"detect_anomaly": True}, "debug.detect_anomaly=True has no effect: no autograd runs in a step"),
        ("comm", {"train_timeout_seconds": 7}, "comm.train_timeout_seconds=7 has no effect: a silent rank is named"),
        (
            "compile",
            {"enable": True, "enable_async_tensor_parallel": True},
            "compile.enable_async_tensor_parallel=True has no effect",
        ),
    ],
)
def test_what_has_no_effect_is_named(section, given, said):
    (line,) = unheard(recipe(**{section: given}))
    assert said in line


def test_settings_of_a_parallelism_that_is_not_used():
    """torchtitan does not look at them either."""
    given = {
        "pipeline_parallel_schedule": "GPipe",
        "pipeline_parallel_layers_per_stage": 2,
        "enable_sequence_parallel": False,
        "context_parallel_load_balancer": None,
    }
    assert unheard(recipe(parallelism=given)) == []
    degrees = {f"{name}_parallel_degree": 2 for name in ("pipeline", "tensor", "context")}
    lines = unheard(recipe(parallelism=given | degrees))
    assert {line.partition("=")[0].removeprefix("parallelism.") for line in lines} == {*given, *degrees}


def test_recomputation_is_named_where_a_strategy_has_none():
    config = recipe()
    config.activation_checkpoint = FullAC.Config()
    assert unheard(config) == []
    config.fxpar.strategies = {512: "dp2", 1024: "tp2+remat", 2048: "tp2"}
    (line,) = unheard(config)
    assert line.startswith("activation_checkpoint (FullAC) has no effect: dp2, tp2 keep all activations; add +remat")
    config.activation_checkpoint = None
    assert unheard(config) == []


def test_functions_of_ones_own_that_are_not_called():
    config = recipe()
    config.model_spec = replace(config.model_spec, parallelize_fn=lambda model, **_: model)
    (line,) = unheard(config)
    assert line.startswith("model_spec.parallelize_fn is your own and is not called")


def test_a_setting_that_fxpar_does_not_know(monkeypatch):
    rows = tuple(row for row in SETTINGS if not fnmatch.fnmatchcase("training.gc_freq", row.option))
    monkeypatch.setattr("fxpar.recipes.settings.SETTINGS", rows)
    assert unheard(recipe()) == []
    (line,) = unheard(recipe(training={"gc_freq": 3}))
    assert line == "training.gc_freq=3 is unknown to fxpar: whether it has an effect is not known"
