"""Plans of reductions without ranks: carried out on plain tensors they are dense sums; broken ones are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.errors import ClusterError, ReductionError, SwitchPlanError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.switch.reduction import ReductionPlan, plan_reduction
from fxpar.switch.terms import GradientPlacement
from tests.placements import meshes, nestings
from tests.repeat import examples
from tests.switch.moving import SHAPES, copies_of

Placements = dict[str, tuple[GradientPlacement, ...]]


@st.composite
def gradients(draw, world: int, shape: tuple[int, ...]) -> tuple[GradientPlacement, ...]:
    """On one mesh, or on two beside each other."""
    placed, first = [], 0
    for _ in range(draw(st.integers(1, 2))):
        mesh = replace(draw(meshes(largest=max(1, min(6, world - first)))), offset=first)
        if first + mesh.size > world:
            break
        free = list(draw(st.permutations(mesh.names)))
        dims = draw(nestings(mesh, shape, free))
        chosen = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        partial = tuple((name, "sum") for name in mesh.names if name in chosen)
        placed.append(GradientPlacement(shape, DistConfig(mesh, dims, partial), torch.float64))
        first += mesh.size
    return tuple(placed)


@st.composite
def reductions(draw) -> tuple[Placements, ParamLayout, ClusterSpec]:
    """Gradients on one mesh or on two (tied over stages), and a target that may hold elements on many ranks."""
    world = draw(st.integers(8, 13))
    sources, params = {}, {}
    kinds = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    repeats = draw(st.integers(1, 3))
    for kind, shape in enumerate(kinds):
        placed = draw(gradients(world, shape))
        target = PlacedParam(shape, torch.float64, draw(copies_of(world, shape)))
        for layer in range(repeats):
            sources[f"{layer}.{kind}"], params[f"{layer}.{kind}"] = placed, target
    devices = draw(st.sampled_from((1, 2, 3, 4, 16)))
    return sources, ParamLayout("home", world, params), ClusterSpec(-(-world // devices), devices, 200, 25, 10)


def carry_out(plan: ReductionPlan, sources: Placements) -> None:
    """Assert that every rank gets the sum of all terms for what it needs, in the order of terms."""
    generator = torch.Generator().manual_seed(0)
    for number, fqn in enumerate(plan.problem.tensors):
        held: dict[int, tuple[int, Tensor, Tensor]] = {}  # rank -> (term, values, where they are real)
        total, count = torch.zeros(sources[fqn][0].shape, dtype=torch.float64), 0
        for placed in sources[fqn]:
            mesh, axes = placed.dist.mesh, ".".join(axis for axis, _ in placed.dist.partial)
            terms = mesh.degree(axes) if axes else 1
            values = [torch.randint(-9, 9, placed.shape, generator=generator).double() for _ in range(terms)]
            total += torch.stack(values).sum(0)
            for rank in mesh.ranks:
                term = mesh.index(rank, axes) if axes else 0
                there = torch.zeros(placed.shape)
                ones = placed.dist.take(torch.ones(placed.shape), rank)
                placed.dist.put(there, ones, rank)
                held[rank] = (count + term, values[term], there.bool())
            count += terms
        rows = plan.transfers[plan.transfers["tensor"] == number]
        cls = plan.problem.classes[plan.problem.class_of[number]]
        for rank in range(plan.problem.world):
            for piece in np.flatnonzero(cls.needed[:, rank]).tolist():
                index = tuple(slice(*ends) for ends in cls.boxes[piece].tolist())
                arrived = rows[(rows["dst"] == rank) & (rows["slice"] == piece)]
                got = [(int(row["term"]), int(row["src"])) for row in arrived]
                if rank in held and bool(held[rank][2][index].all()):
                    got.append((held[rank][0], rank))
                assert sorted(term for term, _ in got) == list(range(count))
                for term, src in got:
                    assert held[src][0] == term
                    assert held[src][2][index].all()
                summed = sum(held[src][1][index] for _, src in sorted(got))
                assert torch.equal(torch.as_tensor(summed), total[index])


@settings(max_examples=examples(25))
@given(reductions())
def test_random_plans_are_dense_sums(case):
    sources, target, cluster = case
    plan = plan_reduction(sources, target, cluster)
    plan.verify()
    carry_out(plan, sources)
    assert plan.intra_node_bytes + plan.inter_node_bytes == plan.transfers["nbytes"].sum()
    assert plan.fingerprint == plan_reduction(sources, target, cluster).fingerprint
    assert np.array_equal(added_bytes(plan), 3 * added_elements(plan))


def added_bytes(plan: ReductionPlan) -> np.ndarray:
    """[ranks]: what the plan says that each reads and writes to add float64 to float64."""
    return sum((len(one.cls.members) * one.adding_bytes(8) for one in plan.terms), np.zeros(plan.problem.world))


def added_elements(plan: ReductionPlan) -> np.ndarray:
    """[ranks]: bytes of all terms that arrive at a rank, or are its own; transfer by transfer."""
    total = np.zeros(plan.problem.world)
    np.add.at(total, plan.transfers["dst"], plan.transfers["nbytes"])
    for one in plan.terms:
        for rank in range(plan.problem.world):
            mine = one.own(rank) & one.cls.needed[:, rank]
            total[rank] += len(one.cls.members) * one.cls.nbytes[mine].sum()
    return total


@pytest.mark.parametrize(("shared_by", "expected"), [(1, 0.024), (2, 0.024 + 0.006)])
def test_adding_takes_the_time_of_its_memory(shared_by, expected):
    """64 bytes on each of 4 ranks, 16 at home: 3 x 16 arrive; 4 terms of 16 bytes are read, sums read and written."""
    ranks = Mesh((("x", 4),))
    sources = {"w": GradientPlacement((16,), DistConfig(ranks, ((),), (("x", "sum"),)), torch.float32)}
    home = PlacedParam((16,), torch.float32, (DistConfig(ranks, ((AxisShard("x"),),)),))
    device = Device(tflops=1, memory_gb_per_s=32e-6, launch_us=1, shared_by=shared_by)
    cluster = ClusterSpec(1, 4, 2e-6, 2e-6, 0, device=device)
    plan = plan_reduction(sources, ParamLayout("home", 4, {"w": home}), cluster)
    assert plan.links_s == pytest.approx(48 / 2e3)
    assert plan.predicted_s == pytest.approx(expected)
    by_turns = plan_reduction(sources, ParamLayout("home", 4, {"w": home}), cluster, planner="turns")
    assert by_turns.predicted_s == pytest.approx(expected)
    slow = replace(device, memory_gb_per_s=4e-6)
    alone = plan_reduction(sources, ParamLayout("home", 4, {"w": home}), replace(cluster, device=slow))
    assert alone.predicted_s == pytest.approx(0.048 + (0.024 if shared_by > 1 else 0))


@settings(max_examples=examples(25))
@given(reductions(), st.data())
def test_broken_plans_are_found(case, data):
    plan = plan_reduction(*case)
    table = plan.transfers
    if not len(table):
        return
    at = data.draw(st.integers(0, len(table) - 1))
    change = data.draw(st.sampled_from(("drop", "twice", "src", "dst", "slice", "term", "nbytes", "tensor")))
    broken = table.copy()
    if change == "drop":
        broken = np.delete(table, at)
    elif change == "twice":
        broken = np.insert(table, at, table[at])
    elif change == "nbytes":
        broken["nbytes"][at] += 1
    else:
        value = data.draw(st.integers(-1, 14))
        row = table[at]
        terms = plan.terms[plan.problem.class_of[row["tensor"]]]
        if change == "src" and 0 <= value < plan.problem.world:
            also = terms.term_of[value] == row["term"] and terms.cls.held[row["slice"], value]
            if also:
                return  # another holder of the term is as good
        if value == row[change]:
            return
        broken[change][at] = value
    with pytest.raises(SwitchPlanError):
        replace(plan, transfers=broken).verify()


def partial(
    shape: tuple[int, ...] = (8, 4), axes: str = "dp", mesh: str = "dp4.tp2", first: int = 0, **change
) -> GradientPlacement:
    named = Mesh(tuple((part[:2], int(part[2:])) for part in mesh.split(".")), first)
    terms = tuple((axis, "sum") for axis in axes.split(".") if axis)
    return replace(GradientPlacement(shape, DistConfig(named, ((),) * len(shape), terms), torch.float32), **change)


def home(world: int = 8, shape: tuple[int, ...] = (8, 4), tensors: int = 1, cut: bool = True) -> ParamLayout:
    mesh = Mesh((("fs", world),))
    dims = ((AxisShard("fs"),) if cut else (), *((),) * (len(shape) - 1))
    param = PlacedParam(shape, torch.float32, (DistConfig(mesh, dims),))
    return ParamLayout("home", world, {f"w{i}": param for i in range(tensors)})


FOUR_BY_TWO = ClusterSpec(4, 2, 200, 25, 10)


def test_the_nearest_and_least_loaded_holder_sends():
    """dp4.tp2 with terms over dp: both tp ranks hold a term; a rank asks the one that has sent less, own terms stay."""
    plan = plan_reduction({f"w{i}": partial() for i in range(4)}, home(tensors=4), FOUR_BY_TWO)
    plan.verify()
    assert len(plan.transfers) == 4 * 8 * 3  # every rank holds one of four terms of its row
    sent = plan.traffic.sent_between
    assert sent.min() == sent.max()
    plan = plan_reduction(
        {"w0": partial(axes="dp", mesh="dp2.tp2")}, home(4, cut=False), ClusterSpec(1, 4, 200, 25, 10)
    )
    assert plan.inter_node_bytes == 0
    nodes = plan_reduction({"w0": partial(axes="tp", mesh="dp4.tp2")}, home(cut=False), FOUR_BY_TWO)
    assert nodes.inter_node_bytes == 0  # each node holds both terms
    assert nodes.intra_node_bytes == 8 * 8 * 4 * 4
    assert nodes.to_json()["intra_node_bytes"] == nodes.intra_node_bytes
    assert nodes.predicted_s == pytest.approx(8 * 4 * 4 / 200e9 + 10e-6)
    assert nodes.max_send_bytes == 8 * 4 * 4


def test_what_is_reduced_already_moves_once():
    """Without partial axes a reduction is a switch: each element comes from one holder, or stays."""
    plan = plan_reduction({"w0": partial(axes="")}, home(), FOUR_BY_TWO)
    plan.verify()
    assert len(plan.transfers) == 0
    assert plan.links_s == 0


def test_bad_input():
    good = {"w0": partial()}
    cases = [
        ({}, "w0: no gradient is given"),
        ({**good, "w1": partial()}, "w1: layout 'home' has no such parameter; did you mean 'w0'"),
        ({"w0": partial((8, 5))}, r"w0: the gradient is \[8, 5\], but the parameter \[8, 4\]"),
        (
            {"w0": replace(partial(), dist=replace(partial().dist, partial=(("dp", "max"),)))},
            "partial max over axis 'dp'",
        ),
        ({"w0": (partial(mesh="dp4"), partial(mesh="dp4", first=4, dtype=torch.float64))}, "torch.float32 and of"),
        ({"w0": (partial(mesh="dp4"), partial(mesh="dp4", first=3))}, "two stages share a rank"),
    ]
    for sources, why in cases:
        with pytest.raises(ReductionError, match=why):
            plan_reduction(sources, home(), FOUR_BY_TWO)
    with pytest.raises(ClusterError, match="too small"):
        plan_reduction(good, home(), ClusterSpec(1, 4, 1, 1, 1))


def test_fingerprints_tell_plans_apart():
    prints = {
        plan_reduction({"w0": partial(axes=axes)}, home(cut=cut), FOUR_BY_TWO).fingerprint
        for axes in ("", "dp", "tp", "dp.tp")
        for cut in (True, False)
    }
    assert len(prints) == 8
