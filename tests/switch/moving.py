"""Random layouts, and ranks that carry out a plan on real tensors, without a process group."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import ParamLayout, PlacedParam, SwitchPlan
from tests.placements import configs, placed_mesh

NOTHING = -1.0
SHAPES = ((), (1,), (5,), (8,), (12,), (4, 6), (7, 3), (12, 8), (2, 6, 4))


@st.composite
def copies_of(draw, world: int, shape: tuple[int, ...]) -> tuple[DistConfig, ...]:
    """One or two copies of a tensor, each on a random mesh."""
    copies = []
    for _ in range(draw(st.integers(1, 2))):
        degrees = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]))
        names = draw(st.permutations(("dp", "cp", "tp")))[: len(degrees)]
        mesh = draw(placed_mesh(tuple(zip(names, degrees, strict=True)), world))
        copies.append(draw(configs(mesh, shape, partial=False)))
    return tuple(copies)


@st.composite
def switches(draw, extra: bool = False) -> tuple[list[ParamLayout], ParamLayout, ClusterSpec]:
    """Sources (the second one further holders), a target, and a cluster whose last node may not be full."""
    world = draw(st.integers(8, 13))
    # Repeated shapes with repeated layouts make classes of several tensors.
    kinds = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    repeats = draw(st.integers(1, 3))
    layouts = []
    for number in range(3 if extra else 2):
        placed = [PlacedParam(shape, torch.float64, draw(copies_of(world, shape))) for shape in kinds]
        params = {f"{layer}.{kind}": param for layer in range(repeats) for kind, param in enumerate(placed)}
        layouts.append(ParamLayout(f"layout {number}", world, params))
    devices = draw(st.sampled_from((1, 2, 3, 4, 16)))
    cluster = ClusterSpec(-(-world // devices), devices, 200, 25, 10)
    return [layouts[0], *layouts[2:]], layouts[1], cluster


def whole_tensors(layout: ParamLayout) -> dict[str, Tensor]:
    """Different numbers everywhere, all > NOTHING."""
    tensors, start = {}, 0
    for fqn, param in layout.params.items():
        count = int(torch.tensor(param.shape).prod()) if param.shape else 1
        tensors[fqn] = torch.arange(start, start + count, dtype=torch.float64).reshape(param.shape)
        start += count
    return tensors


def state_of(layout: ParamLayout, whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Per rank and tensor: the whole shape, NOTHING where the rank holds nothing. By DistConfig.take and put alone."""
    empty = {fqn: torch.full(param.shape, NOTHING, dtype=torch.float64) for fqn, param in layout.params.items()}
    state = [{fqn: tensor.clone() for fqn, tensor in empty.items()} for _ in range(layout.world)]
    for fqn, param in layout.params.items():
        for dist in param.copies:
            for rank in dist.mesh.ranks:
                dist.put(state[rank][fqn], dist.take(whole[fqn], rank), rank)
    return state


def carry_out(plan: SwitchPlan, sources: list[ParamLayout], whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What every rank holds of the target after the plan; asserts that nothing is written twice."""
    has = [{fqn: t.clone() for fqn, t in tensors.items()} for tensors in state_of(sources[0], whole)]
    for layout in sources[1:]:
        for mine, more in zip(has, state_of(layout, whole), strict=True):
            for fqn, tensor in more.items():
                mine[fqn] = torch.maximum(mine[fqn], tensor)
    target = [{fqn: torch.full_like(t, NOTHING) for fqn, t in tensors.items()} for tensors in has]

    def write(rank: int, fqn: str, index: tuple[slice, ...], piece: Tensor) -> None:
        assert (target[rank][fqn][index] == NOTHING).all(), "written twice"
        target[rank][fqn][index] = piece

    for rank in range(plan.problem.world):
        for move in plan.copies(rank):
            index = tuple(slice(*ends) for ends in move.box)
            write(rank, move.fqn, index, has[rank][move.fqn][index])
    moves = list(plan.moves())
    for step in range(plan.steps):
        arrived = []
        for move in (move for move in moves if move.step == step):
            index = tuple(slice(*ends) for ends in move.box)
            piece = has[move.src][move.fqn][index].clone()
            assert piece.numel() * 8 == move.nbytes
            write(move.dst, move.fqn, index, piece)
            arrived.append((move.dst, move.fqn, index, piece))
        for rank, fqn, index, piece in arrived:  # what a step brought can be sent on in the next one
            has[rank][fqn][index] = piece
    return target


def simple_layout(name: str, text: str, shape: tuple[int, ...] = (8, 4), tensors: int = 3) -> ParamLayout:
    """`tensors` equal tensors by a text such as "dp2.tp4@0" (dim 0 cut by tp) or "dp8" (replicated)."""
    axes, _, dim = text.partition("@")
    mesh = Mesh(tuple((part[:2], int(part[2:])) for part in axes.split(".")))
    dims = [(AxisShard("tp"),) if dim and int(dim) == d else () for d in range(len(shape))]
    param = PlacedParam(shape, torch.bfloat16, (DistConfig(mesh, tuple(dims)),))
    return ParamLayout(name, mesh.size, {f"layers.{i}.weight": param for i in range(tensors)})
