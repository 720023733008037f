"""How numbers and tables are written for people, and how a command ends."""

from __future__ import annotations

import pytest
import typer
from rich.console import Console

from fxpar.cli.console import Work, human_seconds, print_table, reporting
from fxpar.ir.columns import folded

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


def printed(width: int, terminal: bool = True) -> str:
    console = Console(width=width, force_terminal=terminal, color_system=None, highlight=False)
    rows = [("dp2.tp2+sp", "4", "12 all_reduce, 3 all_gather"), ("pp2.tp2+zb_h1", "4", "")]
    with console.capture() as caught:
        print_table(console, ("strategy", "ranks", "collectives"), rows, right=(1,))
    return caught.get()


def test_a_table_breaks_at_columns_and_between_words():
    wide = printed(50)
    assert wide.splitlines()[1] == "dp2.tp2+sp         4  12 all_reduce, 3 all_gather"
    assert printed(10, terminal=False) == wide
    assert printed(30) == (
        "dp2.tp2+sp\n  ranks 4\n  collectives 12 all_reduce, 3\n    all_gather\npp2.tp2+zb_h1\n  ranks 4\n"
    )


def test_words_stay_whole():
    assert folded("a layers.0.attention.q_proj.weight b-c", 20, "- ", "  ") == [
        "- a",
        "  layers.0.attention.q_proj.weight",
        "  b-c",
    ]


def test_ctrl_c_is_one_line_and_status_130(capsys):
    @reporting
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 130
    assert capsys.readouterr() == ("", "interrupted\n")
