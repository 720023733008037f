"""Reductions through the nodes: carried out on plain numbers they are dense sums, and less crosses the network."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ReductionError, SwitchPlanError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.switch.node_first import (
    NodeFirstPlan,
    cheapest_cost,
    cheapest_reduction,
    node_first_cost,
    plan_node_first,
    room_for_sums,
)
from fxpar.switch.reduction import AnyReductionPlan, ReductionPlan, plan_reduction
from fxpar.switch.terms import NOWHERE, GradientPlacement
from tests.placements import configs
from tests.repeat import examples
from tests.switch.moving import SHAPES
from tests.switch.test_reduction import Placements, added_bytes, added_elements, gradients

NAN = float("nan")


@st.composite
def reductions(draw) -> tuple[Placements, ParamLayout, ClusterSpec]:
    """Whole nodes; each tensor of the target is cut on one dim over all ranks, or not at all."""
    devices, nodes = draw(st.sampled_from(((2, 2), (2, 3), (3, 2), (4, 2), (2, 5), (3, 4))))
    world = devices * nodes
    sources, params = {}, {}
    for kind, shape in enumerate(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))):
        placed, target = draw(gradients(world, shape)), draw(cut_over(world, shape))
        for layer in range(draw(st.integers(1, 3))):
            sources[f"{layer}.{kind}"], params[f"{layer}.{kind}"] = placed, target
    return sources, ParamLayout("home", world, params), ClusterSpec(nodes, devices, 200, 25, 10)


@st.composite
def cut_over(draw, world: int, shape: tuple[int, ...]) -> PlacedParam:
    cut = draw(st.integers(-1, len(shape) - 1))
    dims = tuple((AxisShard("home"),) if d == cut else () for d in range(len(shape)))
    return PlacedParam(shape, torch.float64, (DistConfig(Mesh((("home", world),)), dims),))


@given(reductions(), st.sampled_from([1, 500, 1 << 20]))
@settings(max_examples=examples(20))
def test_the_cost_without_a_plan(case, sums_bytes):
    """Of all rounds, planned together or once for those alike."""
    sources, target, cluster = case
    plan = cheapest_reduction(sources, target, cluster, sums_bytes=sums_bytes)
    assert astuple(cheapest_cost(sources, target, cluster, sums_bytes)) == costs_of(plan)
    through = plan_node_first(sources, target, cluster, sums_bytes=sums_bytes)
    found = node_first_cost(sources, target, cluster, sums_bytes)
    assert (found and astuple(found)) == (through and costs_of(through))


def costs_of(plan: AnyReductionPlan | NodeFirstPlan) -> tuple[Any, ...]:
    return pytest.approx(plan.predicted_s, rel=1e-12), plan.intra_node_bytes, plan.inter_node_bytes


def terms_by_rank(sources: Placements, world: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Per rank the whole shape, NAN where it holds nothing; and the sums. By DistConfig.take and put alone."""
    generator = torch.Generator().manual_seed(0)
    ranks: list[dict[str, Tensor]] = [{} for _ in range(world)]
    totals = {}
    for fqn, placed in sources.items():
        totals[fqn] = torch.zeros(placed[0].shape, dtype=torch.float64)
        for one in placed:
            mesh, axes = one.dist.mesh, ".".join(axis for axis, _ in one.dist.partial)
            count = mesh.degree(axes) if axes else 1
            terms = [torch.randint(-99, 99, one.shape, generator=generator).double() for _ in range(count)]
            totals[fqn] += torch.stack(terms).sum(0)
            for rank in mesh.ranks:
                term = terms[mesh.index(rank, axes) if axes else 0]
                ranks[rank][fqn] = torch.full(one.shape, NAN, dtype=torch.float64)
                one.dist.put(ranks[rank][fqn], one.dist.take(term, rank), rank)
    return ranks, totals


def carried_out(plan: ReductionPlan, held: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each rank has after an exchange: NAN where it needs nothing or gets no term."""
    problem = plan.problem
    result: list[dict[str, Tensor]] = [{} for _ in range(problem.world)]
    for number, fqn in enumerate(problem.tensors):
        index = int(problem.class_of[number])
        terms, rows = plan.terms[index], plan.transfers[plan.transfers["tensor"] == number]
        for rank in range(problem.world):
            out = result[rank][fqn] = torch.full(terms.cls.shape, NAN, dtype=torch.float64)
            for piece in terms.cls.needed[:, rank].nonzero()[0].tolist():
                box = tuple(slice(*ends) for ends in terms.cls.boxes[piece].tolist())
                arrived = rows[(rows["dst"] == rank) & (rows["slice"] == piece)]
                parts = [held[src][fqn][box] for src in arrived["src"].tolist()]
                if terms.own(rank)[piece]:
                    parts.append(held[rank][fqn][box])
                if parts:
                    out[box] = torch.stack(parts).sum(0)
    return result


@settings(max_examples=examples(40))
@given(reductions(), st.sampled_from((1, 64, 1 << 20)))
def test_random_plans_are_dense_sums(case, sums_bytes):
    sources, target, cluster = case
    plan = plan_node_first(sources, target, cluster, sums_bytes=sums_bytes)
    assert plan is not None
    plan.verify()
    assert sorted(fqn for one in plan.rounds for fqn in one.sums.params) == sorted(target.params)
    ranks, totals = terms_by_rank(sources, target.world)
    for one in plan.rounds:
        assert not one.inside.inter_node_bytes
        got = carried_out(one.between, carried_out(one.inside, ranks))
        for exchange in (one.inside, one.between):
            assert np.array_equal(added_bytes(exchange), 3 * added_elements(exchange))
        for fqn in one.sums.params:
            for rank in range(target.world):
                there = torch.zeros(totals[fqn].shape)
                dist = target.params[fqn].copies[0]
                dist.put(there, dist.take(torch.ones(there.shape), rank), rank)
                assert torch.equal(got[rank][fqn][there.bool()], totals[fqn][there.bool()])
    if all(any(param.copies[0].dims) for param in target.params.values()):
        # What several nodes both have and need crosses once here, and not at all directly: small, as homes are cut.
        assert plan.inter_node_bytes <= plan_reduction(sources, target, cluster).inter_node_bytes


def placed(
    shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], partial: str, dims: tuple = ()
) -> GradientPlacement:
    nesting = dims or ((),) * len(shape)
    terms = tuple((axis, "sum") for axis in partial.split(".") if axis)
    return GradientPlacement(shape, DistConfig(Mesh(axes), nesting, terms), torch.float32)


def home(world: int, shape: tuple[int, ...], tensors: int = 1) -> ParamLayout:
    dist = DistConfig(Mesh((("home", world),)), ((AxisShard("home"),), *((),) * (len(shape) - 1)))
    return ParamLayout("home", world, {f"w{i}": PlacedParam(shape, torch.float32, (dist,)) for i in range(tensors)})


FOUR_BY_EIGHT = ClusterSpec(4, 8, 200, 25, 10)


def test_eight_replicas_of_a_node_send_one_sum():
    sources = {f"w{i}": placed((256, 16), (("dp", 32),), "dp") for i in range(3)}
    target = home(32, (256, 16), 3)
    direct, through = plan_reduction(sources, target, FOUR_BY_EIGHT), plan_node_first(sources, target, FOUR_BY_EIGHT)
    assert through is not None
    through.verify()
    assert through.inter_node_bytes * 8 == direct.inter_node_bytes
    (one,) = through.rounds
    sent = one.between.traffic.sent_between
    assert sent.min() == sent.max()  # every device of a node uses the network alike
    src, dst = one.between.transfers["src"], one.between.transfers["dst"]
    assert (src % 8 == dst % 8).all()
    assert through.predicted_s == pytest.approx(one.inside.predicted_s + one.between.predicted_s)
    assert through.sums_bytes == 3 * 256 * 16 * 4 // 8


def test_stages_of_a_pipeline_go_together():
    """Each stage fills a node: only this node collects its tensors, while the others send theirs."""
    mesh = [Mesh((("cp", 2), ("tp", 4)), 8 * stage) for stage in range(4)]
    dims = (AxisShard("tp"),), ()
    shape, names = (256, 16), [f"w{i}" for i in range(12)]
    sources = {
        name: GradientPlacement(shape, DistConfig(mesh[i // 3], dims, (("cp", "sum"),)), torch.float32)
        for i, name in enumerate(names)
    }
    target, each = home(32, shape, 12), 256 * 16 * 4 // 8
    through = plan_node_first(sources, target, FOUR_BY_EIGHT, sums_bytes=each)
    assert through is not None
    through.verify()
    assert [list(one.sums.params) for one in through.rounds] == [[f"w{i + 3 * s}" for s in range(4)] for i in range(3)]
    assert through.sums_bytes == each
    direct = plan_reduction(sources, target, FOUR_BY_EIGHT)
    assert through.inter_node_bytes * 2 == direct.inter_node_bytes
    for one in through.rounds:
        assert one.between.traffic.sent_between.min() == one.between.traffic.sent_between.max() > 0


def test_a_model_without_parameters_needs_no_room():
    assert room_for_sums(ParamLayout("home", 32, {}), FOUR_BY_EIGHT, 1 << 20) == 0


def test_terms_of_the_targets_node_stay_there():
    """tp8 in a node: gradients are whole on each node already, and nothing crosses to sum what one node has."""
    sources = {"w0": placed((256, 16), (("tp", 32),), "")}
    plan = plan_node_first(sources, home(32, (256, 16)), FOUR_BY_EIGHT)
    assert plan is not None
    assert plan.inter_node_bytes == 0
    (only,) = plan.rounds[0].between.terms
    assert only.to is not None
    assert (only.to == NOWHERE).sum() == only.to.size * 3 // 4


def test_the_faster_way_is_chosen():
    sources, target = {"w0": placed((1 << 14, 64), (("dp", 32),), "dp")}, home(32, (1 << 14, 64))
    assert isinstance(cheapest_reduction(sources, target, FOUR_BY_EIGHT), NodeFirstPlan)
    small = {"w0": placed((32, 1), (("dp", 32),), "dp")}  # two latencies are more than one
    assert isinstance(cheapest_reduction(small, home(32, (32, 1)), FOUR_BY_EIGHT), ReductionPlan)
    one_node = ClusterSpec(1, 32, 200, 25, 10)
    assert isinstance(cheapest_reduction(sources, target, one_node), ReductionPlan)


@pytest.mark.parametrize(
    ("cluster", "world"),
    [(ClusterSpec(1, 8, 200, 25, 10), 8), (ClusterSpec(8, 1, 200, 25, 10), 8), (ClusterSpec(3, 3, 200, 25, 10), 8)],
    ids=["one node", "one device a node", "a node that is not full"],
)
def test_ranks_that_are_no_several_whole_nodes_reduce_directly(cluster, world):
    sources = {"w0": placed((16, 4), (("dp", world),), "dp")}
    assert plan_node_first(sources, home(world, (16, 4)), cluster) is None


@settings(max_examples=examples(10))
@given(st.data())
def test_targets_on_other_meshes_reduce_directly(data):
    mesh = Mesh((("a", 2), ("b", 4)))
    dist = data.draw(configs(mesh, (16, 8), partial=False))
    target = ParamLayout("home", 8, {"w0": PlacedParam((16, 8), torch.float32, (dist,))})
    sources = {"w0": placed((16, 8), (("dp", 8),), "dp")}
    assert plan_node_first(sources, target, ClusterSpec(2, 4, 200, 25, 10)) is None


def test_broken_plans_are_found():
    sources = {"w0": placed((16, 4), (("dp", 8),), "dp")}
    plan = plan_node_first(sources, home(8, (16, 4)), ClusterSpec(2, 4, 200, 25, 10))
    assert plan is not None
    (one,) = plan.rounds
    (terms,), (sums,) = one.inside.terms, one.between.terms
    assert terms.to is not None
    assert sums.to is not None
    elsewhere = replace(one.inside, terms=(replace(terms, to=1 - terms.to),))
    with pytest.raises(SwitchPlanError):
        NodeFirstPlan((replace(one, inside=elsewhere),)).verify()
    silent = sums.to.copy()
    silent[0, 0] = NOWHERE
    dropped = one.between.transfers[~((one.between.transfers["slice"] == 0) & (one.between.transfers["term"] == 0))]
    quiet = replace(one.between, terms=(replace(sums, to=silent),), transfers=dropped)
    quiet.verify()  # by itself it is consistent: node 0 sends no sum of this slice
    with pytest.raises(SwitchPlanError, match="sends on a sum without terms, or keeps one with"):
        NodeFirstPlan((replace(one, between=quiet),)).verify()


def test_bad_input():
    good, target = {"w0": placed((16, 4), (("dp", 8),), "dp")}, home(8, (16, 4))
    with pytest.raises(ReductionError, match="w1: layout 'home' has no such parameter"):
        plan_node_first({**good, "w1": good["w0"]}, target, ClusterSpec(2, 4, 200, 25, 10))
    with pytest.raises(ReductionError, match="w0: no gradient is given"):
        plan_node_first({}, target, ClusterSpec(2, 4, 200, 25, 10))
