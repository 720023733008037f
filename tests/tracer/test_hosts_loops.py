"""Types of transformers that loop over experts by themselves: captured numbers are those of their loops."""

from __future__ import annotations

import pytest

from fxpar.models import load
from tests.tracer.helpers import check, ops
from tests.tracer.host_models import tokens

# name -> products by expert in the forward of one layer: jetmoe's attention has experts too
PRODUCTS = {"dbrx": 3, "jetmoe": 4, "longcat_flash": 2}


@pytest.mark.parametrize("name", PRODUCTS)
def test_numbers_of_the_loop(name):
    layers = "num_layers" if name == "longcat_flash" else "num_hidden_layers"
    loaded = load(f"hf:{name}", dtype="float64", options={layers: "1"})
    forwards = [type(module).forward for module in loaded.model.modules()]
    graph = check(loaded.model.eval(), loaded.loss_fn, [tokens(16), tokens(23)], 1e-10)
    found = ops(graph)
    assert found.count("fxpar.expert_mm") == 2 * PRODUCTS[name]  # one more each for the gradient of its rows
    assert found.count("fxpar.expert_mm_backward") == PRODUCTS[name]
    assert [type(module).forward for module in loaded.model.modules()] == forwards
