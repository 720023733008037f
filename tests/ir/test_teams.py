"""Formations of rounds: every way to cut the ranks of a strategy into teams of a power of two."""

from __future__ import annotations

import itertools

import pytest

from fxpar.errors import StrategySyntaxError
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations


def sizes(strategy: Strategy) -> tuple[int, ...]:
    """Ranks of each replica of each team."""
    teams = strategy.teams or (strategy,)
    return tuple(team.world // team.replicas for team in teams for _ in range(team.replicas))


@pytest.mark.parametrize(("text", "ranks", "least"), [("cp1", 1, 1), ("cp4", 4, 1), ("cp8", 8, 1), ("cp32", 32, 4)])
def test_every_way_to_cut_the_ranks(text, ranks, least):
    found = formations(f"rounds({text}, {least})")
    powers = [2**power for power in range(ranks.bit_length()) if 2**power >= least]
    want = {
        cut
        for count in range(1, ranks // least + 1)
        for cut in itertools.combinations_with_replacement(sorted(powers, reverse=True), count)
        if sum(cut) == ranks
    }
    assert {sizes(one) for one in found} == want
    assert len(found) == len(want)
    assert sizes(found[0]) == (ranks,)


def test_no_team_straddles_a_multiple_of_its_size():
    for one in formations("rounds(cp8)"):
        for number, team in enumerate(one.teams):
            assert one.of_team(number).offset % (team.world // team.replicas) == 0


def test_a_team_is_the_strategy_on_fewer_ranks():
    names = [str(one) for one in formations("rounds(ring2.cp2+remat)")]
    assert names == ["ring2.cp2+remat", "dp2.cp2+remat", "cp2+remat | dp2+remat", "dp4+remat"]
    assert [str(one) for one in formations("rounds(tp2+sp)")] == ["tp2+sp", "dp2"]


def test_narrower_teams_have_as_many_tokens_per_rank():
    assert [str(one) for one in formations("rounds(cp4+tokens(100), 2)")] == ["cp4+tokens(100)", "dp2.cp2+tokens(50)"]


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
        ("rounds(cp6)", r"powers of two up to 6; .* such as rounds\(cp6, cp3, dp1\)"),
        ("rounds(cp4, 3)", "powers of two"),
        ("rounds(cp4, 8)", "powers of two up to 4"),
        ("rounds(cp16)", r"write rounds\(cp16, 2\)"),
        ("rounds(cp64, 1)", r"write rounds\(cp64, 8\)"),
        ("rounds(cp16, ep4, rows4, tp4, cp4, dp1)", "name fewer strategies"),
        ("rounds(cp4, dp2)", "dp2.*one replica"),
        ("rounds(cp4, cp2 | cp2)", "without teams"),
        ("rounds(cp4, tp3)", "3 ranks do not divide the 4 of cp4"),
        ("rounds(cp4, 2, 1)", "an axis is"),
        ("rounds(cp4, )", "an axis is"),
        ("rounds(cq4)", "cq4"),
        ("rounds(cp4", "an axis is"),
    ],
)
def test_what_cannot_be_cut(text, why):
    with pytest.raises(StrategySyntaxError, match=why):
        formations(text)
