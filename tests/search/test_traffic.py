"""What sets send over links, against bytes that are counted by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from fxpar.batching import BatchPlan, GroupPlan, RunTime
from fxpar.batching.borders import Borders
from fxpar.ir.strategy import Strategy
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.traffic import SetTraffic, orders_of
from fxpar.search.variants import without_idle
from fxpar.store import home_of
from fxpar.switch import layout_of
from fxpar.switch.order import SwitchSchedule
from tests.search.test_driver import LINKS, known, lowered, outlined

NODES = replace(LINKS, nodes=2, devices_per_node=2)
BATCHES = ((64, 128, 64), (256,))  # 256 tokens each
TOKENS, DIM, FP32 = 256, 64, 4
PARAMS = 75456
# Of two layers: an all-reduce behind the embedding and behind each attention and feed-forward, and as many in the
# backward; in the loss an all-gather and an all-reduce of a number per token. Over two ranks, each sends what it has.
TENSOR_PARALLEL = 2 * TOKENS * FP32 * (10 * DIM + 2)


def traffic(*limits: tuple[int, str]) -> SetTraffic:
    found = priced(*limits).traffic
    assert found is not None
    return found


def priced(*limits: tuple[int, str]) -> PricedSet:
    model = known(NODES)
    chosen = []
    for limit, text in limits:
        one = model.candidate(Strategy.parse(text), lambda _: None)
        assert one is not None
        chosen.append((limit, one))
    pricer = SetPricer(NODES, model.depth, outlined, BATCHES, None, switches=model.switches)
    assert pricer.price(chosen) is not None
    assert pricer.price(chosen).traffic is None  # nothing is counted for what a search tries
    found = pricer.price(chosen, settle=True)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "inside", "between"),
    [
        ("dp2.tp2", TENSOR_PARALLEL, 0),
        ("tp2.dp2", 0, TENSOR_PARALLEL),
        ("dp2.pp2", 0, 2 * TOKENS * DIM * FP32),  # stages are nodes: forward and backward of each token
    ],
)
def test_micro_batches_send_what_their_collectives_do(text: str, inside: int, between: int) -> None:
    found = traffic((512, text))
    assert found.to_json()["groups"] == [{"intra_node_bytes": inside, "inter_node_bytes": between}]
    assert found.micro_batches == found.groups[0]


def test_gradients_go_to_the_other_node_once() -> None:
    """Each element is the sum of what two replicas have, and lies at home on one node."""
    found = traffic((512, "dp2.tp2")).reductions
    assert found.inter_node == PARAMS * FP32
    # Two groups of a mini-batch add to the same gradients.
    alike = traffic((64, "dp2.tp2"), (512, "dp2.tp2+remat"))
    both = BatchPlan((GroupPlan(0, (), 0.0), GroupPlan(1, (), 0.0)))
    assert replace(alike, plans=[both], orders=[("dp2.tp2", "dp2.tp2+remat")]).reductions.inter_node == PARAMS * FP32


def test_what_overlaps_is_sent_in_the_order_in_which_an_engine_runs_it() -> None:
    """It may keep apart groups that would add to the same gradients, where reductions hide behind groups."""
    found = traffic((64, "dp2.tp2"), (256, "dp4"), (512, "dp2.tp2+remat"))
    names, reduced = [one.name for one in found.chosen], [one.reduced.inter_node for one in found.chosen]
    plan = BatchPlan(tuple(GroupPlan(number, ((),), 0.01) for number in range(3)))
    for overlap, inter_node in ((True, sum(reduced)), (False, sum(reduced[1:]))):
        borders = Borders(found.switching, found.gradients, overlap)
        (order,) = orders = orders_of(borders, found.switching, names, [plan])
        runs = dict.fromkeys(names, RunTime(0.01, 1))
        least = min(borders.exposed_s(one, runs) for one in permutations(names))
        assert borders.exposed_s(order, runs) == least
        assert replace(found, plans=[plan], orders=orders).reductions.inter_node == inter_node


def test_switches_of_a_set_are_those_that_an_engine_plans() -> None:
    """In a mini-batch that runs both."""
    found = traffic((64, "dp2.pp2"), (512, "dp2.tp2"))
    order = found.switching.order(["dp2.pp2", "dp2.tp2"])
    found = replace(found, plans=[BatchPlan((GroupPlan(0, (), 0.0), GroupPlan(1, (), 0.0)))], orders=[order])
    layouts = {name: layout_of(lowered(Strategy.parse(name), 2), name) for name in ("dp2.pp2", "dp2.tp2")}
    alone = SwitchSchedule(layouts, home_of(layouts["dp2.tp2"])[1], NODES, resident=layouts)
    hops = [alone.plan(name, order[:number]) for number, name in enumerate(order)]
    assert all(hop.inter_node_bytes for hop in hops)
    assert found.switches.intra_node == sum(hop.intra_node_bytes for hop in hops)
    assert found.switches.inter_node == sum(hop.inter_node_bytes for hop in hops)
    # Of stages both replicas are on one node, and half of what each has is added on the other.
    assert found.reductions.inter_node == 2 * PARAMS * FP32


def test_a_group_without_tokens_is_left_out() -> None:
    """What mini-batches take and send is as before; the last group stays although it has none."""
    before = priced((100, "dp2.pp2"), (256, "tp2.dp2"), (512, "dp2.pp2"))
    found = without_idle(before)
    assert [group.tokens > 0 for group in before.groups] == [False, True, False]
    assert found.groups == before.groups[1:]
    assert (found.predicted_s, found.simulated_s) == (before.predicted_s, before.simulated_s)
    assert found.memory_bytes == before.memory_bytes
    json = [one.traffic.to_json() for one in (before, found) if one.traffic is not None]
    assert json[0]["groups"].pop(0) == {"intra_node_bytes": 0, "inter_node_bytes": 0}
    assert json[0] == json[1]
    assert without_idle(found) is found


def test_replicas_in_step_send_for_those_that_run_idle() -> None:
    """The second mini-batch is one sequence: the other replica gathers weights as well."""
    found = traffic((512, "dp2.tp2+sp+zero3"))
    idle = [group for plan in found.plans for group in plan.groups if not all(group.replicas)]
    assert [group.lockstep for group in idle] == [True]
    fixed = sum(float(one.between.c0) for one in found.chosen[0].sent)
    assert found.micro_batches.inter_node == fixed
    assert fixed > 0
