"""Sequences that are shared out among strategies side by side: each once, where it fits, and not later than may be."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpar.batching import GroupCost, length_groups, plan_batch
from fxpar.batching.packing import TICKS_PER_S
from fxpar.batching.teams import TeamsLoad, team_rules
from fxpar.cost.group_cost import TeamsCost
from fxpar.errors import TokenBudgetError
from fxpar.ir.strategy import Strategy
from fxpar.rounds import TeamCost, plan_rounds
from tests.batching.planning import SQUARE, no_switches, seconds

FORMATIONS = (
    "cp4 | cp2 | dp2",
    "cp2 | dp1 | dp1",
    "tp2 > tp2 | dp4",
    "dp2+zero3 | cp2",
    "rows2 | dp2",
    "cp2 | cp2",
)
IN_STEP = "cp2+zero3 | dp2+zero3"
LIMIT = 64


def costs_of(formation: str, shared_by: float = 1.0) -> TeamsCost:
    """Of each team: the more ranks a replica has, the faster it is, and the more it pays per micro-batch."""
    (group,) = length_groups({LIMIT: formation}, world=world_of(formation))
    found = []
    for team in group.teams:
        ranks = team.strategy.world // team.strategy.replicas
        stages = team.strategy.pipeline_size
        each = 1 / (ranks // stages) / stages
        found.append(GroupCost(1e-6 * ranks, 1e-6 * each, 1e-8 * each, stages=stages, shared_by=shared_by))
    return TeamsCost(tuple(found))


def world_of(formation: str) -> int:
    return Strategy.parse(formation).world


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=40), st.sampled_from((*FORMATIONS, IN_STEP)), st.booleans())
@example([64, 1], "cp4 | cp2 | dp2", True)
def test_each_sequence_runs_once_where_it_fits(lengths, formation, packed):
    (group,) = groups = length_groups({LIMIT: formation}, world=world_of(formation))
    cost = costs_of(formation)
    plan = plan_batch(lengths, groups, [cost], no_switches, packed=packed)
    (part,) = plan.groups
    assert sorted(part.sequences) == list(range(len(lengths)))
    assert len(part.replicas) == sum(team.replicas for team in group.teams)
    left = iter(part.replicas)
    for team in group.teams:
        for micro in itertools.chain(*itertools.islice(left, team.replicas)):
            assert all(lengths[i] <= team.limit for i in micro.sequences)
            assert micro.tokens == sum(lengths[i] for i in micro.sequences) <= team.token_budget
    assert part.lower_bound_s <= part.predicted_s * (1 + 1e-9)


def test_the_time_is_that_of_the_slowest_team():
    lengths, formation = [60, 50, 20, 10, 9, 8, 7, 3, 3, 2], "cp2 | dp2"
    (group,) = groups = length_groups({LIMIT: formation}, world=4)
    cost = costs_of(formation)
    (part,) = plan_batch(lengths, groups, [cost], no_switches).groups
    first, second = group.teams
    times = []
    for team, mine, one in zip(group.teams, (part.replicas[:1], part.replicas[1:]), cost.teams, strict=True):
        alone = type(part)(0, mine, 0.0)
        times.append(seconds(alone, one, lengths) if any(mine) else 0.0)
        assert len(mine) == team.replicas
    assert part.predicted_s == pytest.approx(max(times))
    assert (first.token_budget, second.token_budget) == (64, 32)  # as many tokens per rank


def test_in_step_each_position_takes_what_the_slowest_team_does():
    lengths, formation = [38, 24, 30, 19, 29, 24, 17], IN_STEP
    groups = length_groups({LIMIT: formation}, world=4)
    cost = costs_of(formation)
    (part,) = plan_batch(lengths, groups, [cost], no_switches).groups
    of = (cost.teams[0], cost.teams[1], cost.teams[1])  # by replica
    pairs = zip(part.replicas, of, strict=True)
    runs = [[one.seconds([lengths[i] for i in micro.sequences]) for micro in mine] for mine, one in pairs]
    positions = [max(found) for found in itertools.zip_longest(*runs, fillvalue=0.0)]
    assert part.lockstep
    assert part.predicted_s == pytest.approx(sum(positions))
    assert sum(positions) > max(map(sum, runs))


@given(
    st.lists(st.integers(1, LIMIT), min_size=1, max_size=5),
    st.sampled_from(("cp2 | dp1 | dp1", "cp2 | dp2", "tp2 > tp2 | dp4")),
    st.sampled_from((1.0, 2.0)),
)
def test_no_sharing_undercuts_the_bound(lengths, formation, shared_by):
    (group,) = length_groups({LIMIT: formation}, world=world_of(formation))
    rules = team_rules(group, costs_of(formation, shared_by), True)
    members = list(enumerate(lengths))
    found = TeamsLoad.of(members, rules)
    times = []
    for who in itertools.product(range(len(rules)), repeat=len(members)):
        if all(rules[t].limit >= length for (_, length), t in zip(members, who, strict=True)):
            mine = [[m for m, t in zip(members, who, strict=True) if t == team] for team in range(len(rules))]
            times.append(TeamsLoad._of(tuple(map(tuple, mine)), rules).time)
    best = min(times)
    assert found.bound <= best <= found.time
    assert found.time <= 1.5 * best + 2e-5 * TICKS_PER_S  # longest first is near it, moves bring it nearer


def test_a_long_sequence_leaves_the_others_to_the_small_teams():
    """What FlexSP is for: short sequences do not pay for the degree that a long one needs."""
    formation = "cp4 | dp4"
    groups = length_groups({4096: formation}, world=8, token_budget=4096)
    wide = GroupCost(1e-3, 1e-5, 1e-9)  # whose attention sends a lot
    narrow = GroupCost(1e-3, 4e-6, 4e-9)
    lengths = [4096, *[256] * 32]
    (part,) = plan_batch(lengths, groups, [TeamsCost((wide, narrow))], no_switches).groups
    assert next(micro.sequences for micro in part.replicas[0]) == (0,)
    assert sum(len(micro.sequences) for replica in part.replicas[1:] for micro in replica) >= 28


def test_rounds_are_chosen_as_well_as_where_nothing_else_is_planned():
    """Formations are groups like others, and the planner of mini-batches is no worse at rounds than the one of rounds
    alone, which cuts lengths where it likes, but whose teams wait for each other.
    """
    devices, longest, rng = 8, 16384, random.Random(0)
    groups = length_groups({longest: "rounds(cp8)"}, world=devices)

    def sent(degree: int) -> float:
        return 0.0 if degree == 1 else 2e-6 * (7 if degree > 4 else 1)

    def of_degree(degree: int) -> GroupCost:
        return GroupCost(5e-3, (2e-5 + sent(degree)) / degree, 2e-9 / degree)

    costs = []
    for group in groups:
        teams = tuple(of_degree(team.strategy.world // team.replicas) for team in group.teams)
        costs.append(TeamsCost(teams) if group.strategy.teams else teams[0])
    tables = {
        degree: TeamCost(*(1e3 * value for value in astuple(of_degree(degree))[:3]), 2048 * degree)
        for degree in (1, 2, 4, 8)
    }
    took, alone, bound, chosen = 0.0, 0.0, 0.0, set()
    for number in range(4):
        lengths = [min(longest, int(rng.lognormvariate(6.2, 1.4)) + 1) for _ in range(64)] + [14000] * (number % 2)
        plan = plan_batch(lengths, groups, costs, no_switches)
        chosen.add(tuple(part.strategy for part in plan.groups))
        rounds = plan_rounds(lengths, devices, tables, devices_per_node=4)
        took, alone, bound = took + plan.predicted_s, alone + rounds.predicted_ms / 1e3, bound + rounds.any_cut_bound_ms
    assert took <= 1.01 * alone
    assert took <= 1.05 * bound / 1e3
    assert len(chosen) >= 3  # not the same rounds in each mini-batch


def test_another_formation_is_no_merged_group():
    """Sequences of one limit have several formations to run in."""
    groups = length_groups({LIMIT: "rounds(cp4)"}, world=4)
    costs = [costs_of(str(g.strategy)) if g.strategy.teams else SQUARE.times(1 + (g.replicas > 1)) for g in groups]
    plan = plan_batch([30, 8, 3], groups[1:3], costs[1:3], no_switches)
    assert [part.group for part in plan.groups] == [1]
    assert not plan.merged


def test_budgets_are_those_of_the_largest_team():
    (group,) = length_groups({100: "cp4 | cp2 | dp1"}, world=7, token_budget=200)
    assert [(team.limit, team.token_budget) for team in group.teams] == [(100, 200), (100, 100), (50, 50)]
    assert [group.takes(100), group.takes(101)] == [True, False]
    with pytest.raises(TokenBudgetError):
        length_groups({100: "cp4 | cp2 | dp1"}, world=7, token_budget=99)


def test_a_team_may_say_how_many_tokens_it_has():
    """Then it holds longer sequences than its ranks would, and so does the formation."""
    text = "rounds(cp2.tp2+tokens(100), tp2+tokens(70), dp1+remat+tokens(90))"
    groups = length_groups({80: text}, world=4, token_budget=95)  # what is written goes first
    found = {str(g.strategy): (g.limit, [(t.limit, t.token_budget) for t in g.teams]) for g in groups}
    assert found == {
        "dp2.tp2+tokens(70)": (70, [(70, 70)]),
        "cp2.tp2+tokens(100)": (80, [(80, 100)]),
        "tp2+tokens(70) | dp2+remat+tokens(90)": (80, [(70, 70), (80, 90)]),
        "dp4+remat+tokens(90)": (80, [(80, 90)]),
    }
    with pytest.raises(TokenBudgetError, match=r"100 of strategy.*at least 101"):
        length_groups({101: text}, world=4)


def test_a_group_beside_teams_is_chosen_by_time():
    """Formations are groups like others: sequences ride in them, and they are merged into others."""
    groups = length_groups({32: "dp4", LIMIT: "cp2 | dp2"}, world=4)
    dear = GroupCost(1.0, 1e-6, 0.0)
    plan = plan_batch([8, 9, 60], groups, [dear, costs_of("cp2 | dp2")], no_switches)
    assert plan.order == (1,)
    assert plan.merged == ((0, 1),)


def test_rules_take_ranks_and_costs_of_their_team():
    (group,) = length_groups({LIMIT: "cp2 | dp2"}, world=4)
    rules = team_rules(group, TeamsCost((SQUARE, SQUARE.times(2))), True)
    assert [(rule.limit, rule.ranks, rule.packing.replicas) for rule in rules] == [(64, 2, 1), (32, 2, 2)]
    assert rules[1].adds(10) == 2 * rules[0].adds(10)


@pytest.mark.parametrize(("formation", "bins"), [("tp4 | rows4", 1), ("rows4 | tp4", 4)])
def test_a_bin_is_as_long_as_in_the_team_that_holds_most(formation, bins):
    """Whoever moves limits asks whether bins hold them."""
    (group,) = length_groups({LIMIT: formation}, world=8, token_budget=LIMIT * bins)
    assert group.bin_budget == max(replace(group, limit=LIMIT * bins).teams, key=lambda team: team.limit).limit
    assert group.bin_budget == LIMIT * bins
