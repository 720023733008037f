"""Names with numbers in them."""

from __future__ import annotations

import pytest

from fxpar.ir.fqn import block_of, block_or_module_of, numbers_in, starred, with_numbers


@pytest.mark.parametrize(
    ("fqn", "star", "block", "place"),
    [
        ("model.layers.7.mlp.up.weight", "model.layers.*.mlp.up.weight", "model.layers.7", "model.layers.7"),
        ("layers.3.experts.1.up", "layers.*.experts.*.up", "layers.3", "layers.3"),
        ("layers.12", "layers.*", "layers.12", "layers.12"),
        ("head.weight", "head.weight", "", "head"),
        ("conv1.weight", "conv1.weight", "", "conv1"),
        ("stage2.block3x.weight", "stage2.block3x.weight", "", "stage2.block3x"),
        ("0.weight", "0.weight", "0", "0"),  # of a root that is a list: its members have each their own name
        ("10.attention.q.weight", "10.attention.q.weight", "10", "10"),
        ("weight", "weight", "", ""),
        ("", "", "", ""),
    ],
)
def test_names(fqn, star, block, place):
    assert starred(fqn) == star
    assert block_of(fqn) == block
    assert block_or_module_of(fqn) == place
    assert with_numbers(fqn, numbers_in(fqn)) == fqn


def test_other_numbers():
    assert numbers_in("a.1.b.22") == ["1", "22"]
    assert with_numbers("a.1.b.22", ["0-3", "5"]) == "a.0-3.b.5"
