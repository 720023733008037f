"""Stand-ins for executable graphs that only say how parameters and gradients lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Stored
from fxpar.ir.graph import Input, Output, TensorMeta
from fxpar.ir.strategy import Strategy
from tests.placements import configs

Placed = dict[str, tuple[tuple[int, ...], DistConfig]]
SHAPES = ((), (5,), (8,), (4, 6), (7, 3), (12, 8), (2, 6, 4))


def program(strategy: str, placed: Placed, dtype: torch.dtype = torch.float32) -> Any:
    """`placed` maps FQNs to global shape and placement."""
    metas = {fqn: TensorMeta(shape, dtype) for fqn, (shape, _) in placed.items()}
    stored = tuple(Stored(metas[fqn], dist) for fqn, (_, dist) in placed.items())
    made = SimpleNamespace(
        strategy=Strategy.parse(strategy),
        inputs=tuple(Input("param", fqn, meta, True) for fqn, meta in metas.items()),
        outputs=tuple(Output("grad", fqn) for fqn in placed),
        stored_inputs=stored,
        stored_outputs=stored,
    )
    made.mesh, made.placed = made.strategy.mesh, (made,)
    return made


@st.composite
def several_programs(draw, world_of: tuple[str, ...] = ("dp2.tp2", "tp4", "cp4", "dp4")) -> dict[str, Any]:
    """Two to four programs on 4 ranks with the same parameters in random layouts."""
    names = draw(st.lists(st.sampled_from(world_of), min_size=2, max_size=4, unique=True))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
    made = {}
    for name in names:
        mesh = Strategy.parse(name).mesh
        placed = {f"p{i}": (shape, draw(configs(mesh, shape, partial=False))) for i, shape in enumerate(shapes)}
        made[name] = program(name, placed)
    return made
