"""Random meshes and placements, and an oracle that cuts one element at a time."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from fxpar.ir.dist_config import AxisShard, DistConfig, chunk
from fxpar.ir.mesh import Mesh, sub_axis

NAMES = ("dp", "cp", "tp")
SECTIONS = ((), (), (1, 1), (1, 1, 1), (2, 1), (1, 2, 1))
OPS = ("sum", "avg", "max")


@st.composite
def meshes(draw, axes: tuple[int, int] = (1, 3), largest: int = 12) -> Mesh:
    """`axes` bounds their number, `largest` the number of ranks."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(*axes))]
    degrees: list[int] = []
    for _ in names:
        degrees.append(draw(st.integers(1, min(4, largest // math.prod(degrees)))))
    return Mesh(tuple(zip(names, degrees, strict=True)))


@st.composite
def parts(draw, mesh: Mesh) -> list[str]:
    """The axes of a mesh, some of them as their two sub-axes."""
    names: list[str] = []
    for name, degree in mesh.axes:
        outer = draw(st.sampled_from([d for d in range(1, degree + 1) if degree % d == 0]))
        halves = [sub_axis(name, 1, outer), sub_axis(name, outer, degree // outer)]
        names += halves if 1 < outer < degree else [name]
    return names


@st.composite
def digits(draw, axes: tuple[tuple[str, int], ...]) -> Mesh:
    """A mesh of these axes without gaps, of which some stand in two places."""
    found = []
    for name, degree in axes:
        outer = draw(st.sampled_from([d for d in range(1, degree + 1) if degree % d == 0]))
        found += [(name, outer), (name, degree // outer)]
    return Mesh(axes, digits=tuple(draw(st.permutations(found))))


@st.composite
def placed_mesh(draw, axes: tuple[tuple[str, int], ...], world: int) -> Mesh:
    """A mesh of these axes somewhere among `world` ranks: the axes nest in any order, with gaps where there is room."""
    strides, extent = {}, 1
    for name, degree in draw(st.permutations(axes)):
        gap = draw(st.sampled_from((0, 0, 0, 1)))
        strides[name] = extent + (gap if (degree - 1) * (extent + gap) + extent <= world else 0)
        extent += (degree - 1) * strides[name]
    stretched = Mesh(axes, 0, tuple(strides[name] for name, _ in axes))
    drawn = draw(st.sampled_from([stretched, draw(digits(axes))]))
    mesh = drawn if max(drawn.ranks) < world else Mesh(axes)
    return replace(mesh, offset=draw(st.integers(0, world - 1 - max(mesh.ranks))))


def moved(dist: DistConfig, first: int) -> DistConfig:
    """The same placement on ranks from `first` on."""
    return replace(dist, mesh=replace(dist.mesh, offset=first))


@st.composite
def nestings(draw, mesh: Mesh, shape: tuple[int, ...], free: list[str]) -> tuple[tuple[AxisShard, ...], ...]:
    """Cuts of every dim by axes of `free` (those that are used are removed from it), joint axes among them."""
    dims: list[list[AxisShard]] = [[] for _ in shape]
    sizes = list(shape)
    while free and shape and draw(st.integers(0, 3)):
        d = draw(st.integers(0, len(shape) - 1))
        count = draw(st.integers(1, min(2, len(free))))
        axis = ".".join(mesh.in_order(free[:count]))
        degree = mesh.degree(axis)
        legal = [s for s in SECTIONS if chunk(sizes[d], degree, s)]
        if sizes[d] < degree or not legal:
            break
        entry = AxisShard(axis, draw(st.sampled_from(legal)))
        del free[:count]
        dims[d].append(entry)
        sizes[d] = chunk(sizes[d], degree, entry.sections)
    return tuple(map(tuple, dims))


@st.composite
def configs(draw, mesh: Mesh, shape: tuple[int, ...], partial: bool = True) -> DistConfig:
    names = draw(parts(mesh))
    free = list(draw(st.permutations(names)))
    dims = draw(nestings(mesh, shape, free))
    terms = []
    if partial:
        chosen = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        terms = [(name, draw(st.sampled_from(OPS))) for name in names if name in chosen]
    return DistConfig(mesh, dims, tuple(terms))


shapes = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 24)), max_size=3).map(tuple)


@st.composite
def placed(draw, partial: bool = True) -> tuple[DistConfig, tuple[int, ...]]:
    """A placement, and a shape that it fits."""
    mesh, shape = draw(meshes()), draw(shapes)
    return draw(configs(mesh, shape, partial)), shape


def cut(elements: list[int], degree: int, index: int, sections: tuple[int, ...]) -> list[int]:
    """Chunk `index` of each section of a list, which is padded by -1 at its end."""
    unit = len(elements) // sum(sections or (1,))
    piece: list[int] = []
    for ratio in sections or (1,):
        size = ratio * unit
        part, elements = elements[:size], elements[size:]
        width = math.ceil(size / degree)
        part = part + [-1] * (width * degree - size)
        piece += part[index * width : (index + 1) * width]
    assert not elements
    return piece


def held(config: DistConfig, rank: int, dim: int, size: int) -> list[int]:
    """Global index of each local position of a dim; -1 for padding."""
    elements = list(range(size))
    for entry in config.dims[dim]:
        degree, index = config.mesh.degree(entry.axis), config.mesh.index(rank, entry.axis)
        elements = cut(elements, degree, index, entry.sections)
    return elements
