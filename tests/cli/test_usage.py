"""Mistakes of usage are told as all others: `error:`, the word, what to do; below it how the command is written."""

from __future__ import annotations

import pytest

from tests.cli.helpers import fxpar


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dump",), "MODEL is missing: hf:TYPE, hf:TYPE@SIZE or hf:./FOLDER (transformers), pkg.module:function, "),
        (("switch", "mlp", "--to", "tp2"), "--from is missing: Strategy before, such as pp2.tp16"),
        (("rounds", "--devices", "8"), "--lengths is missing: Lengths in tokens: a file (.txt, .json, .npy, .npz), or"),
        (("dump", "mlp", "--stratgy", "tp2"), "fxpar dump has no option --stratgy; did you mean '--strategy'?"),
        (("check", "mlp", "-s", "dp2", "--cluster", "h100"), "fxpar check has no option --cluster\n"),
        (("profile", "-q"), "fxpar profile has no option -q"),
        (("dump", "mlp", "--format", "jsn"), "--format: 'jsn' is not one of 'text', 'json', 'dot', 'graph'; did you"),
        (("memory", "mlp", "--tokens", "many"), "--tokens: 'many' must be a whole number"),
        (("check", "mlp", "--tolerance", "few"), "--tolerance: 'few' must be a number"),
        (("check", "mlp", "--seed", "-1"), "--seed: '-1' must be 0 or more"),
        (("dump", "mlp", "--micro-batches", "4097"), "--micro-batches: '4097' must be 4096 or less"),
        (("memory", "mlp", "-s", "tp2", "--capacity", "much"), "--capacity: 'much' is not a size such as 80GB"),
        (("dump", "mlp", "--strategy"), "--strategy needs a value: --strategy S"),
        (("diff", "mlp", "--passes", "casts"), "--passes needs a value: --passes P1 P2"),
        (("dmp", "mlp"), "there is no command 'dmp'; did you mean 'dump'?"),
        (("x",), "there is no command 'x'. Commands are train, plan, simulate, "),
        (("dump", "mlp", "tp2"), "fxpar dump takes no further word: tp2. Strategies are given with -s tp2"),
        (("check", "mlp", "--seed", "1.5"), "--seed: '1.5' must be a whole number"),
        (
            ("viz", "mlp", "-s", "tp2", "-o", "x.pdf"),
            "--output: a page is HTML: name it .html (--format json writes its ",
        ),
        (
            ("viz", "mlp", "-s", "tp2", "-o", "x.html", "--format", "json"),
            "--output: the data of a page is JSON: name it ",
        ),
        (
            ("dump", "mlp", "-o", "x.svg"),
            "--output: a dump is text, JSON, DOT or a graph, and 'x.svg' names a page or ",
        ),
        (
            ("tasks", "plan", "x.toml", "-o", "x.json"),
            "--output: it is a page or the run as planned: name it .html or ",
        ),
        (("passes", "casts", "cleanup"), "fxpar passes takes no further word: cleanup"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_said(words, said):
    status, out, err = fxpar(*words)
    assert (status, out) == (2, "")
    error, *usage = err.splitlines()
    assert f"{error}\n".startswith(f"error: {said}"), error
    assert usage[0].startswith("Usage: fxpar ")
    assert usage[-1].endswith(" --help describes them")


def test_nothing_said_is_help():
    status, out, err = fxpar()
    assert status == 2
    assert "Commands:" in out + err
