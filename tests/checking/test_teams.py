"""Strategies side by side give the gradients of a single device, whatever each of them is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import RuleHeadsError
from tests.captured import gpt, llama
from tests.checking.test_module_rules import assert_exact, ruled
from tests.repeat import examples

MODELS = {"llama": llama, "llama of two": lambda: llama(layers=2, heads=8, kv_heads=2), "gpt": gpt}
FORMATIONS = [
    ("cp2 | tp2+sp | dp1", "llama"),
    ("dp2+zero3 | cp2.tp2+zero2", "gpt"),
    ("tp2 > rows2 | pp2+zb_h1", "llama of two"),
    ("tp2+remat[*.attention: cp2] | dp1+chunks(2)", "llama"),
    ("rows2 | dp3", "llama"),
    ("ring2.tp2+zero3 | cp2.tp2+zero3", "llama"),
]
PIPELINES = ("pp2", "tp2 > dp1", "dp2.pp2+zero1", "pp2+gpipe")


@pytest.mark.parametrize(("formation", "model"), FORMATIONS)
def test_equals_one_device(formation, model):
    assert_exact(MODELS[model]().check(formation))


@settings(max_examples=examples(2))
@given(
    st.lists(st.one_of(ruled(["*.attention", "*.ffn"]), st.sampled_from(PIPELINES)), min_size=2, max_size=3),
    st.sampled_from([1, 2, 4]),
)
def test_any_teams(teams, kv_heads):
    try:
        result = llama(layers=2, heads=8, kv_heads=kv_heads, dim=32).check(" | ".join(teams))
    except RuleHeadsError:
        return
    assert_exact(result)
