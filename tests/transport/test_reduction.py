"""Reductions on real ranks against dense sums."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.switch.reduction import plan_reduction
from fxpar.switch.terms import GradientPlacement
from fxpar.torch_api.threaded import run_threads
from fxpar.transport import Holding, Reduction
from tests.placements import nestings, placed_mesh
from tests.repeat import examples
from tests.transport.cases import DEGREES, SHAPES, WORLD, copies_of, drawn, local_tensors


@dataclass(frozen=True)
class Sum:
    """Gradients with partial axes, and where their sum goes."""

    sources: dict[str, GradientPlacement]
    target: ParamLayout
    cluster: ClusterSpec
    flat: bool
    padded: bool


@st.composite
def partials(draw, shape: tuple[int, ...], dtype: torch.dtype) -> GradientPlacement:
    degrees = draw(st.sampled_from([d for d in DEGREES if d != (1,)]))
    names = draw(st.permutations(("dp", "cp", "tp")))[: len(degrees)]
    mesh = draw(placed_mesh(tuple(zip(names, degrees, strict=True)), WORLD))
    free = list(draw(st.permutations(mesh.names)))
    dims = draw(nestings(mesh, shape, free))
    chosen = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    partial = tuple((name, "sum") for name in mesh.names if name in chosen)
    return GradientPlacement(shape, DistConfig(mesh, dims, partial), dtype)


@st.composite
def sums(draw) -> Sum:
    kinds = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    repeats = draw(st.integers(1, 3))
    sources, params = {}, {}
    for kind, shape in enumerate(kinds):
        source = draw(partials(shape, draw(st.sampled_from((torch.float32, torch.float64)))))
        target = PlacedParam(shape, torch.float64, draw(copies_of(shape)))
        for layer in range(repeats):
            sources[f"{layer}.{kind}"], params[f"{layer}.{kind}"] = source, target
    cluster = draw(st.sampled_from((ClusterSpec(4, 1, 200, 25, 10), ClusterSpec(2, 2, 200, 25, 10))))
    return Sum(sources, ParamLayout("home", WORLD, params), cluster, draw(st.booleans()), draw(st.booleans()))


def term_tensors(case: Sum, seed: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients by rank, and their sums: ranks that hold the same term hold the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(WORLD)]
    totals = {}
    for fqn, placed in case.sources.items():
        axes = ".".join(axis for axis, _ in placed.dist.partial)
        mesh = placed.dist.mesh
        count = mesh.degree(axes) if axes else 1
        terms = [torch.randint(-50, 50, placed.shape, generator=generator).to(placed.dtype) for _ in range(count)]
        totals[fqn] = torch.stack(terms).double().sum(0)
        for rank in mesh.ranks:
            term = terms[mesh.index(rank, axes) if axes else 0]
            by_rank[rank][fqn] = placed.dist.take(term, rank)
    return by_rank, totals


def test_random_reductions_are_dense_sums():
    planned = []
    for number, case in enumerate(drawn(sums(), examples(30))):
        plan = plan_reduction(case.sources, case.target, case.cluster, planner=("auto", "turns")[number // 2 % 2])
        plan.verify()
        planned.append((case, plan, term_tensors(case, number), term_tensors(case, number + 1000)))

    def work(rank: int) -> None:
        for number, (case, plan, first, second) in enumerate(planned):
            target = Holding(case.target, local_tensors(case.target, None, rank, None, case.flat, case.padded))
            for tensor in target.tensors.values():
                tensor.fill_(0)
            reduction = Reduction(
                plan,
                rank,
                target,
                staging_bytes=(64 << 20, 256, 2000)[number % 3],
                checked=number % 4 == 0,
                merge=number % 5 != 0,
            )
            reduction.run(first[0][rank], accumulate=False)
            check(case, target, first[1], rank)
            reduction.run(second[0][rank], accumulate=True)
            check(case, target, {fqn: first[1][fqn] + second[1][fqn] for fqn in first[1]}, rank)
            strided = {fqn: t.mT.contiguous().mT if t.dim() > 1 else t for fqn, t in first[0][rank].items()}
            reduction.run(strided, accumulate=False)
            check(case, target, first[1], rank)

    def check(case: Sum, target: Holding, totals: dict[str, Tensor], rank: int) -> None:
        expected = local_tensors(case.target, totals, rank, None, False, case.padded)
        assert expected.keys() == target.tensors.keys()
        for fqn, tensor in expected.items():
            assert torch.equal(target.tensors[fqn], tensor), (fqn, case)

    run_forked(WORLD, work)
    del planned[25:]
    run_threads(WORLD, work)  # ranks without messages between pairs


def test_terms_are_added_in_their_order_on_every_rank():
    """Floats whose sum depends on the order: all copies of a target are equal bit by bit, and so in every run."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) * 10.0 ** (3 * term) for term in range(4)]
    both = GradientPlacement((64,), DistConfig(mesh, ((),), (("dp", "sum"), ("tp", "sum"))), torch.float32)
    whole = ParamLayout("home", WORLD, {"w": PlacedParam((64,), torch.float32, (everywhere(),))})
    plan = plan_reduction({"w": both}, whole, ClusterSpec(2, 2, 200, 25, 10))
    expected = values[0] + values[1] + values[2] + values[3]
    assert not torch.equal(expected, values[3] + values[2] + values[1] + values[0])

    def work(rank: int) -> None:
        target = Holding(whole, {"w": torch.zeros(64)})
        reduction = Reduction(plan, rank, target, staging_bytes=200)
        for _ in range(2):
            reduction.run({"w": values[rank]}, accumulate=False)
            assert torch.equal(target.tensors["w"], expected)

    run_forked(WORLD, work)


def everywhere() -> DistConfig:
    return DistConfig(Mesh((("dp", 4),)), ((),))


def test_gradients_are_let_go():
    """After a run nothing refers to the gradients, though they were sent from where they lay."""
    mesh = Mesh((("dp", 4),))
    partial = GradientPlacement((8, 4), DistConfig(mesh, ((), ()), (("dp", "sum"),)), torch.float32)
    cut = DistConfig(mesh, ((AxisShard("dp"),), ()))
    home = ParamLayout("home", WORLD, {"w": PlacedParam((8, 4), torch.float32, (cut,))})
    plan = plan_reduction({"w": partial}, home, ClusterSpec(1, 4, 200, 25, 10))

    def work(rank: int) -> None:
        target = Holding(home, {"w": torch.zeros(2, 4)})
        reduction = Reduction(plan, rank, target)
        memory = np.ones((8, 4), np.float32)
        gradient, alive = torch.from_numpy(memory), weakref.ref(memory)
        reduction.run({"w": gradient})
        assert torch.equal(target.tensors["w"], torch.full((2, 4), 4.0))
        del gradient, memory
        gc.collect()
        assert alive() is None

    run_forked(WORLD, work)
