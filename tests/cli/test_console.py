"""How numbers are written for people."""

from __future__ import annotations

import pytest

from fxpar.cli.console import human_seconds

TIMES = {0.0: "0 µs", 1.26e-6: "1.26 µs", 41e-6: "41 µs", 999.6e-6: "1 ms", 0.0123: "12.3 ms", 0.4567: "457 ms"}


@pytest.mark.parametrize(("seconds", "text"), {**TIMES, 0.99996: "1 s", 12.34: "12.3 s", 1234.5: "1234 s"}.items())
def test_times_have_three_digits_and_no_small_one_is_zero(seconds, text):
    assert human_seconds(seconds) == text
