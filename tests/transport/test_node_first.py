"""Reductions through the nodes on real ranks against dense sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ExecutionError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.switch import ParamLayout, PlacedParam
from fxpar.switch.node_first import plan_node_first
from fxpar.switch.terms import GradientPlacement
from fxpar.torch_api.threaded import run_threads
from fxpar.transport import Holding, NodeFirstReduction, Staging, reduction_on
from fxpar.transport.node_first import SUMS_SLOT
from tests.repeat import examples
from tests.transport.cases import SHAPES, WORLD, drawn, local_tensors
from tests.transport.test_reduction import Sum, partials, term_tensors

TWO_BY_TWO = ClusterSpec(2, 2, 200, 25, 10)


@st.composite
def sums(draw) -> Sum:
    """Targets that are cut on one dim over all ranks, or not at all, as home layouts are."""
    sources, params = {}, {}
    for kind, shape in enumerate(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))):
        source = draw(partials(shape, draw(st.sampled_from((torch.float32, torch.bfloat16)))))
        cut = draw(st.integers(-1, len(shape) - 1))
        dims = tuple((AxisShard("home"),) if d == cut else () for d in range(len(shape)))
        target = PlacedParam(shape, torch.float64, (DistConfig(Mesh((("home", WORLD),)), dims),))
        for layer in range(draw(st.integers(1, 3))):
            sources[f"{layer}.{kind}"], params[f"{layer}.{kind}"] = source, target
    return Sum(sources, ParamLayout("home", WORLD, params), TWO_BY_TWO, draw(st.booleans()), draw(st.booleans()))


def test_random_reductions_are_dense_sums():
    planned = []
    for number, case in enumerate(drawn(sums(), examples(30))):
        plan = plan_node_first(case.sources, case.target, case.cluster, sums_bytes=(64 << 20, 100, 1)[number % 3])
        assert plan is not None
        plan.verify()
        planned.append((case, plan, term_tensors(case, number), term_tensors(case, number + 1000)))

    def work(rank: int) -> None:
        staging = Staging()
        for number, (case, plan, first, second) in enumerate(planned):
            target = Holding(case.target, local_tensors(case.target, None, rank, None, case.flat, case.padded))
            for tensor in target.tensors.values():
                tensor.fill_(7)
            options = {"staging_bytes": (64 << 20, 256, 2000)[number % 3], "checked": number % 4 == 0}
            reduction = NodeFirstReduction(plan, rank, target, staging=staging, merge=number % 5 != 0, **options)
            reduction.run(first[0][rank], accumulate=False)
            check(case, target, first[1], rank)
            reduction.run(second[0][rank])
            check(case, target, {fqn: first[1][fqn] + second[1][fqn] for fqn in first[1]}, rank)
            collected = max(one.sums.bytes_of_rank(rank) for one in plan.rounds)
            assert staging.slots[SUMS_SLOT].numel() >= collected
            own = Staging()  # a rank whose node collects nothing needs no room
            NodeFirstReduction(plan, rank, target, staging=own)
            assert (own.slots[SUMS_SLOT].numel() > 0) == (collected > 0)

    def check(case, target: Holding, totals, rank: int) -> None:
        expected = local_tensors(case.target, totals, rank, None, False, case.padded)
        assert expected.keys() == target.tensors.keys()
        for fqn, tensor in expected.items():
            assert torch.equal(target.tensors[fqn], tensor), (fqn, case)

    run_forked(WORLD, work)
    del planned[15:]
    run_threads(WORLD, work)  # ranks without messages between pairs


def test_a_report_counts_both_exchanges_and_sums_are_the_same_in_every_run():
    shape, home = (8, 4), Mesh((("home", 4),))
    mesh = Mesh((("dp", 4),))
    sources = {"w": GradientPlacement(shape, DistConfig(mesh, ((), ()), (("dp", "sum"),)), torch.float32)}
    cut = DistConfig(home, ((AxisShard("home"),), ()))
    target = ParamLayout("home", 4, {"w": PlacedParam(shape, torch.float32, (cut,))})
    plan = plan_node_first(sources, target, TWO_BY_TWO)
    assert plan is not None
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) * 10.0 ** (3 * term) for term in range(4)]
    inside = [values[0] + values[1], values[2] + values[3]]

    def work(rank: int) -> int:
        tensors = {"w": torch.zeros(2, 4)}
        reduction = reduction_on(plan, rank, Holding(target, tensors))
        for _ in range(2):
            report = reduction.run({"w": values[rank]}, accumulate=False)
            assert torch.equal(tensors["w"], cut.take(inside[0] + inside[1], rank))
        return report.sent_bytes

    sent = run_forked(4, work)
    assert sum(sent) == plan.intra_node_bytes + plan.inter_node_bytes
    assert plan.inter_node_bytes == 2 * 8 * 4 * 4 // 2  # each node sends the half of its sum that is not at home there


def test_staging_on_another_device_is_refused():
    shape = (8, 4)
    dist = DistConfig(Mesh((("dp", 4),)), ((), ()), (("dp", "sum"),))
    cut = DistConfig(Mesh((("home", 4),)), ((AxisShard("home"),), ()))
    target = ParamLayout("home", 4, {"w": PlacedParam(shape, torch.float32, (cut,))})
    plan = plan_node_first({"w": GradientPlacement(shape, dist, torch.float32)}, target, TWO_BY_TWO)
    assert plan is not None
    with pytest.raises(ExecutionError, match="staging is on meta"):
        NodeFirstReduction(plan, 0, Holding(target, {"w": torch.zeros(2, 4)}), staging=Staging("meta"))
    assert replace(plan, rounds=()).exchanges == ()
