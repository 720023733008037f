"""Words to values, values to JSON."""

from __future__ import annotations

import json
import warnings

import pytest

from fxpar.cli.console import plain_table
from fxpar.cli.request import collected_warnings, named_once, parse_overrides, parse_tokens, to_json
from fxpar.errors import FxparWarning
from fxpar.ir.columns import human_bytes
from fxpar.ir.strategy import Strategy


def test_tokens():
    assert parse_tokens("64,37") == (64, 37)
    assert parse_tokens(None) is None


def test_override_may_hold_equals_signs():
    assert parse_overrides(["*.q.weight=S(0)@tp", "a=b=R@tp"]) == {"*.q.weight": "S(0)@tp", "a=b": "R@tp"}


@pytest.mark.parametrize(
    "data",
    [
        {"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": -float("inf")}},
        {"long": [{"key": "x" * 60, "n": i} for i in range(4)], "empty": {}, "none": None, "text": 'with "quotes"\n'},
    ],
)
def test_json_is_valid_and_complete(data):
    def strict(constant):
        raise AssertionError(constant)

    again = json.loads(to_json(data), parse_constant=strict)
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    assert again == finite


def test_json_breaks_long_values_into_lines():
    text = to_json({"rows": [{"key": "x" * 60, "n": i} for i in range(4)], "short": [1, 2]})
    assert '  {"key": "' in text
    assert ' "short": [1, 2]\n' in text
    assert len(text.splitlines()) == 9


def test_only_our_warnings_are_kept_once():
    notes: list[str] = []
    with collected_warnings(notes):
        for _ in range(2):
            warnings.warn("op x has no rule", FxparWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert notes == ["op x has no rule"]


def test_bytes():
    found = [human_bytes(n) for n in (0, 999, 1500, 150_000, 2_340_000, 10**13)]
    assert found == ["0 B", "999 B", "1.5 kB", "150 kB", "2.3 MB", "10.0 TB"]


def test_plain_table():
    assert plain_table(("a", "n"), [("xyz", "1"), ("y", "22")], (1,)) == "a     n\nxyz   1\ny    22"


def test_what_is_named_again_runs_once_and_is_noted():
    found, notes = named_once([Strategy.parse(text) for text in ("tp2+sp", "dp2", "tp2+sp")])
    assert [str(one) for one in found] == ["tp2+sp", "dp2"]
    assert notes == ["tp2+sp is named 2 times"]
