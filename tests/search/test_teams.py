"""Strategies side by side are priced as what is lowered for them takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fxpar.cost.group import program_cost
from fxpar.cost.link_bytes import added, sent_by_position
from fxpar.errors import SequenceFitsNowhereError
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.memory import predict_memory, steady_micro_batches
from fxpar.passes.share_weights import ALIGN_BYTES
from fxpar.search.chosen import problem_of
from fxpar.search.driver import _Search, find_plan
from fxpar.search.going_home import going_home, sent_home
from fxpar.search.known import KnownModel
from fxpar.search.price import Depth
from fxpar.search.problem import Problem
from fxpar.search.teams import TeamsCandidate, _pair, without_teams
from tests.search.shallow import shallow, stack_rows
from tests.search.test_driver import LINKS, lowered, outlined, problem, rows
from tests.search.test_simulate import priced

FOUR = replace(LINKS, devices_per_node=4)


def of(text: str, known: KnownModel | None = None) -> TeamsCandidate:
    known = known or KnownModel(lowered, outlined, FOUR, Depth(2, whole=True), (256, 1024))
    found = known.named(Strategy.parse(text))
    assert isinstance(found, TeamsCandidate)
    return found


@pytest.mark.parametrize("text", ["cp2 | dp2", "pp2 | tp2+sp"])
def test_a_price_is_that_of_the_program(text):
    one = of(text)
    program = lower(rows(), text, for_store=True)
    assert one.cost == program_cost(program, FOUR)
    assert one.reduce_s == pytest.approx(going_home(program, FOUR).predicted_s, rel=1e-12)
    assert one.reduced == sent_home(program, FOUR)
    assert one.sent == tuple(replica for team in program.teams for replica in added(sent_by_position(team, FOUR)))
    memory = one.predicted(512)
    found = predict_memory(program, {"T": 512}, micro_batches=steady_micro_batches(one.strategy), cluster=FOUR)
    assert memory.home_bytes == found.master_bytes + found.home_gradient_bytes
    assert memory.optimizer_bytes == found.optimizer_bytes
    # Weights lie in an arena, where each begins at a place of its own; messages are at most twice as large.
    padding = 2 * ALIGN_BYTES * len(program.params())
    pairs = [(memory.weight_bytes, found.weight_bytes), (memory.staging_bytes, found.staging_bytes)]
    pairs.append((memory.weight_bytes + memory.step_bytes, found.weight_bytes + found.step_bytes))
    assert all(0 <= mine - least <= padding for mine, least in pairs), pairs


@pytest.mark.nightly
def test_a_deep_model_is_priced_from_shallow_ones():
    """Teams of one stage and of two, on all layers and from few."""
    model = shallow("stack", 8)
    known = KnownModel(model.lower, model.outlines, FOUR, model.depth, (256, 1024))
    one, program = of("pp2 | tp2+sp", known), lower(stack_rows(8), "pp2 | tp2+sp", for_store=True)
    for mine, whole in zip(one.cost.teams, program_cost(program, FOUR).teams, strict=True):
        assert mine.seconds([300, 20]) == pytest.approx(whole.seconds([300, 20]), rel=1e-9)
    found = predict_memory(program, {"T": 512}, micro_batches=4, cluster=FOUR)
    memory = one.predicted(512)
    assert memory.peak_bytes - memory.staging_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    nodes = KnownModel(model.lower, model.outlines, replace(LINKS, nodes=2), Depth(1200), (256, 1024))
    assert of("cp2 | dp2", nodes).predicted(512).staging_bytes == 128 << 20  # messages, and sums inside of nodes


def test_equal_teams_are_lowered_once():
    """Those that stand alike in their nodes."""
    seen = []

    def counted(strategy, layers):
        seen.append((str(strategy), strategy.offset))
        return lowered(strategy, layers)

    cluster = replace(LINKS, nodes=4, devices_per_node=2)
    known = KnownModel(counted, outlined, cluster, Depth(2, whole=True), (256, 1024))
    one = of("cp2 | cp2 | dp1 | dp1 | dp1 | dp1", known)
    assert seen == [("cp2", 0), ("dp1", 0), ("dp1", 1)]
    assert len(one.teams) == 6


def test_as_many_equal_teams_take_what_replicas_take():
    alone, teams = priced("dp2", memory_bytes=None).plan, priced("dp1 | dp1", memory_bytes=None).plan
    assert teams.predicted_s == pytest.approx(alone.predicted_s, rel=1e-9)
    assert (teams.switch_s, teams.reduce_s) == (alone.switch_s, alone.reduce_s)
    assert teams.memory_bytes["dp1 | dp1"] == pytest.approx(alone.memory_bytes["dp2"], rel=0.01)


def test_teams_are_one_of_a_set():
    """Beside others with limits, and where memory is tight."""
    found = priced("dp2:64", "dp1 | dp1", memory_bytes=None)
    assert set(found.statics) == {"dp2", "dp1 | dp1"}
    with pytest.raises(SequenceFitsNowhereError, match=r"dp1 \| dp1 needs"):
        priced("dp1 | dp1", memory_bytes=1_000_000)


def test_rings_are_priced():
    assert priced("ring2", memory_bytes=None).plan.predicted_s > 0


def test_rings_are_proposed_where_heads_bound_cp():
    """A model of 2 key-value heads: four ranks for a sequence are faster with keys and values that travel."""
    batches = ((8192,), (8000,))
    without, given = (
        problem_of(lambda _: rows(), Depth(2, whole=True), FOUR, batches, 8192, None, rings) for rings in (False, True)
    )
    new = {str(one) for one in given.shapes} - {str(one) for one in without.shapes}
    assert new == {"ring2.cp2", "ring2.tp2+sp"}
    few = tuple(map(Strategy.parse, ("cp4", "cp2.tp2+sp", "ring2.cp2")))
    assert set(few) <= set(given.shapes)
    found = find_plan(replace(given, shapes=few), lowered, outlined)
    assert (found.best_static.strategies, found.refused) == (("ring2.cp2",), {})


def searching(memory_bytes: int | None, teams: bool) -> Problem:
    return replace(problem(memory_bytes, names=("dp4", "dp2.cp2")), cluster=FOUR, teams=teams)


def test_a_search_with_teams_is_not_worse():
    """Where memory is tight, there are many guesses at teams."""
    teams, alone = (find_plan(searching(3_500_000, each), lowered, outlined) for each in (True, False))
    assert teams.lower_bound_s <= teams.plans[0].predicted_s <= alone.plans[0].predicted_s
    assert teams.best_static == alone.best_static
    assert teams.evaluated > alone.evaluated


def test_pairs_are_a_wide_replica_and_narrow_ones():
    given = searching(None, True)
    search = _Search(given, given.known(lowered, outlined), lambda _: None)
    search.lower_all()
    *alone, one = search.candidates
    assert [each.name for each in alone] == ["dp4", "dp2.cp2"]
    least = search.seconds[-1]
    assert one.name == "cp2 | dp2"
    assert one.cost == of("cp2 | dp2").cost
    priced = search.pricer.price([(512, one)])
    assert priced is not None
    assert least[:, 0, -1].mean() <= priced.predicted_s - priced.exposed_s
    assert np.isinf(without_teams(search.candidates, search.seconds)[-1]).all()


def test_narrow_pipelines_stand_one_by_one_and_may_have_as_many_ranks():
    given = replace(problem(None, names=("dp2.tp2+sp", "dp2.pp2")), cluster=FOUR, teams=True)
    search = _Search(given, given.known(lowered, outlined), lambda _: None)
    search.lower_all()
    assert [one.name for one in search.candidates[2:]] == ["tp2+sp | pp2"]
    wide, narrow = search.candidates[:2]
    three = _pair(wide, narrow, 3)
    assert three.name == "tp2+sp | pp2 | pp2 | pp2"
    assert three.cost.teams == (wide.cost, *[narrow.cost] * 3)
    assert _pair(wide, narrow, 8).name == "tp2+sp | dp8.pp2"
