"""`fxpar passes`: the ladder in order, descriptions, unknown names."""

from __future__ import annotations

from fxpar import pass_registry
from fxpar.lowering import default_passes
from tests.cli.helpers import fxpar


def test_list_is_in_the_order_of_the_ladder():
    status, out, _ = fxpar("passes")
    assert status == 0
    words = [line.split() for line in out.splitlines()[1:]]
    steps = [row[1] for row in words if row[0].isdigit()]
    assert steps == [step.name for step in default_passes()]
    assert {row[1] if row[0].isdigit() else row[0] for row in words} == set(pass_registry.available())
    assert all(len(row) > 4 for row in words)  # each has a description


def test_description():
    status, out, _ = fxpar("passes", "casts")
    assert status == 0
    assert out.startswith("casts\n\n")
    assert "Before: " in out
    assert "Cost: " in out


def test_unknown_name():
    status, out, err = fxpar("passes", "cats")
    assert (status, out) == (1, "")
    assert "there is no pass 'cats'; did you mean 'casts'" in err


def test_a_plugin_that_cannot_be_loaded_does_not_hide_the_others(monkeypatch):
    monkeypatch.setitem(pass_registry.BUILTIN, "broken", "no_such_module:Pass")
    status, out, _ = fxpar("passes")
    assert status == 0
    assert "No module named 'no_such_module'" in out
    assert "casts" in out
