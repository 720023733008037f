"""`redistribute`: a batch of DTensors to other placements and other meshes, in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import PlacementError, RedistributeError, a_type, nearest
from fxpar.ir.dist_config import DistConfig
from fxpar.switch import ParamLayout, PlacedParam, plan_switch
from fxpar.torch_api.dtensors import config_of, counted_from_front, is_nested_by_hand, local_of, sibling
from fxpar.transport.bundles import bundles_of, layout_of_bundles
from fxpar.transport.groups import shared_groups
from fxpar.transport.holding import Holding
from fxpar.transport.switch import Switch

Layout = tuple[DeviceMesh, Sequence[Placement]] | DTensor


@torch.no_grad()
def redistribute(
    tensors: Mapping[str, DTensor],
    layouts: Layout | Mapping[str, Layout],
    *,
    cluster: ClusterSpec | None = None,
    timeout_s: float | None = None,
) -> dict[str, DTensor]:
    """Move a batch of DTensors to other placements and other meshes: one message per pair of ranks for all of them.

    tensors: DTensors by name. Partial ones are reduced first, one by one, by DTensor itself.
    layouts: what they become, one for all or one for each name: a pair (device mesh, placements), or a DTensor of the
        same shape that is written to, in its dtype. It may share memory with `tensors`.
    cluster: decides who sends what several ranks hold (default: all ranks on one node).
    timeout_s: how long to wait for a transfer; None: as the default process group does.

    Returns DTensors by name; those given as layouts are returned themselves. Every rank of the default process group
    calls it with the same names and layouts, ranks outside of a mesh too (where local tensors are empty). Values move,
    gradients do not flow back: what autograd has computed is refused, detach it.
    Raises RedistributeError before anything moves; FingerprintError if ranks ask for different moves; TransferError.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = _wanted(tensors, layouts)
    dtypes = {name: (to if isinstance(to := wanted[name], DTensor) else t).dtype for name, t in tensors.items()}
    # The sender casts, so both ends are described in the target's dtypes.
    source = _layout("given", world, tensors, tensors, dtypes)
    target = _layout("asked for", world, wanted, tensors, dtypes)
    given = {name: _reduced(tensor) for name, tensor in tensors.items()}
    results = _results(wanted, tensors, target, rank)
    bundles = bundles_of(source, target, {name: tensor.dtype for name, tensor in tensors.items()})
    before, after = layout_of_bundles(source, bundles), layout_of_bundles(target, bundles)
    plan = plan_switch(before, after, cluster or ClusterSpec(1, world, 10.0, 10.0, 10.0))
    read, written = _locals(given), _locals(results)
    sent = {b.name: b.stacked(read) for b in bundles if rank in before.params[b.name].copies[0].mesh}
    received = {b.name: b.room(written) for b in bundles if rank in after.params[b.name].copies[0].mesh}
    device = next(iter(given.values())).device_mesh.device_type if given else None
    groups = shared_groups()
    Switch(
        plan,
        rank,
        [Holding(before, sent)],
        Holding(after, received),
        group=groups.world(),
        process_groups=groups,
        timeout_s=timeout_s,
        device=device,
        name="redistribute",
    ).run()
    for bundle in bundles:
        if bundle.name in received:
            bundle.unstack(received[bundle.name], written)
    return results


def _wanted(tensors: Mapping[str, DTensor], layouts: Layout | Mapping[str, Layout]) -> Mapping[str, Layout]:
    """A layout for every tensor; tensors and layouts are what they must be, one by one and together."""
    if not isinstance(tensors, Mapping):
        raise RedistributeError("tensors", f"is {a_type(tensors)}; write a dict of DTensors by name")
    wanted = layouts if isinstance(layouts, Mapping) else dict.fromkeys(tensors, layouts)
    if odd := sorted(set(wanted) ^ set(tensors)):
        there, missing, other = ("tensors", "layouts", wanted) if odd[0] in tensors else ("layouts", "tensors", tensors)
        raise RedistributeError(odd[0], f"is in {there} but not in {missing}{nearest(odd[0], other)}")
    kinds = set()
    for name, tensor in tensors.items():
        _check(name, tensor, "is")
        kinds.add(tensor.device_mesh.device_type)
        to = wanted[name]
        if isinstance(to, DTensor):
            _check(name, to, "has a target that is")
            kinds.add(to.device_mesh.device_type)
            if to.shape != tensor.shape:
                raise RedistributeError(name, f"has shape {list(tensor.shape)}, and its target {list(to.shape)}")
            if any(
                step == 0 and size > 1 for step, size in zip(local_of(to).stride(), local_of(to).shape, strict=True)
            ):
                raise RedistributeError(
                    name, "has a target that is an expanded tensor, whose elements share memory; clone it"
                )
        elif isinstance(to, tuple | list) and len(to) == 2 and isinstance(to[0], DeviceMesh):
            _check_placements(name, to[1])
            kinds.add(to[0].device_type)
        else:
            raise RedistributeError(
                name, f"has the layout {to!r}; write (device mesh, placements), or a DTensor to write to"
            )
        if len(kinds) > 1:
            raise RedistributeError(
                name, f"would move to another kind of device ({', '.join(sorted(kinds))}), which is not supported"
            )
    return {name: wanted[name] for name in tensors}


def _check_placements(name: str, placements: object) -> None:
    listed = isinstance(placements, tuple | list)
    if not listed or not all(isinstance(each, Placement) for each in placements):
        raise RedistributeError(
            name,
            f"has the placements {placements!r}; write a list with one for each dim of the mesh, such as [Shard(0)]",
        )


def _check(name: str, tensor: DTensor, what: str) -> None:
    if not isinstance(tensor, DTensor):
        raise RedistributeError(name, f"{what} {a_type(tensor)}, not a DTensor; see DTensor.from_local")
    if tensor.grad_fn is not None:
        raise RedistributeError(name, f"{what} a result of autograd, through which no gradient would flow; detach it")
    if is_nested_by_hand(tensor):
        raise RedistributeError(name, f"{what} sharded in an order that its placements {tensor.placements} do not show")
    local = local_of(tensor)
    if type(local) is not Tensor or local.layout != torch.strided:
        raise RedistributeError(
            name, f"{what} made of {type(local).__name__}s with layout {local.layout}; only dense tensors are supported"
        )
    if local.device.type != tensor.device_mesh.device_type:
        raise RedistributeError(name, f"{what} on device {local.device}, its mesh on {tensor.device_mesh.device_type}")


def _layout(
    title: str,
    world: int,
    ends: Mapping[str, Layout],
    tensors: Mapping[str, DTensor],
    dtypes: Mapping[str, torch.dtype],
) -> ParamLayout:
    """One end of the move."""
    known: dict[tuple, PlacedParam] = {}
    params = {}
    for name, tensor in tensors.items():
        mesh, placements = _place(ends[name], len(tensor.shape))
        key = (mesh, placements, tensor.shape, dtypes[name])
        if key not in known:
            known[key] = PlacedParam(tuple(tensor.shape), dtypes[name], (_config(name, ends is tensors, *key[:3]),))
        params[name] = known[key]
    return ParamLayout(title, world, params)


def _place(end: Layout, ndim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    if isinstance(end, DTensor):
        return end.device_mesh, end.placements
    return end[0], counted_from_front(end[1], ndim)


def _config(name: str, given: bool, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DistConfig:
    if given:
        placements = _without_terms(placements)
    try:
        config = config_of(mesh, placements, shape)
    except PlacementError as error:
        raise RedistributeError(
            name, f"{'has' if given else 'is to get'} a layout that is not supported: {error}"
        ) from error
    if config.is_partial:
        raise RedistributeError(name, f"cannot become {tuple(placements)}: a full value is not split into partial sums")
    return config


def _without_terms(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def _reduced(tensor: DTensor) -> DTensor:
    """The tensor without partial placements."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=_without_terms(tensor.placements))
    return tensor


def _results(
    wanted: Mapping[str, Layout], tensors: Mapping[str, DTensor], target: ParamLayout, rank: int
) -> dict[str, DTensor]:
    """Where the values go: the DTensors that were given, or new ones."""
    results: dict[str, DTensor] = {}
    alike: dict[int, DTensor] = {}  # by identity of the PlacedParam, which tensors that lie alike share
    for name, to in wanted.items():
        if isinstance(to, DTensor):
            results[name] = to
            continue
        param, device = target.params[name], local_of(tensors[name]).device
        first = alike.get(id(param))
        if first is None:
            results[name] = alike[id(param)] = _new(to, param, device, rank)
        else:
            results[name] = sibling(first, torch.empty_like(first.to_local()))
    return results


def _new(to: tuple[DeviceMesh, Sequence[Placement]], param: PlacedParam, device: torch.device, rank: int) -> DTensor:
    mesh, placements = _place(to, len(param.shape))
    config = param.copies[0]
    # DTensor takes the shape of a scalar from its local tensor, outside of the mesh too.
    nothing = (0,) if param.shape else ()
    shape = config.real_shape(rank, param.shape) if rank in config.mesh else nothing
    local = torch.empty(shape, dtype=param.dtype, device=device)
    stride = torch.empty(param.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(param.shape), stride=stride)


def _locals(tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    return {name: local_of(tensor) for name, tensor in tensors.items()}
