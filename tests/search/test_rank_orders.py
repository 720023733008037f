"""Orders of ranks: what a search takes from the lowering of another order, and that they only make a set faster."""

from __future__ import annotations

import functools

import pytest

from fxpar.cli.console import human_seconds
from fxpar.cli.shallow import order_lines, set_json
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.strategy import Strategy
from fxpar.search import border_guess
from fxpar.search.border_guess import BorderGuess
from fxpar.search.going_home import terms_of
from fxpar.search.ordered import Ordered
from fxpar.search.price import Candidate, candidate
from fxpar.search.pricing import SetPricer
from fxpar.search.rank_orders import orders_of, with_best_orders
from fxpar.search.switching import ModelSwitches
from fxpar.store import home_layout, home_of, param_specs
from fxpar.switch import layout_of, plan_switch
from fxpar.switch.node_first import cheapest_cost
from tests.repeat import thinned
from tests.search.shallow import shallow

ONE_NODE = ClusterSpec(1, 8, intra_gb_per_s=0.2, inter_gb_per_s=0.2, latency_us=0)
TWO_NODES = ClusterSpec(2, 4, intra_gb_per_s=200, inter_gb_per_s=2, latency_us=0)


@functools.cache
def priced(text: str) -> Candidate:
    stack = shallow("stack", 2)
    return candidate(stack.lower, Strategy.parse(text), ONE_NODE, stack.depth, (64, 4096))


def texts(text: str, cluster: ClusterSpec) -> list[str]:
    return [str(one) for one in orders_of(Strategy.parse(text), cluster)]


def test_orders():
    assert texts("dp4.tp2+sp", ONE_NODE) == ["dp4.tp2+sp", "dp2.tp2.dp2+sp", "tp2.dp4+sp"]
    assert texts("dp4.tp2+sp", TWO_NODES) == ["dp4.tp2+sp", "dp2.tp2.dp2+sp"]
    assert texts("dp2.pp2.tp2", TWO_NODES) == ["dp2.pp2.tp2", "pp2.tp2.dp2"]
    assert texts("dp2.cp2.tp2", TWO_NODES) == ["dp2.cp2.tp2", "dp2.tp2.cp2"]
    assert texts("cp4.tp2[*.ffn: tp8]", ONE_NODE) == ["cp4.tp2[*.ffn: tp8]", "cp2.tp2.cp2[*.ffn: tp8]"]
    for alone in ("tp8", "dp8+zero3", "tp4 > tp4", "dp4 | tp4", "dp2.tp2.dp2", "dp1", "cp4.tp2[*.experts: ep8]"):
        assert texts(alone, ONE_NODE) == [alone]


@pytest.mark.parametrize("cluster", [ONE_NODE, TWO_NODES, ClusterSpec(4, 2, 200, 25, 5), ClusterSpec(4, 6, 200, 25, 5)])
@pytest.mark.parametrize("text", ["dp2.cp2.tp2", "cp4.tp6", "dp12.pp2", "dp2.pp2.cp2.tp3+zero1"])
def test_ranks_of_a_node_stay_together(text, cluster):
    def nodes(strategy: Strategy) -> set[frozenset]:
        mesh, found = strategy.mesh, {}
        for rank in mesh.ranks:
            found.setdefault(cluster.node_of(rank), set()).add(frozenset(mesh.coordinate(rank).items()))
        return set(map(frozenset, found.values()))

    usual, *others = orders_of(Strategy.parse(text), cluster)
    assert all(nodes(one) == nodes(usual) for one in others)
    assert len(
        {tuple(one.mesh.rank(c) for c in map(usual.mesh.coordinate, usual.mesh.ranks)) for one in others}
    ) == len(others)


STRATEGIES = [
    "dp4.tp2+sp",
    "dp2.cp2.tp2+sp+zero3",
    "dp2.pp2.tp2+sp",
    "dp4.tp2+sp+zero2",
    "cp4.tp2+zero1[*.ffn: tp8]",
    "rows2.dp2.tp2",
]


@pytest.mark.parametrize("text", thinned(STRATEGIES, STRATEGIES[:1]))
def test_what_is_known_of_an_order_is_what_its_lowering_says(text):
    base = priced(text)
    *_, strategy = orders_of(base.strategy, ONE_NODE)
    mine, lowered = Ordered(strategy, ONE_NODE, base.anchors, base), priced(str(strategy))
    program = lowered.programs[0]
    assert mine.layout(layout_of(base.programs[0])).params == layout_of(program).params
    assert terms_of(base.programs[0], mine.moved) == terms_of(program)
    assert mine.cost == lowered.cost
    assert list(mine.by_position) == list(lowered.by_position)
    assert (mine.reduce_s, mine.reduced) == (lowered.reduce_s, lowered.reduced)
    assert mine.at(512) == lowered.at(512)


def test_bytes_that_are_guessed_are_those_that_travel():
    """Of gradients what an order saves beside another one."""
    names = ("tp2.dp4+sp", "dp4.tp2+sp", "dp2.tp4+sp")
    layouts = [layout_of(priced(name).programs[0]) for name in names]
    _, home = home_of(layouts[0])
    for cluster in (ONE_NODE, TWO_NODES):
        guess = BorderGuess(cluster, 8)
        for sources, target in (([home], 0), ([home], 1), ([home, layouts[0]], 2), ([home, layouts[1]], 2)):
            plan = plan_switch(sources[0], layouts[target], cluster, extra_holders=sources[1:])
            assert tuple(guess.switch(sources, layouts[target])) == (plan.intra_node_bytes, plan.inter_node_bytes)
    found, costs = [], []
    for name in names[:2]:
        terms = terms_of(priced(name).programs[0])
        masters = home_layout(param_specs(priced(name).programs[0]), 8)
        costs.append(cheapest_cost(terms, masters.only(terms), ONE_NODE, sums_bytes=64 << 20))
        found.append(BorderGuess(ONE_NODE, 8).reduction(terms.values(), (masters.params[fqn] for fqn in terms)))
    saved = costs[1].intra_node_bytes - costs[0].intra_node_bytes
    assert saved > 0
    assert found[1].inside - found[0].inside == pytest.approx(saved, rel=0.02)


def test_a_few_nodes_stand_for_many(monkeypatch):
    names, cluster = ("dp4.tp2+sp", "dp2.tp4+sp"), ClusterSpec(4, 2, 200, 25, 0)
    layouts = [layout_of(priced(name).programs[0]) for name in names]
    every = BorderGuess(cluster, 8).switch(layouts[1:], layouts[0])
    monkeypatch.setattr(border_guess, "MOST_NODES", 2)
    assert len(BorderGuess(cluster, 8)._ranks) == 4
    few = BorderGuess(cluster, 8).switch(layouts[1:], layouts[0])
    assert few == pytest.approx(every)
    assert every.between > 0


def test_sets_take_less_with_their_ranks_permuted():
    """What a rank has under tp4 lies in what it has under tp2, so that nothing is sent and it is the same memory."""
    stack = shallow("stack", 2)
    switches = ModelSwitches(ONE_NODE, stack.depth, stack.outlines)
    pricer = SetPricer(ONE_NODE, stack.depth, stack.outlines, ((40,) * 64 + (500,) * 8,) * 2, None, switches=switches)
    chosen = [(64, priced("dp4.tp2+sp")), (512, priced("dp2.tp4+sp"))]
    settled = pricer.price(chosen, settle=True)
    assert all(group.tokens for group in settled.groups)
    best = with_best_orders(chosen, settled, pricer)
    assert best.strategies == ("tp2.dp4+sp", "tp4.dp2+sp")
    assert best.predicted_s < settled.predicted_s
    assert (best.switch_s, best.reduce_s) < (0.7 * settled.switch_s, settled.reduce_s)
    assert best.usual is settled
    seconds = (human_seconds(one.switch_s) for one in (settled, best))
    assert order_lines(best)[0].startswith(f"ranks are permuted: switches {' -> '.join(seconds)}, reductions ")
    assert set_json(best)["usual_order"]["groups"][0]["strategy"] == "dp4.tp2+sp"
    lowered = [(64, priced("tp2.dp4+sp")), (512, priced("tp4.dp2+sp"))]
    assert best == pricer.price(lowered, settle=True)
    alone = [(512, priced("dp8"))]
    static = pricer.price(alone, settle=True)
    assert with_best_orders(alone, static, pricer) is static
    assert (order_lines(static), set_json(static)["usual_order"]) == ([], None)
