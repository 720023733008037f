"""Formations of rounds: every way to cut the ranks of a strategy into teams."""

from __future__ import annotations

import itertools
import re

import pytest

from fxpar.errors import DegreeError, StrategySyntaxError, TeamsGatherError
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations, replicas_of_ranks, teams_apart


def sizes(strategy: Strategy) -> tuple[int, ...]:
    """Ranks of each replica of each team."""
    teams = strategy.teams or (strategy,)
    return tuple(team.world // team.replicas for team in teams for _ in range(team.replicas))


@pytest.mark.parametrize(
    ("text", "ranks", "least"),
    [("cp1", 1, 1), ("cp4", 4, 1), ("cp8", 8, 1), ("cp32", 32, 4), ("cp6", 6, 1), ("ring3.cp4", 12, 2)],
)
def test_every_way_to_cut_the_ranks(text, ranks, least):
    found = formations(f"rounds({text}, {least})")
    divisors = [size for size in range(ranks, least - 1, -1) if ranks % size == 0]
    want = {
        cut
        for count in range(1, ranks // least + 1)
        for cut in itertools.combinations_with_replacement(divisors, count)
        if sum(cut) == ranks
    }
    assert {tuple(sorted(sizes(one), reverse=True)) for one in found} == want
    assert len(found) == len(want)
    assert sizes(found[0]) == (ranks,)


@pytest.mark.parametrize("text", ["rounds(cp8)", "rounds(cp6)", "rounds(cp12, 2)"])
def test_no_team_straddles_a_multiple_of_its_size(text):
    for one in formations(text):
        for number, team in enumerate(one.teams):
            assert one.of_team(number).offset % (team.world // team.replicas) == 0


def test_a_team_is_the_strategy_on_fewer_ranks():
    names = [str(one) for one in formations("rounds(ring2.cp2+remat)")]
    assert names == ["ring2.cp2+remat", "dp2.cp2+remat", "cp2+remat | dp2+remat", "dp4+remat"]
    assert [str(one) for one in formations("rounds(tp2+sp)")] == ["tp2+sp", "dp2"]
    names = [str(one) for one in formations("rounds(ring3.cp4, 3)")]
    assert names == ["ring3.cp4", "dp2.ring3.cp2", "ring3.cp2 | dp2.ring3", "dp3.cp4", "dp4.ring3"]


def test_narrower_teams_have_as_many_tokens_per_rank():
    assert [str(one) for one in formations("rounds(cp4+tokens(100), 2)")] == ["cp4+tokens(100)", "dp2.cp2+tokens(50)"]
    assert [str(one) for one in formations("rounds(cp4+tokens(2), 2)")] == ["cp4+tokens(2)", "dp2.cp2+tokens(1)"]


def test_teams_run_what_is_written():
    """Each size has the strategies that are written for it, and equal teams of a formation run the same one."""
    written = "tp2+sp+chunks(2)+tokens(90)", "cp2.tp2[*.mlp: cp4]", "tp2 > dp1 > dp1", "dp1+remat", "cp2"
    names = [str(one) for one in formations(f"rounds({', '.join(written)})")]
    assert names == [
        "cp2.tp2[*.mlp: cp4]",
        "tp2 > dp1 > dp1",
        "dp2.tp2+sp+chunks(2)+tokens(90)",
        "dp2.cp2",
        "tp2+sp+chunks(2)+tokens(90) | dp2+remat",
        "cp2 | dp2+remat",
        "dp4+remat",
    ]
    assert [str(one) for one in formations("rounds(tp6, pp3)")] == ["tp6", "pp3 | pp3"]


def test_sizes_that_do_not_divide_each_other():
    """The pair behind the single rank begins at a multiple of two; of five ranks none can."""
    names = [str(one) for one in formations("rounds(cp6, ring3, cp2+remat, dp1)")]
    assert names[:3] == ["cp6", "dp2.ring3", "ring3 | dp1 | cp2+remat"]
    assert [str(one) for one in formations("rounds(cp5, ring3, cp2)")] == ["cp5", "ring3 | cp2"]


def test_replicas_of_divisors_on_all_ranks():
    found = replicas_of_ranks(Strategy.parse("ring3.cp4+zero3"), (12, 6, 4, 1))
    names = {"ring3.cp4+zero3", "dp2.ring3.cp2+zero3", "dp3.cp4+zero3", "dp12+zero3"}
    assert {str(one) for one in found.values()} == names
    with pytest.raises(DegreeError, match=r"degree 5: .* replicas on all 12 ranks"):
        replicas_of_ranks(Strategy.parse("cp12"), (5,))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "dp2+zero3 | cp2+zero3+remat",
            "'cp2+zero3+remat' has other remat than 'dp2+zero3'. Give all teams the same remat;",
        ),
        ("cp2+zero3+remat | dp2+zero3+remat(selective)", "has other remat than"),
        (
            "tp2+zero3 | dp2+zero3",
            "'dp2+zero3' has other tp and sp than 'tp2+zero3'. Give all teams the same tp and sp;",
        ),
        ("tp2+sp+zero3 | tp2+zero3", "has other tp and sp"),
        ("cp2+zero3 | dp1+zero3", "has replicas of 2 ranks, which do not divide the 3 of all. Take replicas"),
        ("dp1+zero3 | cp2+zero3 | dp1+zero3", "begins at rank 1, no multiple of the 2 ranks of its replicas. Write"),
        ("cp2.dp2+zero3 | dp4+zero3", "does not begin with dp2. Write dp2 first; or write zero2 in place"),
    ],
)
def test_teams_that_surely_gather_otherwise(text, why):
    with pytest.raises(TeamsGatherError, match=re.escape(why)):
        teams_apart(Strategy.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "cp2+zero3 | dp2+zero3+remat(1MB)",
        "cp2+zero3+remat(selective) | dp2+zero3+remat(selective|redo_comm)",
        "cp2+zero3+remat(*.ffn) | dp2+zero3+remat(*.f*)",
        "cp2+zero3[layers.0: +remat] | dp2+zero3+remat",
        "cp2+zero3 | dp2+zero2+remat",
    ],
)
def test_what_teams_gather_may_depend_on_the_model(text):
    """Or each shards over its own ranks."""
    assert len(teams_apart(Strategy.parse(text))) == 2


def test_other_strategies_are_what_they_are():
    strategy = Strategy.parse("cp2 | dp2")
    assert formations(strategy) == formations("cp2 | dp2") == (strategy,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rounds(dp4)", "axes tp, cp, ring"),
        ("rounds(cp2.rows2)", "axes tp, cp, ring"),
        ("rounds(cp2 | cp2)", "one strategy"),
        ("rounds(cp4[*.ffn: tp4])", "without rules"),
        ("rounds(cp4, 8)", "from 1 to 4 ranks, not 8"),
        ("rounds(cp4, 0)", "from 1 to 4 ranks, not 0"),
        ("rounds(cp12)", r"write rounds\(cp12, 2\)"),
        ("rounds(cp16)", r"write rounds\(cp16, 2\)"),
        ("rounds(cp64, 1)", r"write rounds\(cp64, 8\)"),
        ("rounds(cp16, ep4, rows4, tp4, cp4, dp1)", "name fewer strategies"),
        ("rounds(cp4, dp2)", "dp2.*one replica"),
        ("rounds(cp4, cp2 | cp2)", "without teams"),
        ("rounds(cp4, tp3)", "teams of 4, 3 ranks never make 4 with one of 3"),
        ("rounds(cp4, 2, 1)", r"'rounds\(cp4, 2, 1\)': 2 is not a strategy; .* as in rounds\(cp8, 2\)"),
        ("rounds(4)", "4 is not a strategy"),
        ("rounds(cp4, 1.5)", r"1\.5 is not a strategy"),
        ("rounds(cp4, -1)", "-1 is not a strategy"),
        ("rounds(cp4, ２)", "２ is not a strategy"),
        ("rounds()", r"'rounds\(\)': a strategy stands between the commas"),
        ("rounds(cp4, )", r"'rounds\(cp4, \)': a strategy stands between the commas"),
        ("rounds(cq4)", "cq4"),
        ("rounds(cp4", r"'\)' is missing at its end"),
        ("rounds[cp4]", r"strategy 'rounds\[cp4\]': rounds have parentheses, .* as in rounds\(cp8\)"),
        ("rounds cp4", "rounds have parentheses"),
        ("rounds(cp4; cp2)", r"strategy 'rounds\(cp4; cp2\)': strategies are separated by ',', as in rounds\(cp8, cp2"),
        ("rounds(cp4 cp2)", r"strategy 'rounds\(cp4 cp2\)': strategies are separated by ',', as in rounds\(cp8, cp2"),
        ("rounds(cp4)+remat", "stands alone, with flags inside"),
        ("cp2 | rounds(cp2)", "stands alone"),
        ("rounds(cp4) > rounds(cp2)", "stands alone"),
        ("Round(cp4)", "stands alone"),
        ("rounds(rounds(cp2))", "stands alone"),
        ("rounds(cp8+tokens(3), 2)", r"less than one on 2 of 8 ranks; take tokens\(4\) or more"),
    ],
)
def test_what_cannot_be_cut(text, why):
    with pytest.raises(StrategySyntaxError, match=why):
        formations(text)
