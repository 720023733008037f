"""Placements that a user gives by the names of weights."""

from __future__ import annotations

import json

import pytest

from fxpar.errors import OverrideError
from fxpar.ir.dist_config import R, Shard
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import parse_override


def test_overrides_are_parsed():
    assert parse_override("*", "S(0)@tp") == Shard(0)
    assert parse_override("*", " S(12) @ tp ") == Shard(12)
    assert parse_override("*", "R@tp") == R
    assert parse_override("*", "R") == R


WRONG_PLACEMENTS = ["", "S", "S()", "S(-1)", "S(0)@dp", "S(0)@", "Shard(0)", "P", "r", "S(0),S(1)", "S(0)tp"]


@pytest.mark.parametrize("text", WRONG_PLACEMENTS)
def test_override_errors(text):
    with pytest.raises(OverrideError, match=r"override 'layers\.\*': .* is not a placement\. Write 'S\(0\)@tp'"):
        Strategy.parse("tp2", overrides={"layers.*": text})


def test_order_of_overrides_is_kept():
    overrides = {"b.*": "R", "a.*": "S(1)"}
    strategy = Strategy.parse("tp2", overrides=overrides)
    assert [pattern for pattern, _ in strategy.overrides] == ["b.*", "a.*"]
    again = Strategy.from_json(json.dumps(strategy.to_json()))
    assert [pattern for pattern, _ in again.overrides] == ["b.*", "a.*"]
