"""Chains of equal layers, found in the graph."""

from __future__ import annotations

import pytest

from fxpar.tasks.layers import Forward, around, chains
from tests.tasks.towers import step


@pytest.fixture(scope="module")
def caption() -> Forward:
    return step("caption").forward


def test_names_without_numbers_are_a_chain_and_a_wider_layer_is_none(caption):
    assert (("image.alpha",), ("image.beta",), ("image.gamma",)) in chains(caption)


def test_layers_that_take_turns_are_one_layer_together(caption):
    assert (("layers.0", "layers.1"), ("layers.2", "layers.3"), ("layers.4", "layers.5")) in chains(caption)


def test_a_layer_that_others_read_too_ends_its_chain():
    found = chains(step("tapped").forward)
    assert (("image.alpha",), ("image.beta",)) in found
    assert (("image.gamma",),) in found


def test_looks_do_not_tell_weights_but_sizes(caption):
    assert caption.looks("image.alpha") == caption.looks("image.beta")
    assert caption.looks("image.alpha") != caption.looks("image.delta")
    assert caption.looks("layers.0") != caption.looks("image.alpha")  # other tokens


def test_parameters_that_are_read_as_views_count(caption):
    names = ("down.bias", "down.weight", "norm.bias", "norm.weight", "up.bias", "up.weight")
    assert sorted(caption.params(["layers.0"])) == [f"layers.0.{name}" for name in names]


def test_modules_around():
    assert around("a.b") == ["", "a", "a.b"]
    assert around("") == [""]
