"""Random switches for a few real ranks; their tensors share a flat buffer or stand on their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import DistConfig
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.transport.holding import copy_of, local_runs
from tests.placements import configs, placed_mesh

WORLD = 4
SHAPES = ((), (1,), (5,), (8,), (12,), (4, 6), (7, 3), (12, 8), (2, 6, 4))
DEGREES = ((1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1))


@dataclass(frozen=True)
class Case:
    """A switch on WORLD ranks; `flat` says for sources and target whether the tensors share one buffer per dtype."""

    sources: tuple[ParamLayout, ...]
    target: ParamLayout
    cluster: ClusterSpec
    source_dtypes: tuple[torch.dtype, ...]
    flat: tuple[bool, ...]
    padded: tuple[bool, ...]


@st.composite
def copies_of(draw, shape: tuple[int, ...]) -> tuple[DistConfig, ...]:
    """One copy, or two side by side, each on a random mesh."""
    copies, first = [], draw(st.sampled_from((0, 0, 0, 1)))
    for _ in range(draw(st.integers(1, 2))):
        fitting = [degrees for degrees in DEGREES if first + int(torch.tensor(degrees).prod()) <= WORLD]
        if not fitting:
            break
        degrees = draw(st.sampled_from(fitting))
        names = draw(st.permutations(("dp", "cp", "tp")))[: len(degrees)]
        mesh = draw(placed_mesh(tuple(zip(names, degrees, strict=True)), WORLD - first))
        mesh = replace(mesh, offset=first + mesh.offset)
        copies.append(draw(configs(mesh, shape, partial=False)))
        first = max(mesh.ranks) + 1
    return tuple(copies)


@st.composite
def cases(draw, holders: bool = True, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> Case:
    kinds = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    repeats = draw(st.integers(1, 4))
    count = draw(st.integers(2, 3)) if holders else 2
    kind_dtypes = [draw(st.sampled_from(dtypes)) for _ in kinds]
    layouts = []
    for number in range(count):
        placed = [
            PlacedParam(shape, dtype, draw(copies_of(shape))) for shape, dtype in zip(kinds, kind_dtypes, strict=True)
        ]
        params = {f"{layer}.{kind}": param for layer in range(repeats) for kind, param in enumerate(placed)}
        layouts.append(ParamLayout(f"layout {number}", WORLD, params))
    cluster = ClusterSpec(WORLD, 1, 200, 25, 10)
    if draw(st.booleans()):
        cluster = ClusterSpec(2, 2, 200, 25, 10)
    return Case(
        (layouts[0], *layouts[2:]),
        layouts[1],
        cluster,
        tuple(draw(st.sampled_from((torch.float32, torch.bfloat16))) for _ in range(count - 1)),
        tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
    )


def drawn(strategy: st.SearchStrategy, count: int) -> list:
    """`count` examples, always the same: they are drawn before ranks are forked."""
    found: list = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(example: object) -> None:
        found.append(example)

    collect()
    return found


def whole_tensors(layout: ParamLayout) -> dict[str, Tensor]:
    """Different numbers, exact in bfloat16 within a tensor of up to 256 elements."""
    tensors = {}
    for number, (fqn, param) in enumerate(layout.params.items()):
        count = int(torch.tensor(param.shape, dtype=torch.long).prod())
        tensors[fqn] = (torch.arange(count, dtype=torch.float32) + 1 + number).reshape(param.shape)
    return tensors


def local_tensors(
    layout: ParamLayout, whole: dict[str, Tensor] | None, rank: int, dtype: torch.dtype | None, flat: bool, padded: bool
) -> dict[str, Tensor]:
    """What `rank` holds: cut out of `whole`, or zeros; in one buffer per dtype with `flat`."""
    pieces = {}
    for fqn, param in layout.params.items():
        dist = copy_of(layout, fqn, rank)
        if dist is None:
            continue
        full = whole[fqn] if whole is not None else torch.zeros(param.shape)
        piece = dist.take(full, rank).to(dtype or param.dtype)
        if not padded:
            for d, runs in enumerate(local_runs(layout, fqn, rank) or []):
                piece = piece.narrow(d, 0, sum(run[2] for run in runs))
        pieces[fqn] = piece.contiguous()
    return in_one_buffer(pieces) if flat else pieces


def in_one_buffer(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as views of one buffer per dtype, a little apart."""
    found = {}
    for dtype in {piece.dtype for piece in pieces.values()}:
        mine = {fqn: piece for fqn, piece in pieces.items() if piece.dtype == dtype}
        buffer = torch.zeros(sum(piece.numel() + 3 for piece in mine.values()), dtype=dtype)
        start = 0
        for fqn, piece in mine.items():
            view = buffer[start : start + piece.numel()].view(piece.shape)
            found[fqn] = view.copy_(piece)
            start += piece.numel() + 3
    return found


def in_dtype(layout: ParamLayout, dtype: torch.dtype) -> ParamLayout:
    return replace(layout, params={fqn: replace(p, dtype=dtype) for fqn, p in layout.params.items()})
