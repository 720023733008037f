"""The cost of a micro-batch: monotone, less with better devices and links, and of a pipeline its slowest ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.cost.calls import handed_on_s, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import group_cost, kept_cost, rank_costs, simulated_s
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.errors import ClusterError, CostModelError
from tests.cost.programs import DEVICE, NODE, PAIR, program


def test_a_replica_of_four_ranks_is_four_times_as_fast():
    fast = ClusterSpec(1, 4, 1e9, 1e9, 0.0, device=replace(DEVICE, launch_us=0.0))
    one, four = group_cost(program("dp4"), fast), group_cost(program("cp4"), fast)
    assert four.per_square_s == pytest.approx(one.per_square_s / 4)
    assert four.per_token_s == pytest.approx(one.per_token_s / 4, rel=0.2)
    two = group_cost(program("dp2.tp2"), fast)
    assert two.per_square_s == pytest.approx(one.per_square_s / 2)


def test_a_cost_is_kept_for_its_program_and_cluster_alone():
    one, other = program("dp4"), program("cp4")
    assert kept_cost(one, NODE) == group_cost(one, NODE)
    assert kept_cost(one, NODE) is kept_cost(one, NODE)
    assert kept_cost(other, NODE) == group_cost(other, NODE) != kept_cost(one, NODE)
    slow = replace(NODE, device=replace(DEVICE, launch_us=1e6))
    assert kept_cost(one, slow) == group_cost(one, slow) != kept_cost(one, NODE)
    many = {kept_cost(replace(one), NODE) for _ in range(5)}  # each dies at once, and the next may lie where it lay
    assert many == {kept_cost(one, NODE)}
    assert kept_cost(replace(other), NODE) == kept_cost(other, NODE)


@pytest.mark.parametrize(("strategy", "ranks"), [("rows4", 4), ("tp4[*.attention: rows2.tp2]", 4), ("dp2.rows2", 2)])
def test_a_document_in_a_bin_is_the_work_of_its_ranks_alone(strategy, ranks):
    """The other ranks have as much from documents of theirs: in the mean each pays its share of a document, as if heads
    were cut.
    """
    fast = ClusterSpec(1, 4, 1e9, 1e9, 0.0, device=replace(DEVICE, launch_us=0.0))
    one, bins = group_cost(program("dp4"), fast), group_cost(program(strategy), fast)
    assert bins.per_square_s == pytest.approx(one.per_square_s / ranks)


@given(st.lists(st.integers(1, 10**6), max_size=5), st.integers(1, 10**6))
def test_cost_is_monotone(lengths, more):
    cost = group_cost_of_tp()
    assert cost.seconds([*lengths, more]) > cost.seconds(lengths)
    assert cost.seconds([*lengths, more + 1]) > cost.seconds([*lengths, more])


@functools.cache
def group_cost_of_tp() -> GroupCost:
    return group_cost(program("tp4"), NODE)


def test_faster_devices_links_and_memory_cost_less():
    def total(cluster: ClusterSpec = NODE, **better: Any) -> float:
        device = replace(cluster.device, **better)
        return group_cost(program("tp4"), replace(cluster, device=device)).seconds([4096])

    assert total(tflops=800.0) < total()
    assert total(memory_gb_per_s=4000.0) < total()
    assert total(launch_us=0.0) < total()
    assert total(replace(NODE, intra_gb_per_s=800.0)) < total()
    assert total(replace(NODE, latency_us=0.0)) < total()


def test_an_axis_between_nodes_takes_the_network():
    def token_s(strategy: str, cluster: ClusterSpec) -> float:
        return group_cost(program(strategy), cluster).per_token_s

    assert token_s("tp4", PAIR) > 2 * token_s("tp4", NODE)
    assert token_s("dp2.tp2", PAIR) == token_s("dp2.tp2", NODE)  # its tp is inside of a node
    assert token_s("cp2.tp2", NODE) < token_s("cp2.tp2", PAIR) < token_s("tp4", PAIR)
    capped = replace(PAIR, node_gb_per_s=10.0)  # of which the ring has all
    assert token_s("tp4", capped) > 2 * token_s("tp4", PAIR)


# ------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_cannot_be(bad):
    with pytest.raises(CostModelError, match="per_token_s"):
        GroupCost(0.0, bad, 0.0)


def test_cluster_with_too_few_devices():
    with pytest.raises(ClusterError, match="too small"):
        group_cost(program("dp4"), replace(NODE, devices_per_node=2))


def test_a_pipeline_costs_what_its_slowest_ranks_compute_and_hand_on():
    pipeline = program("pp2.tp2")
    stages = [sum((call.seconds for call in node_costs(stage, NODE)), Polynomial()) for stage in pipeline.stages]
    sent = [handed_on_s(pipeline, 0, "sent", NODE), handed_on_s(pipeline, 1, "sent_grad", NODE)]
    busy = [float((one + message).at(4096)) for one, message in zip(stages, sent, strict=True)]
    cost = group_cost(pipeline, NODE)
    assert cost.seconds([4096]) == pytest.approx(max(busy))
    assert (cost.stages, cost.virtual) == (2, 1)


def test_of_ranks_that_take_turns_the_mean_counts():
    """A pipeline whose last position is slow: it gets the core that the others leave."""
    alone = group_cost(program("pp2"), PAIR)
    shared = replace(PAIR, device=replace(PAIR.sustained, shared_by=4.0))
    cost = group_cost(program("pp2"), shared)
    positions = [float(one.at(4096)) for one in rank_costs(program("pp2"), PAIR).values()]
    assert cost.shared_by == 4
    assert cost.seconds([4096]) == pytest.approx(sum(positions) / 2)
    assert alone.seconds([4096]) == pytest.approx(max(positions))
    hardly = replace(PAIR, device=replace(PAIR.sustained, shared_by=1.0001))
    assert group_cost(program("pp2"), hardly).seconds([4096]) == pytest.approx(max(positions), rel=1e-3)


@given(
    st.lists(st.tuples(st.floats(0.1, 4.0), st.floats(0.0, 0.1)), min_size=1, max_size=4),
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_stages_that_differ_take_no_more_than_the_slowest_in_all_places(numbers, lengths, kind):
    """And with stages that are alike, in micro-batches that are, just as much."""
    positions = [Polynomial(Fraction(fixed), Fraction(each)) for fixed, each in numbers]
    runs = sorted(([n] for n in lengths), reverse=True)
    slowest = GroupCost(max(a for a, _ in numbers), max(b for _, b in numbers), 0.0, len(numbers), schedule=kind)
    assert simulated_s(positions, kind, runs) <= slowest.replica_s(runs) * (1 + 1e-9)
    alike = [positions[0]] * len(positions)
    cost = GroupCost(*numbers[0], 0.0, len(numbers), schedule=kind)
    same = [[lengths[0]]] * len(lengths)
    assert simulated_s(alike, kind, same) == pytest.approx(cost.replica_s(same))


def test_a_pipeline_waits_for_its_slowest_stage():
    """Three micro-batches: the second stage is busy with all of them, behind and in front of a third and two of the
    first one's second.
    """
    positions = [Polynomial(Fraction(1)), Polynomial(Fraction(4))]
    assert simulated_s(positions, "1f1b", [[1]] * 3) == pytest.approx(1 / 3 + 3 * 4 + 2 / 3)
