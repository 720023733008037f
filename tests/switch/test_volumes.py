"""All twenty switches among the five 32B layouts, against volumes worked out independently for Algorithm 1."""

from __future__ import annotations

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.search.published import FIGURE_8_GB, LAYOUTS
from fxpar.switch import plan_switch
from tests.switch.large import STRATEGIES, layouts_32b

CLUSTER = ClusterSpec(4, 8, intra_gb_per_s=200, inter_gb_per_s=25, latency_us=10)
SHORT = dict(zip(LAYOUTS, STRATEGIES, strict=True))
# GB, of which the reference prints whole numbers, so the tolerance is 1 % or the rounding.
VOLUMES = {f"{SHORT[source]}>{SHORT[target]}": found for (source, target), found in FIGURE_8_GB.items()}
# GB: largest send of a GPU inside nodes and between nodes under Algorithm 1 (one decimal; None: not published).
MAXIMA = {
    "S1>S2": (2.0, 2.0),
    "S1>S3": (4.1, 4.1),
    "S1>S4": (4.1, 4.1),
    "S1>S5": (4.1, 12.2),
    "S2>S1": (4.1, 0),
    "S2>S3": (8.1, 0),
    "S2>S4": (8.2, 0),
    "S2>S5": (8.1, 8.1),
    "S3>S5": (0, 8.1),
    "S4>S1": (1.0, 2.1),
    "S4>S2": (1.0, 2.1),
    "S4>S3": (2.1, 4.1),
    "S4>S5": (2.1, 12.3),
}
GRADIENTS_GB = {"S2>S3": 22.7, "S3>S2": 22.7, "S2>S5": 37.4, "S5>S2": 37.4, "S1>S5": 48.8, "S5>S3": 48.8, "S4>S5": 48.8}


def close(found: float, printed: float, digit: float = 1.0) -> bool:
    return abs(found / 1e9 - printed) <= max(0.01 * printed, 0.5 * digit + 1e-9)


def test_the_model():
    params = layouts_32b()["S1"].params.values()
    total = 0
    for param in params:
        count = 1
        for size in param.shape:
            count *= size
        total += count
    assert round(total / 1e9, 2) == 32.51
    sizes = {name: round(layout.max_bytes() / 1e9, 2) for name, layout in layouts_32b().items()}
    assert sizes == {"S1": 2.03, "S2": 4.06, "S3": 8.13, "S4": 8.23, "S5": 16.26}


@pytest.mark.parametrize("switch", VOLUMES)
def test_volumes(switch):
    source, target = (layouts_32b()[name] for name in switch.split(">"))
    local, inside, between, relayed = VOLUMES[switch]
    plan = plan_switch(source, target, CLUSTER, "hotspa")
    plan.verify()
    assert close(plan.problem.local_bytes, local)
    assert close(plan.intra_node_bytes, inside)
    assert close(plan.inter_node_bytes, between)
    if switch in MAXIMA:
        assert close(plan.traffic.sent_inside.max(), MAXIMA[switch][0], 0.1)
        assert close(plan.traffic.sent_between.max(), MAXIMA[switch][1], 0.1)
    bound_inside, bound_between = plan.lower_bounds
    assert bound_inside * (1 - 1e-9) <= plan.traffic.sent_inside.max() <= bound_inside * 1.015
    assert bound_between * (1 - 1e-9) <= plan.traffic.sent_between.max() <= bound_between * 1.001
    relay = plan_switch(source, target, CLUSTER, "relay")
    relay.verify()
    assert close(relay.inter_node_bytes, relayed)
    assert relay.inter_node_bytes <= plan.inter_node_bytes
    auto = plan_switch(source, target, CLUSTER, "auto")
    assert auto.predicted_s <= min(plan.predicted_s, relay.predicted_s)


@pytest.mark.parametrize(("switch", "between"), GRADIENTS_GB.items())
def test_gradients(switch, between):
    source, target = (layouts_32b()[name].scattered() for name in switch.split(">"))
    plan = plan_switch(source, target, CLUSTER, "hotspa")
    assert close(plan.inter_node_bytes, between, 0.1)
    assert (plan.problem.classes[0].held.sum(1) <= 1).all()  # one owner: no planner has a choice


def test_first_come_sends_what_could_stay():
    layouts = layouts_32b()
    for switch, between in (("S3>S1", 24), ("S5>S4", 146)):
        source, target = (layouts[name] for name in switch.split(">"))
        assert close(plan_switch(source, target, CLUSTER, "first_come").inter_node_bytes, between)
