"""In what order axes cut one dim: what cuts weights first, tokens the other way round, bins before all."""

from __future__ import annotations

import pytest
import torch

from fxpar.annotate.nesting import combine, together
from fxpar.ir.dist_config import DistConfig, P, R, Shard
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.ir.mesh import Mesh
from fxpar.rules.option import Option

MESH, T = Mesh((("cp", 2), ("tp", 2))), dim_symbol("T")
BOTH = {"cp": Shard(0), "tp": Shard(0)}


def pieces(shape, placements, roles, bins=()):
    """What ranks 0 to 3 hold of a dim of four."""
    meta = TensorMeta(shape, torch.float64)
    base = DistConfig.replicated(MESH, len(shape), torch.float64)
    found = combine(base, meta, placements, T, roles, bins)
    return [found.take(torch.arange(4), rank).tolist() for rank in range(4)]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({"cp": "cp", "tp": "tp"}, [[0], [2], [1], [3]]),  # tp cuts halves, cp each half
        ({"cp": "tp", "tp": "cp"}, [[0], [1], [2], [3]]),
        ({"cp": "tp", "tp": "tp"}, [[0], [1], [2], [3]]),  # two parts of one axis: the outer one first
        ({"cp": "rows", "tp": "cp"}, [[0], [2], [1], [3]]),
        (None, [[0], [1], [2], [3]]),  # as given, in the order of the search
    ],
)
def test_what_cuts_weights_cuts_first(roles, expected):
    assert pieces((4,), BOTH, roles) == expected


@pytest.mark.parametrize("roles", [None, {"cp": "tp", "tp": "cp"}, {"cp": "cp", "tp": "tp"}])
def test_a_piece_of_a_context_axis_is_a_run_of_tokens(roles):
    """Whatever the modules say: all of them must agree."""
    assert pieces((T,), BOTH, roles) == [[0], [1], [2], [3]]


def test_bins_are_cut_before_all():
    assert pieces((T,), BOTH, None, bins=("tp",)) == [[0], [2], [1], [3]]


def test_which_of_two_axes_cuts_first_matters_where_one_operand_is_cut_once():
    attention = {"tp": Option((Shard(2), Shard(2)), (Shard(2),)), "cp": Option((Shard(2), R), (Shard(2),))}
    product = {"tp": Option((R, Shard(1)), (Shard(1),)), "cp": Option((Shard(0), R), (Shard(0),))}
    terms = {"tp": Option((Shard(0), Shard(0)), (P,)), "cp": Option((Shard(0), Shard(0)), (P,))}
    assert [together(options, "tp", "cp") for options in (attention, product, terms)] == [False, True, True]
