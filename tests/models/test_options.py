"""`--set key=value`: parsing and typing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from fxpar.errors import ModelOptionError
from fxpar.models.options import parse_assignments, typed, with_arguments, with_options


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    tied: bool = False


def test_assignments_split_at_the_first_equals_sign():
    assert parse_assignments(["a=1", "b = x=y "]) == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize("item", ["layers", "=3", " =3"])
def test_no_assignment(item):
    with pytest.raises(ModelOptionError, match="write key=value"):
        parse_assignments([item])


@pytest.mark.parametrize(
    ("text", "current", "expected"),
    [
        ("4", 2, 4),
        ("true", False, True),
        ("0", True, False),
        ("1e-5", 0.1, 1e-5),
        ("relu", "gelu", "relu"),
        ("3", None, 3),
        ("None", None, None),
        ("relu", None, "relu"),
        ('["a", "b"]', ["c"], ["a", "b"]),
        ('{"rope_theta": 5.0}', {}, {"rope_theta": 5.0}),
    ],
)
def test_typed_by_the_default(text, current, expected):
    value = typed("key", text, current)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "current", "words"),
    [("x", 2, "an integer"), ("2", True, "true or false"), ("maybe", True, "true or false"), ("x", 0.5, "a number")],
)
def test_wrong_type(text, current, words):
    with pytest.raises(ModelOptionError, match=f"key={text}.*must be {words}"):
        typed("key", text, current)


def test_options_of_a_dataclass():
    assert with_options(Sizes(), {"layers": "5", "tied": "true"}, "it") == Sizes(5, True)


def test_unknown_option_names_the_nearest():
    with pytest.raises(ModelOptionError, match=r"'layer' is unknown to it; did you mean 'layers'\?"):
        with_options(Sizes(), {"layer": "5"}, "it")


def test_unknown_option_lists_what_there_is():
    with pytest.raises(ModelOptionError, match="known options are layers, tied"):
        with_options(Sizes(), {"qqq": "5"}, "it")


def test_arguments_of_a_function():
    def make(width: int, depth: int = 2) -> None: ...

    signature = inspect.signature(make)
    assert with_arguments({"width": "8", "depth": "3"}, signature, "f") == {"width": 8, "depth": 3}
    with pytest.raises(ModelOptionError, match="'width' is an argument of f without a default"):
        with_arguments({}, signature, "f")
    with pytest.raises(ModelOptionError, match="did you mean 'depth'"):
        with_arguments({"dept": "3"}, signature, "f")
