"""`fxpar.redistribute`: DTensors to other placements and meshes. The truth is what `distribute_tensor` makes of the
whole tensors, and for strided shards what FSDP2 does to a tensor-parallel model.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import fxpar
from fxpar.errors import FingerprintError, RedistributeError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.torch_api.dtensors import config_of, placements_of
from fxpar.transport.bundles import bundles_of, layout_of_bundles
from tests.repeat import examples
from tests.runtime.hot import World

RANKS = 4
# Ranks of meshes: all in a row, a grid, a grid in the other order, a part in front, behind, and every other rank.
MESHES = ([0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[[0, 1]], [[2, 3]]], [0, 1], [[2], [3]], [0, 2], [3])
SHAPES = ((8, 12), (7, 5), (3,), (16,), (), (4, 0, 2), (2, 6, 4, 3), (1, 1))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
Case = list[tuple[tuple[int, ...], torch.dtype, tuple, tuple]]


def drawn_case(rng: random.Random) -> Case:
    """Tensors of a batch: shape, dtype, and two ends (number of a mesh, placements)."""

    def end(shape: tuple[int, ...]) -> tuple[int, list[Placement]]:
        number = rng.randrange(len(MESHES))
        sizes = torch.tensor(MESHES[number]).shape
        placements: list[Placement] = []
        cut: dict[int, int] = {}
        for size in sizes:
            d = rng.randrange(-1, len(shape))
            if d >= 0 and (size == 1 or shape[d] % cut.get(d, 1) == 0):
                cut[d] = cut.get(d, 1) * size
                placements.append(Shard(d - rng.choice((0, len(shape)))))
            else:
                placements.append(Replicate())
        return number, placements

    chosen = []
    for _ in range(rng.randrange(1, 7)):
        shape = rng.choice(SHAPES)
        chosen.append((shape, rng.choice(DTYPES), end(shape), end(shape)))
    return chosen


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4).to(dtype)


def laid(value: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    positive = [Shard(p.dim % value.dim()) if isinstance(p, Shard) else p for p in placements]
    return distribute_tensor(value, mesh, positive, src_data_rank=None)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor


WORLD = World(RANKS, lambda: None)


@functools.cache
def meshes() -> list[DeviceMesh]:
    """Of this world: all cases run in the same forked ranks."""
    return [DeviceMesh("cpu", ranks) for ranks in MESHES]


@WORLD.case
def batches(rank: int) -> int:
    rng, moved = random.Random(0), 0
    for number in range(examples(30)):
        batch = drawn_case(rng)
        tensors, layouts, want = {}, {}, {}
        for i, (shape, dtype, (a, before), (b, after)) in enumerate(batch):
            value = whole(shape, dtype, 100 * number + i)
            tensors[f"t{i}"] = laid(value, meshes()[a], before)
            want[f"t{i}"] = laid(value, meshes()[b], after)
            like = laid(torch.zeros_like(value), meshes()[b], after)
            layouts[f"t{i}"] = like if (number + i) % 3 == 0 else (meshes()[b], after)
        found = fxpar.redistribute(tensors, layouts)
        assert list(found) == list(tensors)
        for name, tensor in found.items():
            assert (tensor is layouts[name]) == isinstance(layouts[name], DTensor)
            assert (tensor.shape, tensor.dtype) == (want[name].shape, want[name].dtype)
            assert (tensor.device_mesh, tensor.placements) == (want[name].device_mesh, want[name].placements)
            assert tensor.stride() == want[name].stride()
            mine, theirs = tensor.to_local(), want[name].to_local()
            assert mine.shape == theirs.shape, (number, name, mine.shape, theirs.shape, batch)
            assert torch.equal(bits(mine), bits(theirs)), (number, name, batch)
            moved += mine.numel()
    return moved


def test_batches_lie_as_torch_would_lay_them():
    assert min(batches()) > 0


@WORLD.case
def many_alike(rank: int) -> None:
    """Weights, norms and scalars of twelve layers: to new tensors, and into narrower ones; each has its own memory."""
    shapes = {"up": (12, 8), "norm": (12,), "scale": ()}
    values = {f"{i}.{name}": whole(shape, torch.float32, i) for i in range(12) for name, shape in shapes.items()}
    rows = [Shard(0), Replicate()]
    given = {
        name: laid(value, meshes()[1 if value.dim() else 0], rows if value.dim() else [Replicate()])
        for name, value in values.items()
    }
    columns = {
        name: (meshes()[4], [Shard(value.dim() - 1) if value.dim() else Replicate()]) for name, value in values.items()
    }
    found = fxpar.redistribute(given, columns)
    narrow = {name: laid(value.bfloat16() * 0, *columns[name]) for name, value in values.items()}
    fxpar.redistribute(given, narrow)
    for name, value in values.items():
        want = laid(value, *columns[name]).to_local()
        assert torch.equal(found[name].to_local(), want), name
        assert torch.equal(narrow[name].to_local(), want.bfloat16()), name
    storages = {
        tensor.to_local().untyped_storage().data_ptr() for tensor in found.values() if tensor.to_local().numel()
    }
    assert len(storages) == (len(found) if rank < 2 else 0)


def test_many_tensors_that_lie_alike():
    many_alike()


def test_small_tensors_that_lie_alike_are_a_bundle():
    mesh = Mesh((("a", 2),))

    def placed(*shape: int, cut: bool = False, dtype: torch.dtype = torch.float32) -> PlacedParam:
        dims = tuple((AxisShard("a"),) if cut and d == 0 else () for d in range(len(shape)))
        return PlacedParam(shape, dtype, (DistConfig(mesh, dims),))

    small, half, large = (placed(*shape) for shape in ((512, 512), (512, 513), (1024, 1024)))
    params = {"l": large, "h": half, **{f"s{i}": small for i in range(34)}, "own": placed(512, 512), "half": small}
    source = ParamLayout("a", 2, params)
    cut = {id(param): replace(param, copies=placed(*param.shape, cut=True).copies) for param in params.values()}
    target = ParamLayout("b", 2, {name: cut[id(param)] for name, param in params.items()})
    dtypes = dict.fromkeys(params, torch.float32) | {"half": torch.float16}
    bundles = bundles_of(source, target, dtypes)
    assert [len(bundle.members) for bundle in bundles] == [1, 1, 16, 16, 2, 1, 1]
    assert sorted(name for bundle in bundles for name in bundle.members) == sorted(params)
    laid_out = layout_of_bundles(target, bundles)
    stack = laid_out.params[bundles[2].name]
    assert (stack.shape, stack.copies[0].dims) == ((16, 512, 512), ((), (AxisShard("a"),), ()))
    assert laid_out.params["l"] is target.params["l"]


@WORLD.case
def fsdp_on_tp(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    given = dict(model.named_parameters())
    assert any("_StridedShard" in str(type(p)) for t in given.values() for p in t.placements)
    whole = fxpar.redistribute(given, (meshes()[0], [Replicate()]))
    halves = fxpar.redistribute(given, (meshes()[1], [Shard(0), Shard(0)]))
    for name, value in values.items():
        assert not whole[name].requires_grad
        assert torch.equal(whole[name].to_local(), value), name
        assert torch.equal(halves[name].to_local(), value.chunk(RANKS)[rank]), name
    back = fxpar.redistribute(halves, given)
    for name, tensor in given.items():
        assert back[name] is tensor
        assert torch.equal(tensor.full_tensor(), values[name]), name


def test_what_fsdp_makes_of_a_tensor_parallel_model():
    """FSDP2 cuts dim 0 on top of the columns of tensor parallelism: strided shards, whose order is turned round."""
    fsdp_on_tp()


@WORLD.case
def terms_and_dtypes(rank: int) -> None:
    terms = torch.arange(8.0) + 10 * rank
    partial = DTensor.from_local(terms, meshes()[1], [Partial(), Shard(0)], run_check=False)
    half = laid(torch.zeros(16, dtype=torch.bfloat16), meshes()[4], [Shard(0)])
    found = fxpar.redistribute({"x": partial}, {"x": half})["x"]
    assert found is half
    rows = torch.cat([2 * torch.arange(8.0) + 20, 2 * torch.arange(8.0) + 40])  # ranks 0 and 2, then 1 and 3
    if rank < 2:
        assert torch.equal(half.to_local(), rows.bfloat16()[8 * rank : 8 * rank + 8])
    assert partial.placements == (Partial(), Shard(0))
    assert torch.equal(partial.to_local(), terms)


def test_partial_terms_are_summed_and_dtypes_are_those_of_the_target():
    terms_and_dtypes()


@WORLD.case
def one_memory(rank: int) -> None:
    value = torch.arange(64.0).view(8, 8)
    buffer = laid(value, meshes()[0], [Shard(0)])
    memory = buffer.to_local()
    shape, stride = torch.Size((8, 8)), (8, 1)
    turned = DTensor.from_local(memory.view(8, 2), meshes()[0], [Shard(1)], shape=shape, stride=stride)
    fxpar.redistribute({"w": buffer}, {"w": turned})
    assert torch.equal(memory.view(8, 2), value[:, 2 * rank : 2 * rank + 2])


def test_the_target_may_be_the_memory_of_the_source():
    one_memory()


@WORLD.case
def refusals(rank: int) -> dict[str, str]:
    row, grid = meshes()[0], meshes()[1]
    x = laid(torch.arange(16.0), row, [Shard(0)])
    holes = DeviceMesh("cpu", [0, 1, 3])
    strided = DTensor.from_local(torch.ones(2), grid, [_StridedShard(0, split_factor=3), Replicate()])
    back = DeviceMesh("cpu", [3, 2, 1, 0])
    turned = DTensor.from_local(torch.ones(2), grid, [Shard(0), Shard(0)])
    turned._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    weight = x.detach().requires_grad_()
    uneven = laid(torch.arange(5.0), row, [Replicate()])
    cases: dict[str, tuple] = {
        "no layout": ({"lay.0": x, "lay.1": x}, {"lay.0": (row, [Replicate()])}),
        "no tensor": ({"a": x}, {"a": (row, [Replicate()]), "b": (row, [Replicate()])}),
        "plain tensor": ({"a": torch.ones(2)}, (row, [Replicate()])),
        "computed": ({"a": weight * 2}, (row, [Replicate()])),
        "into computed": ({"a": x}, {"a": weight * 2}),
        "other shape": ({"a": x}, {"a": uneven}),
        "no pair": ({"a": x}, {"a": [Shard(0)]}),
        "too many": ({"a": x}, (row, [Shard(0), Shard(0)])),
        "no list": ({"a": x}, (row, Shard(0))),
        "text": ({"a": x}, (row, ["S(0)"])),
        "no names": ([x], (row, [Shard(0)])),
        "one tensor": (x, (row, [Shard(0)])),
        "no such dim": ({"a": x}, (row, [Shard(1)])),
        "negative": ({"a": x}, (row, [Shard(-2)])),
        "to terms": ({"a": x}, (row, [Partial()])),
        "twice": ({"a": uneven}, (grid, [Shard(0), Shard(0)])),
        "expanded": ({"a": x}, {"a": DTensor.from_local(torch.zeros(1).expand(16), row, [Replicate()])}),
        "unequal steps": ({"a": x}, (holes, [Replicate()])),
        "backwards": ({"a": x}, (back, [Replicate()])),
        "turned": ({"a": turned}, (row, [Replicate()])),
        "strided": ({"a": strided}, (row, [Replicate()])),
        "meta": ({"a": DTensor.from_local(torch.empty(2, device="meta"), row, [Shard(0)])}, (row, [Replicate()])),
    }
    said = {}
    for case, (tensors, layouts) in cases.items():
        try:
            fxpar.redistribute(tensors, layouts)
        except RedistributeError as error:
            said[case] = str(error)
    assert cases.keys() == said.keys()
    assert torch.equal(x.full_tensor(), torch.arange(16.0))
    assert fxpar.redistribute({}, (row, [Shard(0)])) == {}
    return said


def test_nothing_moves_before_all_is_understood():
    said = refusals()
    assert said[1:] == said[:-1]
    expected = {
        "no layout": "'lay.1' is in tensors but not in layouts; did you mean 'lay.0'?",
        "no tensor": "'b' is in layouts but not in tensors",
        "plain tensor": "is a Tensor, not a DTensor",
        "computed": "is a result of autograd, through which no gradient would flow; detach it",
        "into computed": "has a target that is a result of autograd",
        "other shape": "has shape [16], and its target [5]",
        "no pair": "write (device mesh, placements), or a DTensor",
        "no list": "has the placements Shard(dim=0); write a list",
        "text": "has the placements ['S(0)']; write a list",
        "no names": "'tensors' is a list; write a dict of DTensors by name",
        "one tensor": "'tensors' is a DTensor; write a dict of DTensors by name",
        "too many": "2 placements (Shard(dim=0), Shard(dim=0)) for a mesh of 1 dims",
        "no such dim": "names a dim that a tensor of shape [16] does not have",
        "negative": "names a dim that a tensor of shape [16] does not have",
        "to terms": "a full value is not split into partial sums",
        "twice": "shard dim 0 of size 5 twice; its 2 pieces after the first split are unequal",
        "expanded": "has a target that is an expanded tensor, whose elements share memory; clone it",
        "unequal steps": "[0, 1, 3] does not have a constant, positive stride of ranks",
        "backwards": "[3, 2, 1, 0] does not have a constant, positive stride of ranks",
        "turned": "is sharded in an order that its placements (Shard(dim=0), Shard(dim=0)) do not show",
        "strided": "has a split factor that is not a product of later mesh dims",
        "meta": "is on device meta",
    }
    for case, part in expected.items():
        assert part in said[0][case], (case, said[0][case])


@WORLD.case
def among_messages(rank: int) -> None:
    """The user waits for a message on the default process group while tensors move."""
    x, peer, received = laid(torch.arange(16.0), meshes()[0], [Shard(0)]), rank ^ 1, torch.zeros(4)
    waiting = dist.irecv(received, peer, tag=0)
    found = fxpar.redistribute({"x": x}, [meshes()[1], [Replicate(), Replicate()]])["x"]
    assert torch.equal(found.to_local(), torch.arange(16.0))
    sending = dist.isend(torch.full((4,), 42.0 + rank), peer, tag=0)
    for work in (waiting, sending):
        assert work is not None
        work.wait()
    assert received.tolist() == [42.0 + peer] * 4


def test_messages_of_the_user_are_left_alone():
    among_messages()


@WORLD.case
def uneven_fsdp_on_tp(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 7))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    found = fxpar.redistribute(dict(model.named_parameters()), (meshes()[0], [Replicate()]))
    for name, value in values.items():
        assert torch.equal(found[name].to_local(), value), name


def test_rows_that_do_not_divide_under_fsdp_and_tensor_parallelism():
    uneven_fsdp_on_tp()


@WORLD.case
def different_moves(rank: int) -> str:
    x = laid(torch.arange(16.0), meshes()[0], [Shard(0)])
    cut = [Shard(0)] if rank != 2 else [Replicate()]
    same = laid(torch.zeros(16, dtype=torch.float16 if rank else torch.bfloat16), meshes()[1], [Replicate()] * 2)
    said = []
    for layout in ((meshes()[4], cut), same):
        with pytest.raises(FingerprintError) as caught:
            fxpar.redistribute({"x": x}, layout)
        said.append(str(caught.value))
    return " ".join(said)


def test_ranks_that_ask_for_different_moves_are_told_so():
    said = different_moves()[0]
    assert "rank(s) 2 differs" in said
    assert "rank(s) 0 differs" in said


@pytest.mark.parametrize("degrees", [(4,), (2, 2), (1, 2, 2)])
def test_configs_come_back_from_placements(degrees):
    device_mesh = SimpleNamespace(mesh=torch.arange(4).view(degrees), mesh_dim_names=None)
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(degrees)):
        config = config_of(device_mesh, placements, (8, 16))
        assert placements_of(config) == list(placements)
        assert [config.mesh.names[i] for i in range(len(degrees))] == [f"dim{i}" for i in range(len(degrees))]
