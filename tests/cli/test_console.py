"""How numbers are written for people."""

from __future__ import annotations

import pytest
from rich.console import Console

from fxpar.cli.console import Work, human_seconds

TIMES = {0.0: "0 µs", 1.26e-6: "1.26 µs", 41e-6: "41 µs", 999.6e-6: "1 ms", 0.0123: "12.3 ms", 0.4567: "457 ms"}


@pytest.mark.parametrize(("seconds", "text"), {**TIMES, 0.99996: "1 s", 12.34: "12.3 s", 1234.5: "1234 s"}.items())
def test_times_have_three_digits_and_no_small_one_is_zero(seconds, text):
    assert human_seconds(seconds) == text


def test_a_spinner_says_for_how_long(monkeypatch):
    work = Work("reading llama")
    console = Console(width=40)
    times = iter([12.0, 15.4])
    monkeypatch.setattr("fxpar.cli.console._BEGUN", 10.0)
    monkeypatch.setattr("fxpar.cli.console.time.monotonic", lambda: next(times))
    with console.capture() as caught:
        console.print(work)
        work.update("lowering")
        console.print(work)
    assert caught.get() == "reading llama, 2 s\nlowering, 5 s\n"
