"""What is tried on a device and between devices, small sizes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ir.mesh import Mesh
from fxpar.profiling.points import Trial
from fxpar.torch_api.since_2_13 import all_gather_single
from fxpar.transport.groups import ProcessGroups

WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
DTYPES = ("float32", "bfloat16")
MEMORY_BYTES = (16 << 20, 128 << 20)  # the last one is more than caches hold
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
LAUNCHES = 100
Run = Callable[[], object]
LEVELS = ("inter", "intra")  # links between nodes, and inside: axes of the mesh of all ranks


def device_series(
    device: torch.device, widths: Sequence[int] = WIDTHS, memory_bytes: Sequence[int] = MEMORY_BYTES
) -> list[Iterator[Trial]]:
    """Products in each dtype, copies and sums in memory, launches of a kernel that does next to nothing."""
    products = [_products(device, name, widths) for name in DTYPES]
    return [*products, _copies(device, memory_bytes), _sums(device, memory_bytes), _launches(device)]


def _products(device: torch.device, name: str, widths: Sequence[int]) -> Iterator[Trial]:
    def prepare(width: int) -> Run:
        a, b = (torch.randn(width, width, device=device).to(getattr(torch, name)) for _ in range(2))
        return lambda: a @ b

    for width in widths:
        yield Trial("product", name, width, 2.0 * width**3, partial(prepare, width))


def _copies(device: torch.device, sizes: Sequence[int]) -> Iterator[Trial]:
    def prepare(nbytes: int) -> Run:
        source, target = _tensors(2, nbytes, device)
        return lambda: target.copy_(source)

    for nbytes in sizes:
        yield Trial("copy", "memory", nbytes, 2.0 * nbytes, partial(prepare, nbytes))


def _sums(device: torch.device, sizes: Sequence[int]) -> Iterator[Trial]:
    def prepare(nbytes: int) -> Run:
        a, b, out = _tensors(3, nbytes, device)
        return lambda: torch.add(a, b, out=out)

    for nbytes in sizes:
        yield Trial("add", "memory", nbytes, 3.0 * nbytes, partial(prepare, nbytes))


def _launches(device: torch.device) -> Iterator[Trial]:
    def prepare() -> Run:
        (one,) = _tensors(1, 4, device)
        return lambda: [torch.add(one, 1.0) for _ in range(LAUNCHES)]

    yield Trial("launch", "kernel", 1, 1.0, prepare, LAUNCHES)


def link_series(device: torch.device, nodes: int, sizes: Sequence[int] = MESSAGE_BYTES) -> list[Iterator[Trial]]:
    """Messages, all-reduces and all-gathers between the ranks of each node, and between ranks of the same number of all
    nodes; all groups at once. None of a level with one rank only. All ranks call it alike.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh(tuple(zip(LEVELS, (nodes, world // nodes), strict=True)))
    groups, found = ProcessGroups(), []
    for level in LEVELS:
        members = mesh.group_of(rank, (level,))
        if len(members) > 1:
            made = [groups.of(ranks) for ranks in groups.to_make(mesh, (level,))]
            group = next(one for one in made if one is not None)
            found += [_messages(device, level, members, sizes), _all_reduces(device, level, group, sizes)]
            found.append(_all_gathers(device, level, group, sizes))
    return found


def _messages(device: torch.device, level: str, members: Sequence[int], sizes: Sequence[int]) -> Iterator[Trial]:
    """Between the first two ranks of the group, there and back: two messages."""
    first, second = members[:2]

    def prepare(nbytes: int) -> Run:
        (tensor,) = _tensors(1, nbytes, device)
        calls = {first: ((dist.send, second), (dist.recv, second)), second: ((dist.recv, first), (dist.send, first))}
        return lambda: [call(tensor, other) for call, other in calls.get(dist.get_rank(), ())]

    for nbytes in sizes:
        yield Trial("send", level, nbytes, float(nbytes), partial(prepare, nbytes), 2)


def _all_reduces(device: torch.device, level: str, group: dist.ProcessGroup, sizes: Sequence[int]) -> Iterator[Trial]:
    def prepare(nbytes: int) -> Run:
        (tensor,) = _tensors(1, nbytes, device)
        tensor.zero_()  # sums of sums stay finite
        return lambda: dist.all_reduce(tensor, group=group)

    for nbytes in sizes:
        sent = 2.0 * nbytes * (group.size() - 1) / group.size()
        yield Trial("all_reduce", level, nbytes, sent, partial(prepare, nbytes))


def _all_gathers(device: torch.device, level: str, group: dist.ProcessGroup, sizes: Sequence[int]) -> Iterator[Trial]:
    """`size` is what comes together."""

    def prepare(nbytes: int) -> Run:
        (mine,) = _tensors(1, nbytes // group.size(), device)
        whole = mine.new_empty(mine.numel() * group.size())
        return lambda: all_gather_single(whole, mine, group=group)

    for nbytes in sizes:
        sent = 4.0 * (nbytes // group.size() // 4) * (group.size() - 1)
        yield Trial("all_gather", level, nbytes, sent, partial(prepare, nbytes))


def _tensors(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    """float32, written to: memory that nobody has touched is not there yet."""
    return [torch.ones(max(1, nbytes // 4), device=device) for _ in range(count)]
