"""The pipeline that adds fxpar's passes to graph_trainer's, and the recipes with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is an extra")

from fxpar.errors import PipelineNameError, UnsupportedRecipeError
from fxpar.lowering import default_passes
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.recipes import debug
from fxpar.recipes import graph_trainer as recipes
from fxpar.recipes import graph_trainer_api as host


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    before = dict(host.PASS_PIPELINE_REGISTRY)
    monkeypatch.setattr(debug, "hf_assets", lambda: "assets")
    yield host.PASS_PIPELINE_REGISTRY
    host.PASS_PIPELINE_REGISTRY.clear()
    host.PASS_PIPELINE_REGISTRY.update(before)


def test_registering(registry):
    pipeline = recipes.register_pipeline("mine", ("sink_waits", BucketCollectives(8.0)))
    assert registry["mine"] is pipeline
    assert [step.name for step in pipeline.passes] == ["sink_waits", "bucket_collectives"]
    recipes.register_pipeline("mine", ("sink_waits", BucketCollectives(8.0)))
    with pytest.raises(PipelineNameError, match=r"'mine' already \(fxpar passes sink_waits, bucket_collectives\)"):
        recipes.register_pipeline("mine", ("sink_waits",))
    registry["theirs"] = default_passes
    with pytest.raises(PipelineNameError, match=r"fxpar\.lowering\.ladder\.default_passes"):
        recipes.register_pipeline("theirs")
    with pytest.raises(PipelineNameError, match="torchtitan's own"):
        recipes.register_pipeline("default")


def test_recipes_and_order_of_the_pipeline(registry):
    default, ours = recipes.debug_default_passes(), recipes.debug_fxpar_passes()
    assert (default.compile.pass_pipeline, ours.compile.pass_pipeline) == ("default", "fxpar")
    both = [dataclasses.replace(c, compile=dataclasses.replace(c.compile, pass_pipeline="")) for c in (default, ours)]
    assert both[0].training == both[1].training
    assert both[0].compile == both[1].compile
    result = SimpleNamespace(state_fqns=[], num_static_inputs=0, tensor_input_indices=[])
    ours.compile.disable_passes = []  # as on a GPU
    names = [recipes._name(step) for step in registry["fxpar"](result, ours)]
    cut = names.index("annotate_flex_attention_for_regional_inductor_pass")
    assert names[cut - 4 : cut] == list(recipes.DEFAULT_PASSES)
    assert names[0] == "eliminate_dead_code_pass"
    assert names[-1] == "cudagraph_pass"


@pytest.mark.parametrize(
    ("option", "value"), [("inductor_compilation", "full"), ("precompile_artifact_dir", "somewhere")]
)
def test_options_that_do_not_go_together(registry, option, value):
    recipe = recipes.debug_default_passes()
    setattr(recipe.compile, option, value)
    with pytest.raises(UnsupportedRecipeError, match=rf"compile\.{option}"):
        recipes.with_fxpar_passes(recipe)
    if value == "full":
        assert recipes.with_fxpar_passes(recipe, ("sink_waits",), name="late").compile.pass_pipeline == "late"


def test_only_this_recipe_imports_graph_trainer():
    """It needs triton and takes seconds: other recipes must not."""
    importing: dict[str, set[str]] = {}
    for path in sorted(Path(recipes.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in ("torchtitan.experiments", "graph_trainer_api", "graph_trainer", "passes_in", "passes_out"):
            if re.search(
                rf"^\s*(from|import) [\w.]*\b{re.escape(name)}\b|import (\w+, )*{re.escape(name)}\b", text, re.M
            ):
                importing.setdefault(name, set()).add(path.stem)
    assert importing == {
        "torchtitan.experiments": {"graph_trainer_api"},
        "graph_trainer_api": {"graph_trainer"},
        "graph_trainer": {"graph_trainer_api"},  # torchtitan's
        "passes_in": {"graph_trainer"},
        "passes_out": {"graph_trainer"},
    }
