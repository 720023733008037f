"""The home layout and its rules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpar.errors import HomeLayoutError, ParamDtypeError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.graph import Input, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.store import ParamSpec, home_layout, specs_of
from fxpar.switch import PlacedParam

GRID = Mesh((("a", 2), ("b", 2)))
SPECS = [
    ParamSpec("embed.weight", (10, 4), torch.bfloat16),
    ParamSpec("layers.0.norm.weight", (4,), torch.float32),
    ParamSpec("layers.0.up.weight", (8, 4), torch.float64),
    ParamSpec("temperature", (), torch.float16),
    ParamSpec("steps", (3,), torch.int64),
]


def _real(param: PlacedParam, rank: int) -> tuple[int, ...]:
    return param.copies[0].real_shape(rank, param.shape)


def test_dim_0_is_cut_over_all_ranks_and_masters_are_at_least_fp32():
    home = home_layout(SPECS, 4)
    dtypes = [param.dtype for param in home.params.values()]
    assert dtypes == [torch.float32, torch.float32, torch.float64, torch.float32, torch.int64]
    assert [_real(home.params["embed.weight"], rank) for rank in range(4)] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert [_real(home.params["steps"], rank) for rank in range(4)] == [(1,), (1,), (1,), (0,)]
    assert [_real(home.params["temperature"], rank) for rank in range(4)] == [()] * 4


def test_programs_have_their_own_parameters_and_one_dtype_of_each():
    def program(*specs: ParamSpec) -> Any:
        infos = [Input("param", spec.fqn, TensorMeta(spec.shape, spec.dtype)) for spec in specs]
        return SimpleNamespace(params=lambda: [(info, SimpleNamespace(meta=info.meta)) for info in infos])

    text, image = program(SPECS[0], SPECS[1]), program(SPECS[2], SPECS[0])
    others = [Input("param", spec.fqn, TensorMeta(spec.shape, spec.dtype)) for spec in SPECS[:4]]
    assert specs_of([text, image], others) == [SPECS[0], SPECS[1], SPECS[2], SPECS[3]]
    wide = program(replace(SPECS[0], dtype=torch.float32))
    with pytest.raises(ParamDtypeError, match=r"computes with embed.weight in torch.bfloat16, another one in torch.fl"):
        specs_of([text, wide])


def test_pieces_are_those_of_dtensor():
    home = home_layout(SPECS, 4)
    for fqn in ("embed.weight", "steps", "layers.0.norm.weight"):
        param = home.params[fqn]
        chunks = torch.chunk(torch.arange(param.shape[0]), 4)
        for rank in range(4):
            have = param.copies[0].intervals(rank, 0, param.shape[0])
            want = chunks[rank] if rank < len(chunks) else torch.empty(0)
            assert sum(length for _, _, length in have) == len(want)
            assert not have or have[0][1] == int(want[0])


def test_rules_choose_by_glob_and_the_first_wins():
    nested = DistConfig(GRID, ((AxisShard("a"), AxisShard("b")), ()))
    home = home_layout(SPECS, 4, {"*.norm.*": "R", "layers.*.up.weight": nested, "embed*": "S(1)", "*.weight": "S(0)"})
    assert not home.params["layers.0.norm.weight"].copies[0].shard_axes
    assert home.params["layers.0.up.weight"].copies[0] == nested
    assert _real(home.params["embed.weight"], 0) == (10, 1)


@pytest.mark.parametrize(
    ("pattern", "rule", "why"),
    [
        ("zzz.*", "R", "matches no parameter. Globs run over names"),
        ("embd.weight", "R", r"did you mean 'embed\.weight'\?"),
        ("*.upp.weight", "R", r"did you mean '\*\.up\.weight'\?"),
        ("embed.weight", "S(2)", "does not have"),
        ("embed.weight", "tp", "is not a placement"),
        ("embed.weight", DistConfig(Mesh((("a", 2),)), ((), ())), "2 ranks"),
        ("embed.weight", DistConfig(Mesh((("a", 4),)), ((AxisShard("a", (1, 1)),), ())), "strided"),
        (
            "embed.weight",
            DistConfig(GRID, ((AxisShard("a"), AxisShard("b")), ())),
            "does not divide",
        ),
        ("layers.0.up.weight", DistConfig(GRID, ((AxisShard("b"), AxisShard("a")), ())), "order"),
    ],
)
def test_bad_rules_name_the_rule(pattern, rule, why):
    with pytest.raises(HomeLayoutError, match=why) as caught:
        home_layout(SPECS, 4, {pattern: rule})
    assert repr(pattern) in str(caught.value)
