"""Sets of which not all mini-batches are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.batching import LengthGroup
from fxpar.batching.lengths import LengthLimits
from fxpar.ir.strategy import Strategy
from fxpar.models import load
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.runtime.storage import activation_bytes
from fxpar.search.chosen import lowering
from fxpar.search.doubt import Doubt
from fxpar.search.driver import _Search
from fxpar.search.price import Depth, candidate
from fxpar.search.pricing import SetPricer
from fxpar.store import home_layout, memory_report, param_specs
from fxpar.switch import layout_of
from fxpar.tracer import capture
from tests.search.test_driver import LINKS, known, lowered, outlined, problem
from tests.search.test_traffic import NODES


def test_a_set_is_given_up_where_it_is_sure_to_be_slower():
    doubt = Doubt((1.0, 2.0, 1.0, 4.0), must_s=2.0)
    assert not doubt.gives_up([9.0])  # one mini-batch says little
    assert not doubt.gives_up([1.01, 2.03])  # within 2 %
    assert doubt.sure_s is None
    assert doubt.gives_up([1.5, 3.0])
    assert doubt.sure_s == pytest.approx(0.98 * 3.0)
    assert not Doubt((1.0, 2.0, 1.0, 4.0), must_s=2.0).gives_up([9.0, 9.0, 9.0, 9.0])  # nothing is left to save
    # What it takes at least needs no margin, where that is known of all.
    assert not doubt.rules_out([1.0, 2.0])
    assert Doubt((1.0, 2.0), must_s=1.6).rules_out([1.1, 2.1])
    assert not Doubt((1.0, 2.0), must_s=1.6).rules_out([1.1, 2.0])


def test_what_is_given_up_may_be_asked_again():
    """It has no price until another set must not be faster; a search that needs it may plan it whole."""
    given = problem(None, 1)
    search = _Search(replace(given, batches=given.batches[:1] * 4), known(given.cluster), lambda _: None)
    search.lower_all()
    groups = ((len(search.intervals.edges) - 1, 0),)
    assert search._price(groups, 1e-9) is None
    assert groups not in search.priced
    priced = search._price(groups)
    assert search.given_up[groups] <= priced.predicted_s
    assert search.given_up[groups] > 0.9 * priced.predicted_s


def test_a_set_that_has_settled_says_the_memory_of_its_very_budgets():
    """Between anchors it may lie above the straight line: of halves of a backward other ones are largest there."""
    model = known(NODES)
    one = model.candidate(Strategy.parse("dp2.pp2+zb_h1"), lambda _: None)
    pricer = SetPricer(NODES, model.depth, outlined, ((512, 512),), 7_700_000, switches=model.switches)
    settled = pricer.price([(512, one)], settle=True)
    (group,), (parts,) = settled.groups, settled.memory_parts.values()
    assert parts["micro_batch"] == one.at(group.token_budget).step_bytes > one.memory(group.token_budget).step_bytes


OF_SEVERAL = [("dp2.pp2+zb_h1", 512, 525), ("cp4", 64, 720), ("dp4", 256, 853)]


@pytest.mark.parametrize(("text", "limit", "tokens"), OF_SEVERAL)
def test_no_engine_asks_for_more_than_was_predicted(text, limit, tokens):
    """Rows of several documents: attention keeps results of one at a time beside those of all."""
    strategy = Strategy.parse(text)
    one = known(NODES).candidate(strategy, lambda _: None).at(tokens)
    asked = activation_bytes([lowered(strategy, 2)], [LengthGroup(limit, strategy, tokens)], True, LengthLimits())
    assert asked <= one.step_bytes - one.gradient_bytes


def test_an_engine_asks_each_rank_for_its_own_stages():
    """With positions to learn the first rank has most weights; under zb_h1 the last one has most activations."""
    model = load("gpt", options={"layers": "2"}, device="meta")
    graph = packed_if_proved(capture(model.model, model.loss_fn, model.example_batch))[0]
    lower, _ = lowering(lambda layers: graph)
    strategy, tokens = Strategy.parse("pp2+zb_h1"), 512
    program, group = lower(strategy, 2), LengthGroup(tokens, strategy, tokens)
    home, staging = home_layout(param_specs(program), 2, {}), 2 * layout_of(program, "pp2").max_bytes()

    def asked(ranks: list[int], rank: int | None) -> int:
        activations = activation_bytes([program], [group], True, LengthLimits(), rank)
        return memory_report({"pp2": program}, home, ranks, None, staging, activations).total_bytes

    engine = max(asked([rank], rank) for rank in (0, 1))
    plan = candidate(lower, strategy, LINKS, Depth(2, whole=True), (64, tokens)).at(tokens)
    assert engine < asked([0, 1], None)
    assert engine <= plan.peak_bytes - plan.optimizer_bytes
