"""Order search: the published sums, the targets, and small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import OrderError
from fxpar.lowering import lower
from fxpar.store import home_layout, param_specs, wire_layout
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch import order as order_module
from fxpar.switch.node_first import cheapest_reduction
from fxpar.switch.order import Leaving, SwitchSchedule, cheapest_order
from fxpar.switch.terms import gradient_placements
from tests.captured import llama
from tests.repeat import thinned
from tests.switch.large import layouts_32b
from tests.switch.moving import simple_layout

C = {"C1": "S1 S4 S2", "C2": "S1 S4 S3 S2", "C3": "S1 S5 S4 S3 S2"}
NODES = {"25/200": (25, None), "25/100": (25, 100), "12.5/50": (12.5, 50)}


def search(combination: str, network: str, planner: str, **options) -> SwitchSchedule:
    inter, node = NODES[network]
    layouts = {name: layouts_32b()[name] for name in C[combination].split()}
    return SwitchSchedule(layouts, None, ClusterSpec(4, 8, 200, inter, 0, node), planner, gradients="chain", **options)


# GB between nodes and seconds, for the given order, the best one with the same first graph, and the best of all.
PUBLISHED = [
    ("C1", "25/200", 260, (0.55, 0.34, 0.27)),
    ("C1", "25/100", 260, (0.66, 0.37, 0.29)),
    ("C1", "12.5/50", 260, (1.31, 0.70, 0.53)),
    ("C2", "25/200", 348, (0.73, 0.47, 0.36)),
    ("C2", "25/100", 348, (0.90, 0.47, 0.39)),
    ("C2", "12.5/50", 348, (1.78, 0.85, 0.72)),
    ("C3", "25/200", 657, (1.18, 0.86, 0.42)),
    ("C3", "25/100", 657, (1.71, 1.29, 0.49)),
    ("C3", "12.5/50", 657, (3.36, 2.53, 0.91)),
]


@pytest.mark.parametrize(
    ("combination", "network", "gigabytes", "times"), thinned(PUBLISHED, (PUBLISHED[1], PUBLISHED[8]))
)
def test_published_sums(combination, network, gigabytes, times):
    searched = search(combination, network, "hotspa")
    given = searched.evaluate(C[combination].split())
    assert given.inter_node_bytes / 1e9 == pytest.approx(gigabytes, abs=0.5)
    plans = given, searched.best("S1"), searched.best()
    for plan, seconds in zip(plans, times, strict=True):
        assert plan.predicted_s == pytest.approx(seconds, abs=0.0061)


@pytest.mark.parametrize(
    ("combination", "target"), thinned([("C1", 130.1), ("C2", 153), ("C3", 350)], [("C1", 130.1), ("C3", 350)])
)
def test_targets_with_relays(combination, target):
    best = search(combination, "25/200", "relay", by="bytes").best("S1")
    assert best.order[0] == "S1"
    assert best.inter_node_bytes / 1e9 <= target


def test_every_hop_is_accounted_for():
    plan = search("C1", "25/200", "hotspa").evaluate(("S1", "S2", "S4"))
    hops = [(hop.kind, hop.source, hop.target) for hop in plan.hops]
    assert hops == [
        ("weights", "S1", "S2"),
        ("weights", "S2", "S4"),
        ("gradients", "S2", "S4"),
        ("gradients", "S4", "S1"),
    ]
    without = replace(search("C1", "25/200", "hotspa"), gradients="none").evaluate(("S1", "S2", "S4"))
    assert without.hops == plan.hops[:2]
    assert plan.inter_node_bytes == sum(hop["inter_node_bytes"] for hop in plan.to_json()["hops"])


def test_training_costs_what_the_engine_plans():
    """From and to the layout of the optimizer, past what ran before; the order is the engine's."""
    cluster = ClusterSpec(2, 2, 100, 5, 10)
    programs = {name: lower(llama(layers=2).graph, name, for_store=True) for name in ("tp4", "pp2.dp2", "dp2.tp2+sp")}
    layouts = {name: layout_of(program) for name, program in programs.items()}
    specs = param_specs(programs["tp4"])
    masters = home_layout(specs, 4)
    weights = wire_layout(masters, specs)
    terms = {name: gradient_placements(program) for name, program in programs.items()}
    found = SwitchSchedule(layouts, weights, cluster, resident=tuple(layouts), gradients=Leaving(terms, masters)).best()
    engine = SwitchSchedule(layouts, weights, cluster).keeping(tuple(layouts))
    assert found.order == engine.order(list(layouts))
    plans = [engine.plan(name, found.order[:number]) for number, name in enumerate(found.order)]
    assert engine.least_s(list(layouts)) == pytest.approx(sum(plan.predicted_s for plan in plans), abs=1e-9)
    plans += [cheapest_reduction(terms[n], masters, cluster, n) for n in found.order]
    assert [(hop.kind, hop.source, hop.target) for hop in found.hops] == [
        *(("weights", "home", name) for name in found.order),
        *(("gradients", name, "home") for name in found.order),
    ]
    for hop, plan in zip(found.hops, plans, strict=True):
        assert hop.inter_node_bytes == plan.inter_node_bytes
        assert hop.intra_node_bytes == plan.intra_node_bytes
        assert hop.predicted_s == pytest.approx(plan.predicted_s)
    alone = SwitchSchedule(layouts, weights, cluster, gradients=Leaving(terms, masters)).evaluate(found.order)
    assert alone.kept == ()
    assert alone.intra_node_bytes + alone.inter_node_bytes > found.intra_node_bytes + found.inter_node_bytes


TWO_NODES = ClusterSpec(2, 2, 100, 1, 0)


def chain(layouts: list[ParamLayout], **options) -> SwitchSchedule:
    """HotSPa's flow by bytes."""
    given = {"by": "bytes", "gradients": "chain", **options}
    return SwitchSchedule({one.name: one for one in layouts}, None, TWO_NODES, "relay", **given)


def test_keeping_pays_and_respects_the_budget():
    """whole -> cut -> whole again: a kept copy of the first makes the last hop free."""
    whole, cut, again = (simple_layout(n, t) for n, t in (("whole", "dp4"), ("cut", "tp4@0"), ("again", "dp2.tp2@1")))
    size = whole.max_bytes()
    none = chain([whole, cut, again], gradients="none").evaluate(("whole", "cut", "again"))
    assert none.kept == ()
    assert none.hops[1].inter_node_bytes > 0
    keeping = chain([whole, cut, again], gradients="none", keep_bytes=size)
    plan = keeping.evaluate(("whole", "cut", "again"))
    assert (plan.kept, plan.kept_bytes, plan.inter_node_bytes) == (("whole",), size, 0)
    assert plan.hops[1].holders == ("whole",)
    little = chain([whole, cut, again], gradients="none", keep_bytes=size - 1)
    assert little.evaluate(("whole", "cut", "again")).kept == ()


def test_local_search_finds_what_the_exhaustive_one_does(monkeypatch):
    texts = ("dp4", "tp4@0", "tp4@1", "dp2.tp2@0", "tp2.dp2@1")
    layouts = [simple_layout(text, text, (8, 8)) for text in texts]
    exact = chain(layouts).best()
    monkeypatch.setattr(order_module, "EXHAUSTIVE", 2)
    found = chain(layouts).best()
    assert found.inter_node_bytes == exact.inter_node_bytes
    assert chain(layouts).best("tp4@1").order[0] == "tp4@1"


def test_costs_that_are_known_not_to_be_least_are_not_asked_for():
    costs, asked = {"abc": 3, "acb": 2, "bac": 2, "bca": 5, "cab": 4, "cba": 6}, []

    def cost(order):
        asked.append("".join(order))
        return costs[asked[-1]]

    found = [cheapest_order("abc", cost, lambda *_: 0.0), len(asked)]
    found.append(cheapest_order("abc", cost, lambda *_: 0.0, lambda order: costs["".join(order)] - 0.5))
    assert found == [("a", "c", "b"), 6, ("a", "c", "b")]
    assert asked[6:] == ["acb", "bac"]


def test_bad_requests():
    a, b = simple_layout("dp4", "dp4"), simple_layout("tp4", "tp4@0")
    with pytest.raises(OrderError, match="'tp' is none of the strategies; did you mean 'tp4'"):
        chain([a, b]).best("tp")
    with pytest.raises(OrderError, match="must appear once"):
        chain([a, b]).evaluate(["dp4"])
    assert chain([a]).best().hops == ()
