"""DTensor's words for layouts and fxpar's: device meshes and placements into `Mesh` and `DistConfig`, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fxpar.errors import PlacementError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The same ranks in the same places. Axes without a name are called dim0, dim1 and so on.

    Raises PlacementError for ranks that do not stand at equal distances along each axis.
    """
    ranks = device_mesh.mesh
    given = device_mesh.mesh_dim_names
    names = given if given and not any("." in name for name in given) else [f"dim{i}" for i in range(ranks.dim())]
    first = int(ranks[(0,) * ranks.dim()])
    # The distance along an axis of one coordinate does not matter; 1 keeps it a legal mesh.
    steps = [int(ranks.select(d, 1).flatten()[0]) - first if size > 1 else 1 for d, size in enumerate(ranks.shape)]
    if min(steps, default=1) > 0:
        mesh = Mesh(tuple(zip(names, ranks.shape, strict=True)), first, tuple(steps))
        if list(mesh.ranks) == ranks.flatten().tolist():
            return mesh
    raise PlacementError(
        f"the device mesh {ranks.tolist()} does not have a constant, positive stride of ranks along each dim"
    )


def counted_from_front(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """The placements with dims that are counted from the end counted from the front."""
    return tuple(
        Shard(placement.dim + ndim) if isinstance(placement, Shard) and placement.dim < 0 else placement
        for placement in placements
    )


def config_of(device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DistConfig:
    """How a DTensor of global `shape` with these placements lies.

    Raises PlacementError for what a DistConfig cannot say: unequal pieces of a dim that are cut again (DTensor spreads
    the rest in another way), an order of cuts that no nesting gives, a dim that the tensor does not have.
    """
    mesh = mesh_of(device_mesh)
    if len(placements) != len(mesh.axes):
        raise PlacementError(f"{len(placements)} placements {tuple(placements)} for a mesh of {len(mesh.axes)} dims")
    order: list[list[int]] = [[] for _ in shape]  # mesh dims that cut each dim, outermost cut first
    partial = []
    # From the last mesh dim to the first one, as a strided shard counts the pieces of cuts on later mesh dims.
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise PlacementError(f"{placement} names a dim that a tensor of shape {list(shape)} does not have")
            pieces = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            order[dim].insert(_position(order[dim], mesh, pieces, placement), axis)
        elif placement.is_partial():
            partial.append((mesh.names[axis], getattr(placement, "reduce_op", "sum")))
        elif not placement.is_replicate():
            raise PlacementError(f"{placement} is not a placement that fxpar knows")
    dims = tuple(tuple(AxisShard(mesh.names[axis]) for axis in axes) for axes in order)
    config = DistConfig(mesh, dims, tuple(reversed(partial)))
    for d, axes in enumerate(order):
        outer = math.prod([mesh.shape[axis] for axis in axes if mesh.shape[axis] > 1][:-1])
        if shape[d] % outer:
            raise PlacementError(
                f"{tuple(placements)} shard dim {d} of size {shape[d]} twice; its {outer} pieces after the first split "
                "are unequal"
            )
    return config


def _position(inner: list[int], mesh: Mesh, pieces: int, placement: Placement) -> int:
    """Where a cut comes among those on later mesh dims: behind as many as make `pieces` pieces together."""
    made = 1
    for position in range(len(inner) + 1):
        if made == pieces:
            return position
        if position < len(inner):
            made *= mesh.shape[inner[position]]
    raise PlacementError(f"{placement} has a split factor that is not a product of later mesh dims")


def placements_of(config: DistConfig) -> list[Placement]:
    """One placement per axis of the config's mesh. Raises PlacementError for what DTensor cannot show."""
    found: list[Placement] = [Replicate() for _ in config.mesh.names]
    if config.is_partial:
        raise PlacementError(f"{config} is a partial sum")
    for d, entries in enumerate(config.dims):
        axes = [entry.axis for entry in entries]
        if any(entry.sections or "." in entry.axis for entry in entries):
            raise PlacementError(f"{config} has strided or joint axes")
        if axes != sorted(axes, key=config.mesh.names.index):
            raise PlacementError(f"{config} nests the axes of a dim in another order than the mesh")
        for axis in axes:
            found[config.mesh.names.index(axis)] = Shard(d)
    return found


def is_nested_by_hand(tensor: DTensor) -> bool:
    """Whether the cuts of a dim nest in an order that the placements do not show."""
    spec = tensor._spec
    plain = not any(isinstance(placement, _StridedShard) for placement in spec.placements)
    order = getattr(spec, "shard_order", None) if plain else None
    return order is not None and any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)


def local_of(tensor: DTensor) -> Tensor:
    """What this rank holds, detached and ready; empty outside of the tensor's mesh."""
    local = tensor.to_local()
    return (local.wait() if isinstance(local, AsyncCollectiveTensor) else local).detach()


def sibling(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor that lies as `tensor` does, with a local tensor of the same shape and dtype.

    Nothing is checked: `DTensor.from_local` takes ten times as long.
    """
    return DTensor(local, tensor._spec, requires_grad=False)
