"""Any placement becomes any other: the lowered collectives move exactly what `DistConfig.take` describes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxpar.errors import PlacementError
from fxpar.ir import collectives as c
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.graph import AnnotatedGraph, Input, Output, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.steps import steps
from fxpar.ir.strategy import Strategy
from fxpar.lowering import split_phases
from fxpar.lowering.verify import verify
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.cleanup import Cleanup
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.mask_padding import MaskPadding
from fxpar.passes.reshard_to_collectives import ReshardToCollectives
from fxpar.passes.reuse_buffers import ReuseBuffers
from fxpar.passes.sink_waits import SinkWaits
from fxpar.runtime import bind
from fxpar.torch_api.threaded import run_threads
from fxpar.transport import ProcessGroups
from tests.placements import configs
from tests.repeat import examples

PASSES = (
    ReshardToCollectives(),
    MaskPadding(),
    Cleanup(),
    GlobalToLocal(),
    LowerCollectives(),
    BucketCollectives(),
    ReuseBuffers(),
    SinkWaits(),
)
MESHES = (
    Mesh((("dp", 2), ("tp", 2))),
    Mesh((("cp", 3), ("tp", 2))),
    Mesh((("tp", 3), ("dp", 3))),
    Mesh((("dp", 2), ("cp", 2), ("tp", 2))),
    Mesh((("tp", 2), ("dp", 3), ("cp", 2))),
    Mesh((("dp", 2), ("tp", 4))),
    Mesh((("tp", 6),)),
)
SHAPES = ((24,), (7,), (12, 24), (5, 8), (11, 3), (6, 4, 12), (2, 9, 5))
Pair = tuple[tuple[int, ...], DistConfig, DistConfig]


@st.composite
def pairs(draw, mesh: Mesh) -> Pair:
    """A shape and two placements of it; terms of sums (or of maxima) may only be kept, or made anew as sums."""
    shape = draw(st.sampled_from(SHAPES))
    ops = draw(st.sampled_from((("sum",), ("sum", "avg"), ("max",))))
    source = draw(configs(mesh, shape))
    source = replace(source, partial=tuple((axis, draw(st.sampled_from(ops))) for axis, _ in source.partial))
    target = draw(configs(mesh, shape, partial=False))
    if ops != ("max",):
        had, used = dict(source.partial), [name for axis in target.shard_axes for name in axis.split(".")]
        free = [n for n in (*mesh.names, *had) if not any(mesh.overlap(n, other) for other in used)]
        kept = draw(st.lists(st.sampled_from(free), unique=True)) if free and draw(st.integers(0, 3)) == 0 else []
        kept = [n for i, n in enumerate(kept) if not any(mesh.overlap(n, other) for other in kept[:i])]
        kept.sort(key=mesh.place)
        target = replace(target, partial=tuple((name, had.get(name, "sum")) for name in kept))
    return shape, source, target


@st.composite
def worlds(draw) -> tuple[Mesh, list[Pair]]:
    mesh = draw(st.sampled_from(MESHES))
    return mesh, draw(st.lists(pairs(mesh), min_size=15, max_size=30))


# ------------------------------------------------------------------------------------------- run on every rank
def program_of(mesh: Mesh, examples: list[Pair]):
    """An exec graph with one reshard per example."""
    graph, inputs, outputs, results = fx.Graph(), [], [], []
    for i, (shape, source, _) in enumerate(examples):
        place = graph.placeholder(f"x{i}")
        place.meta.update(tensor=TensorMeta(shape, torch.float64), dist=source)
        inputs.append(Input("param", f"x{i}", place.meta["tensor"]))
        outputs.append(Output("grad", f"x{i}"))
    for place, (shape, source, target) in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        node = graph.call_function(c.reshard, (place,))
        node.meta.update(tensor=place.meta["tensor"], dist=target, phase="body")
        if len(steps(source, target, shape)) == 1:  # chains in different orders cannot share two buckets
            node.meta["bucket"] = "all"
        results.append(node)
    graph.output(tuple(results))
    annotated = AnnotatedGraph(graph, tuple(inputs), tuple(outputs), (), Strategy(mesh.axes))
    for step in PASSES:
        step(annotated)
        verify(annotated, step.name)
    return split_phases(annotated)


def terms_of(shape: tuple[int, ...], config: DistConfig) -> tuple[Tensor, list[Tensor]]:
    """A whole tensor of integers, and what each rank holds of it under `config`."""
    mesh, axes = config.mesh, [axis for axis, _ in config.partial]
    keys = list(itertools.product(*(range(mesh.degree(axis)) for axis in axes)))
    terms = {key: torch.randint(-99, 99, shape).double() for key in keys}
    stacked = torch.stack([terms[key] for key in keys]).view(*(mesh.degree(axis) for axis in axes), *shape)
    local = []
    for rank in range(mesh.size):
        local.append(config.take(terms[tuple(mesh.index(rank, axis) for axis in axes)], rank))
    for _, op in config.partial:
        stacked = {"sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0)}[op](stacked)
    return stacked, local


def joined(config: DistConfig, pieces: list[Tensor], rank: int) -> Tensor:
    """What the ranks' pieces stand for at `rank`: its own, or the reduction over the axes that hold terms."""
    axes = tuple(axis for axis, _ in config.partial)
    found = [pieces[other] for other in config.mesh.group_of(rank, axes)]
    values = torch.stack(found).view(*(config.mesh.degree(a) for a in axes), *pieces[rank].shape)
    for _, op in config.partial:
        values = values.mean(0) if op == "avg" else values.sum(0)
    return values


# Each example is a world of threads with many reshards; shrinking them would take minutes.
@settings(max_examples=examples(6), suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(worlds())
def test_collectives_move_what_the_placements_say(world):
    mesh, examples = world
    program = program_of(mesh, examples)
    wholes, held = zip(*(terms_of(shape, source) for shape, source, _ in examples), strict=True)

    def work(rank: int) -> dict[str, Tensor]:
        bound = bind(program, rank, ProcessGroups().names(mesh, program.axes()))
        bound.prepare({f"x{i}": local[rank].clone() for i, local in enumerate(held)}, {})
        bound.run({}, 1.0)
        return bound.finish()["grads"]

    ranks = run_threads(mesh.size, work)
    for i, (shape, source, target) in enumerate(examples):
        pieces = [result[f"x{i}"] for result in ranks]
        exact = not any(op == "avg" for _, op in (*source.partial, *target.partial))
        for rank in range(mesh.size):
            wanted = target.take(wholes[i], rank)
            got = joined(target, pieces, rank)
            same = torch.equal(got, wanted) if exact else torch.allclose(got, wanted, rtol=0, atol=1e-11)
            assert same, f"{shape}: {source} -> {target} on rank {rank}: {names(source, target)}"


def lies(config: DistConfig) -> set[tuple[str, object]]:
    """What each axis or sub-axis does; joined ones each."""
    cuts = ((a, (d, e.sections)) for d, entries in enumerate(config.dims) for e in entries for a in e.axis.split("."))
    return {*cuts, *config.partial}


@given(st.sampled_from(MESHES).flatmap(pairs))
def test_every_step_is_a_placement_on_the_way(example):
    shape, source, target = example
    found = steps(source, target, shape)
    here, used = source, [name for name, _ in lies(source) | lies(target)]
    parts = source.mesh.parts(used) if any(":" in name for name in used) else source.mesh.names
    for op, args, dist in found:
        assert op in c.COLLECTIVES
        axis = args[0]
        assert dist.local_shape(shape)
        changed = {name for name, _ in lies(here.in_parts(parts)) ^ lies(dist.in_parts(parts))}
        on_them = all(any(source.mesh.inside(name, one) for one in axis.split(".")) for name in changed)
        assert on_them or not parts, "one step works on the axes that it names, whole or in parts"
        here = dist
    assert (here.dims, here.partial) == (target.dims, target.partial)
    assert len(found) <= 2 * len({name for name, _ in lies(source) | lies(target)}) + 1
    assert bool(found) == ((source.dims, source.partial) != (target.dims, target.partial))


# ---------------------------------------------------------------------------------- as few steps as there can be
MESH = Mesh((("dp", 2), ("cp", 2), ("tp", 2)))


def config(*dims: str, partial: str = "") -> DistConfig:
    """`config("tp dp", "")`: dim 0 cut by tp, then dp."""
    return DistConfig(
        MESH,
        tuple(tuple(AxisShard(axis) for axis in dim.split()) for dim in dims),
        tuple((axis, "sum") for axis in partial.split()),
    )


def names(source: DistConfig, target: DistConfig) -> list[str]:
    return [f"{op.__name__}({args[0]})" for op, args, _ in steps(source, target, (8,) * source.ndim)]


SIMPLE = [
    (config("", ""), config("", ""), []),
    (config("tp", ""), config("", "tp"), ["all_to_all(tp)"]),
    (config("", "", partial="tp"), config("tp", ""), ["reduce_scatter(tp)"]),
    (config("", "", partial="tp"), config("", ""), ["all_reduce(tp)"]),
    (config("", "", partial="tp dp"), config("", ""), ["all_reduce(tp.dp)"]),
    (config("tp", ""), config("", ""), ["all_gather(tp)"]),
    (config("", ""), config("tp", ""), ["shard(tp)"]),
    (config("", ""), config("", "", partial="tp"), ["partial(tp)"]),
    # ZeRO: gradients that are terms over all data axes are scattered over them at once
    (config("tp", "", partial="dp cp"), config("tp dp.cp", ""), ["reduce_scatter(dp.cp)"]),
    (config("tp dp.cp", ""), config("tp", ""), ["all_gather(dp.cp)"]),
    (config("", "", partial="dp cp tp"), config("dp.cp", ""), ["reduce_scatter(dp.cp)", "all_reduce(tp)"]),
    (config("", "", partial="dp cp"), config("dp", ""), ["reduce_scatter(dp)", "all_reduce(cp)"]),
    # nested cuts: the innermost moves first, and only what is in the way is undone
    (config("tp cp", ""), config("tp", "cp"), ["all_to_all(cp)"]),
    (config("tp cp", ""), config("", "cp tp"), ["all_to_all(cp)", "all_to_all(tp)"]),
    (config("tp cp", ""), config("tp", ""), ["all_gather(cp)"]),
    (config("cp", ""), config("cp tp", ""), ["shard(tp)"]),
    (config("tp", "cp"), config("cp", "tp"), ["all_gather", "all_to_all", "shard"]),
]


@pytest.mark.parametrize(("source", "target", "expected"), SIMPLE, ids=[f"{s}->{t}" for s, t, _ in SIMPLE])
def test_simple_reshards_take_the_shortest_way(source, target, expected):
    found = names(source, target)
    if expected and "(" not in expected[0]:
        assert len(found) <= len(expected)
    else:
        assert found == expected


def test_order_of_nested_cuts_matters():
    """The same axes in another order is another placement, which no local step can make."""
    assert names(config("tp cp"), config("cp tp")) != []
    assert "all_gather(cp)" in names(config("tp cp"), config("cp tp"))


def test_sections_are_part_of_the_placement():
    plain = config("tp")
    strided = DistConfig(MESH, ((AxisShard("tp", (1, 1)),),))
    assert names(plain, strided) == ["all_gather(tp)", "shard(tp)"]


def test_what_nothing_turns_into_raises():
    with pytest.raises(PlacementError, match="no collective turns"):
        steps(config(""), DistConfig(MESH, ((),), (("tp", "max"),)), (8,))


def test_one_reshard_in_a_graph():
    program = program_of(MESH, [((8, 4), config("tp", ""), config("", "tp"))])
    calls = [str(n.target) for n in program.body.graph.nodes if n.op == "call_function"]
    assert [t for t in calls if "c10d" in t] == [
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
    ]
    assert program.axes() == ("tp",)
