"""Costs of teams: FlexSP's published constants, and files of constants."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from fxpar.errors import CostModelError, DegreeError, RoundCostError, UnknownRoundCostError
from fxpar.rounds import PUBLISHED, TeamCost, cost_of, read_cost
from fxpar.rounds.plan import homogeneous_ms
from tests.rounds.plain import team_ms

DEGREES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 192 * 1024


def test_published_constants_give_published_figures():
    cost = PUBLISHED["flexsp-7b"]
    assert cost.tokens_per_device(64, CONTEXT) == 6449
    assert cost.states_mib(64, CONTEXT) == pytest.approx(16 * 7.117 * 1024 / 64)
    assert cost.sent_ms(8) == pytest.approx(2.59e-3, rel=2e-3)
    assert cost.sent_ms(64) == pytest.approx(6.4e-3, rel=4e-3)
    assert cost.sent_ms(1) == 0
    team = cost.teams(DEGREES, 64, CONTEXT)[64]
    lengths = np.array([93440, 1280])
    by_hand = (5.128e-6 * (lengths**2).sum() + 0.18396 * lengths.sum()) / 64 + 629.36
    by_hand += 8 * 32 * 4096 * 2 / 2**20 * lengths.sum() / 64 / 4.87
    assert team_ms(team, lengths) == pytest.approx(by_hand, rel=1e-12)
    assert team.tokens == 64 * 6449


def test_the_static_plan_takes_what_its_formula_says():
    """One team of all devices: as many rounds as the tokens need, each sequence by the formula."""
    teams = PUBLISHED["flexsp-7b"].teams((64,), 64, CONTEXT)
    lengths = np.array([93440, 30976, *[1280] * 400])
    found = homogeneous_ms(lengths, 64, teams)
    rounds = -(-lengths.sum() // (64 * 6449))
    assert rounds == 2
    assert found[64] == pytest.approx(rounds * 629.36 + teams[64].sequence_ms(lengths).sum())


def test_parameters_grow_with_the_context_and_bandwidth_is_that_of_the_next_degree():
    cost = PUBLISHED["flexsp-7b"]
    at = [cost.states_mib(64, tokens) for tokens in (1, 4096, CONTEXT, 2 * CONTEXT, 3 * CONTEXT)]
    assert at[0] == at[1] < at[2] < at[3] < at[4]
    assert at[4] - at[3] == pytest.approx(at[3] - at[2])
    assert cost.sent_ms(128) * 128 == pytest.approx(cost.sent_ms(64) * 64)
    assert cost.sent_ms(48) * 48 == pytest.approx(cost.sent_ms(64) * 64)


def test_degrees_that_heads_do_not_allow():
    cost = PUBLISHED["flexsp-7b"]
    assert 128 in cost.teams((128,), 128, CONTEXT)
    with pytest.raises(DegreeError, match="degree 3: it does not divide the 64 heads"):
        cost.teams((1, 3), 64, CONTEXT)


def test_states_that_leave_no_room():
    with pytest.raises(RoundCostError, match=r"take 113\.9 GiB of each of 1 devices"):
        PUBLISHED["flexsp-7b"].teams((1,), 1, CONTEXT)


def test_tokens_that_take_next_to_nothing():
    """Counts stay whole numbers that arrays hold."""
    (team,) = replace(PUBLISHED["flexsp-7b"], token_mib=1e-300).teams((8,), 8, 4096).values()
    assert team.tokens == 8 * 2**40


@pytest.mark.parametrize("wrong", [{"fixed_ms": -1.0}, {"per_token_ms": float("nan")}, {"tokens": 0}])
def test_a_team_that_cannot_be(wrong):
    with pytest.raises(CostModelError, match=next(iter(wrong))):
        TeamCost(**({"fixed_ms": 1.0, "per_token_ms": 1.0, "per_square_ms": 0.0, "tokens": 10} | wrong))


def written(tmp_path, **changed: object) -> str:
    """A file of flexsp-7b's constants; None leaves a key out."""
    data = json.loads(json.dumps(asdict(PUBLISHED["flexsp-7b"]))) | changed
    (tmp_path / "cost.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return str(tmp_path / "cost.json")


def test_a_file_of_constants(tmp_path):
    assert cost_of(written(tmp_path)) == PUBLISHED["flexsp-7b"]
    assert read_cost(written(tmp_path, gi_parameters=7)).states_mib(64, 5) == 16 * 7 * 1024 / 64
    assert read_cost(written(tmp_path, heads=None)).heads == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fixed": 1}, r"key 'fixed' is unknown; did you mean 'fixed_ms'\?"),
        ({"token_ms": None}, "it lacks token_ms"),
        ({"token_ms": "fast"}, 'token_ms = "fast" is not a number'),
        ({"token_mib": 0}, "token_mib = 0 cannot be. Write a number above 0"),
        ({"heads": 1.5}, "heads = 1.5 is not a whole number"),
        ({"mib_per_ms": 3}, "mib_per_ms = 3 is not a table"),
        ({"mib_per_ms": {"two": 3}}, "mib_per_ms has 'two' as a key"),
        ({"mib_per_ms": {"2": -1}}, r"mib_per_ms\.2 = -1 cannot be"),
    ],
)
def test_a_file_with_mistakes(tmp_path, changed, message):
    with pytest.raises(RoundCostError, match=message):
        read_cost(written(tmp_path, **changed))


@pytest.mark.parametrize(("text", "message"), [("[1]", "it holds a list"), ("{", "it is not JSON"), (None, "be read")])
def test_a_file_that_is_none(tmp_path, text, message):
    path = tmp_path / "cost.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RoundCostError, match=message):
        cost_of(str(path))


def test_a_cost_that_is_not_known():
    with pytest.raises(UnknownRoundCostError, match=r"'flexsp-8b'; did you mean 'flexsp-7b'\?"):
        cost_of("flexsp-8b")
