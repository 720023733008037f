"""Blocks by FQN, and lists of them as people write them."""

from __future__ import annotations

import pytest

from fxpar.graph_diff.modules import part_of, ranges


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("model.layers.12.mlp.up", "model.layers.12"),
        ("layers.0", "layers.0"),
        ("model.norm", "model.norm"),
        ("", "(root)"),
    ],
)
def test_part_of(fqn, block):
    assert part_of(fqn) == block


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (["layers.0"], "layers.0"),
        ([f"model.layers.{i}" for i in reversed(range(12))], "model.layers.0 .. 11"),
        (["layers.0", "layers.2", "layers.3", "norm"], "layers.0, layers.2 .. 3, norm"),
        (["0", "1", "a.0"], "0 .. 1, a.0"),
        (["norm", "head"], "norm, head"),
    ],
)
def test_ranges(blocks, text):
    assert ranges(blocks) == text
