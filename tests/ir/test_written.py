"""What somebody wrote is read with bounds: each mistake is one sentence that names key and value."""

from __future__ import annotations

import pytest

from fxpar.ir.written import MOST, OutOfBoundsError, brief, in_bounds, read

NINES = "9" * 400


def test_what_is_good_is_read():
    text = f'a = 1\nb = [1.5, -{MOST}]\n[c]\nd = "{NINES}"\ne = {MOST}\n'
    assert read(text, "TOML") == {"a": 1, "b": [1.5, -MOST], "c": {"d": NINES, "e": MOST}}
    assert read('{"a": [true, null, 2]}', "JSON") == {"a": [True, None, 2]}


@pytest.mark.parametrize(
    "text", ["inf", "nan", "-inf", "1e400", "1e300", "10000000000000000000", "-9223372036854775809"]
)
def test_numbers_beyond_64_bits(text):
    with pytest.raises(OutOfBoundsError, match=r"^a\.b = .* cannot be used: a number is finite and below 2\*\*63"):
        read(f"[a]\nb = [1, {text}]\n", "TOML")


@pytest.mark.parametrize("digits", [400, 5000])  # Python itself reads 4,300
def test_the_digits_of_a_long_number_are_counted(digits):
    said = rf"^steps = a number of {digits:,} digits cannot be used"
    with pytest.raises(OutOfBoundsError, match=said):
        read(f"seed = 0\nsteps = {'9' * digits}\n", "TOML")
    with pytest.raises(OutOfBoundsError, match=said):
        read(f'{{"seed": 0, "steps": {"9" * digits}}}', "JSON")


@pytest.mark.parametrize("depth", [60, 5000])
@pytest.mark.parametrize(("kind", "text"), [("TOML", "x = {}"), ("JSON", "{}")])
def test_brackets_without_end(kind, text, depth):
    with pytest.raises(OutOfBoundsError, match="nested more than 50 deep"):
        read(text.format("[" * depth + "]" * depth), kind)


def test_a_key_that_stands_twice():
    assert read('{"a": {"b": 1}, "b": {"a": 1}}', "JSON")
    with pytest.raises(OutOfBoundsError, match=r"^its key 'b' stands twice in one table; keep one$"):
        read('{"a": [{"b": 1, "c": 2, "b": 1}]}', "JSON")


@pytest.mark.parametrize("kind", ["TOML", "JSON"])
def test_what_is_not_well_formed_is_another_error(kind):
    with pytest.raises(ValueError, match=f"^it is not {kind}: ") as error:
        read("[x", kind)
    assert not isinstance(error.value, OutOfBoundsError)


def test_values_that_did_not_come_from_a_text():
    assert [in_bounds(value) for value in (1, -1.5, True, "9" * 50, None, MOST)] == [True] * 6
    assert [in_bounds(value) for value in (10**400, float("nan"), -float("inf"))] == [False] * 3
    assert (brief(7), brief("x"), brief(10**5000)) == ("7", "'x'", "a number of 5,001 digits")
