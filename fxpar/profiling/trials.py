"""What is tried on a device and between devices, small sizes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ir.mesh import Mesh
from fxpar.profiling.points import BACKWARD, BESIDE, Trial
from fxpar.torch_api.groups import is_gloo
from fxpar.transport.groups import ProcessGroups

c10d = torch.ops._c10d_functional
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
DTYPES = ("float32", "bfloat16")
DOCUMENTS = (256, 1024, 2048, 4096, 8192, 16384)  # tokens
HEADS, HEAD_DIM = {"cuda": 32}, 64  # as many as keep a GPU busy; on others 4
THIN_ROWS, THIN_WIDTHS = 2048, (64, 128, 256, 512)
KEPT_BYTES = 64 << 20  # of results: a step keeps its activations, so what comes next lies in other memory
MEMORY_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20, 128 << 20)  # the last one is more than caches hold
HOST_BYTES = (16 << 20, 64 << 20, 256 << 20)
BESIDE_WIDTH, BESIDE_BYTES = 8192, 64 << 20  # a product and a transfer that take about as long as each other
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
LAUNCHES = 100
Run = Callable[[], object]
LEVELS = ("inter", "intra")  # links between nodes, and inside: axes of the mesh of all ranks


def device_series(
    device: torch.device, widths: Sequence[int] = WIDTHS, memory_bytes: Sequence[int] = MEMORY_BYTES
) -> list[Iterator[Trial]]:
    """Products and attention in each dtype, forward and backward; copies and sums in memory, launches of a tiny kernel.
    Thin products on a CPU alone: a GPU does one in less time than Python takes to start it. Copies to the host on a GPU
    alone.
    """
    made: list[Iterator[Trial]] = []
    for name in DTYPES:
        for half in ("", BACKWARD):
            thin = [_thin_products(device, name, half)] if device.type == "cpu" else []
            made += [_products(device, name, widths, half), *thin, _attention(device, name, half)]
    made += [_copies(device, memory_bytes), _sums(device, memory_bytes), _launches(device)]
    return [*made, _host_copies(device)] if device.type == "cuda" else made


def _products(device: torch.device, name: str, widths: Sequence[int], half: str) -> Iterator[Trial]:
    """Of as many rows as columns. A backward has two products for each of the forward."""
    for width in widths:
        amount = (4.0 if half else 2.0) * width**3
        yield Trial(f"{half}product", name, width, amount, partial(_linear, device, name, width, width, half))


def _thin_products(device: torch.device, name: str, half: str) -> Iterator[Trial]:
    """Of many rows, as tokens are, and few columns: more to read and write per operation."""
    for width in THIN_WIDTHS:
        amount = (4.0 if half else 2.0) * THIN_ROWS * width**2
        yield Trial(f"{half}thin product", name, width, amount, partial(_linear, device, name, THIN_ROWS, width, half))


def _linear(device: torch.device, name: str, rows: int, width: int, half: str) -> Run:
    """The products of a linear layer as captured graphs call them, a row of its weight for each output: of rows with
    the weight, transposed; backward their gradients with the weight, and transposed with the rows.
    """
    x, dy, weight = (torch.randn(n, width, device=device).to(getattr(torch, name)) for n in (rows, rows, width))
    if half:
        return _keeping(lambda: (dy @ weight, dy.t() @ x))
    return _keeping(lambda: (x @ weight.t(),))


def _keeping(run: Callable[[], Sequence[Tensor]]) -> Run:
    """The same, with its latest results kept."""
    kept: deque[Sequence[Tensor]] = deque(maxlen=max(1, KEPT_BYTES // sum(one.nbytes for one in run())))
    return lambda: kept.append(run())


def _attention(device: torch.device, name: str, half: str) -> Iterator[Trial]:
    """Causal, of one document; backward 2.5 times the operations of forward (`fxpar.cost.ops`)."""
    options, heads = (None, None, True, 0, HEAD_DIM**-0.5, 0.0), HEADS.get(device.type, 4)
    forward, gradients = torch.ops.fxpar.attention.default, torch.ops.fxpar.attention_backward.default

    def prepare(tokens: int) -> Run:
        shape = 1, heads, tokens, HEAD_DIM
        q, k, v, dout = (torch.randn(shape, device=device).to(getattr(torch, name)) for _ in range(4))
        if not half:
            return lambda: forward(q, k, v, *options)
        out, lse = forward(q, k, v, *options)
        return lambda: gradients(dout, q, k, v, out, lse, *options)

    for tokens in DOCUMENTS:
        amount = (5.0 if half else 2.0) * heads * HEAD_DIM * tokens**2
        yield Trial(f"{half}attention", name, tokens, amount, partial(prepare, tokens))


def _copies(device: torch.device, sizes: Sequence[int]) -> Iterator[Trial]:
    def prepare(nbytes: int) -> Run:
        (source,) = _tensors(1, nbytes, device)
        return _keeping(lambda: (source.clone(),))

    for nbytes in sizes:
        yield Trial("copy", "memory", nbytes, 2.0 * nbytes, partial(prepare, nbytes))


def _sums(device: torch.device, sizes: Sequence[int]) -> Iterator[Trial]:
    def prepare(nbytes: int) -> Run:
        a, b = _tensors(2, nbytes, device)
        return _keeping(lambda: (a + b,))

    for nbytes in sizes:
        yield Trial("add", "memory", nbytes, 3.0 * nbytes, partial(prepare, nbytes))


def _host_copies(device: torch.device) -> Iterator[Trial]:
    """To pinned memory of the host and back, one after the other."""

    def prepare(nbytes: int) -> Run:
        (there,) = _tensors(1, nbytes, device)
        host = torch.empty_like(there, device="cpu", pin_memory=device.type == "cuda")
        return lambda: (host.copy_(there, non_blocking=True), there.copy_(host, non_blocking=True))

    for nbytes in HOST_BYTES:
        yield Trial("host copy", "both ways", nbytes, float(nbytes), partial(prepare, nbytes), 2)


def _beside_gathers(device: torch.device, level: str, group: dist.ProcessGroup, nbytes: int) -> Iterator[Trial]:
    """As many gathers of this size as make BESIDE_BYTES, all begun before the product."""
    name, degree, times = group.group_name, group.size(), BESIDE_BYTES // nbytes

    def prepare() -> Run:
        (mine,) = _tensors(1, nbytes // degree, device)
        a, b = (torch.randn(BESIDE_WIDTH, BESIDE_WIDTH, device=device).bfloat16() for _ in range(2))

        def run() -> tuple[Tensor, list[Tensor]]:
            begun = [c10d.all_gather_into_tensor(mine, degree, name) for _ in range(times)]
            return a @ b.t(), [c10d.wait_tensor(one) for one in begun]

        return run

    yield Trial(BESIDE, level, BESIDE_BYTES, 2.0 * BESIDE_WIDTH**3, prepare)


def _launches(device: torch.device) -> Iterator[Trial]:
    """As programs call them: about every other call is a view."""

    def prepare() -> Run:
        (one,) = _tensors(1, 4, device)
        add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
        return lambda: [add(view(one, (1, 1)), 1.0) for _ in range(LAUNCHES)]

    yield Trial("launch", "kernel", 1, 1.0, prepare, LAUNCHES)


def link_series(device: torch.device, nodes: int, sizes: Sequence[int] = MESSAGE_BYTES) -> list[Iterator[Trial]]:
    """Messages, all-reduces, all-gathers and reduce-scatters between the ranks of each node, and between ranks of the
    same number of all nodes; all groups at once. None of a level with one rank only. All ranks call it alike.
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
            found += [_all_gathers(device, level, group, sizes), _reduce_scatters(device, level, group, sizes)]
            if device.type == "cuda":
                found.append(_beside_gathers(device, level, group, sizes[-1]))
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
    """`size` is what comes together; carried out as in programs (`fxpar.runtime.gloo`)."""
    name, degree = group.group_name, group.size()

    def prepare(nbytes: int) -> Run:
        (mine,) = _tensors(1, nbytes // degree, device)
        if is_gloo(name):
            return lambda: _exchanged(mine.expand(degree, -1).contiguous(), name, degree)
        return lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(mine, degree, name))

    for nbytes in sizes:
        sent = 4.0 * (nbytes // degree // 4) * (degree - 1)
        yield Trial("all_gather", level, nbytes, sent, partial(prepare, nbytes))


def _reduce_scatters(
    device: torch.device, level: str, group: dist.ProcessGroup, sizes: Sequence[int]
) -> Iterator[Trial]:
    """`size` is what each rank adds; carried out as in programs."""
    name, degree = group.group_name, group.size()

    def prepare(nbytes: int) -> Run:
        whole = torch.ones(degree, max(1, nbytes // degree // 4), device=device)
        if is_gloo(name):
            return lambda: _exchanged(whole, name, degree).sum(0)
        return lambda: c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "sum", degree, name))

    for nbytes in sizes:
        sent = 4.0 * (nbytes // degree // 4) * (degree - 1)
        yield Trial("reduce_scatter", level, nbytes, sent, partial(prepare, nbytes))


def _exchanged(rows: Tensor, name: str, degree: int) -> Tensor:
    """A row to each rank, and one from each."""
    return c10d.wait_tensor(c10d.all_to_all_single(rows, [1] * degree, [1] * degree, name))


def _tensors(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    """float32, written to: memory that nobody has touched is not there yet."""
    return [torch.ones(max(1, nbytes // 4), device=device) for _ in range(count)]
