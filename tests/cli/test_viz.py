"""`fxpar viz`: the page, its data, Model Explorer's files, a trace, and clear mistakes."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cli.helpers import fxpar

SMALL = ("mlp",)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Captures of these tests are shared, and are none of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "viz-cache"))


def viz(*words) -> str:
    """stdout of a call that works."""
    status, out, err = fxpar("viz", *SMALL, *words)
    assert status == 0, err
    return out


def test_page(tmp_path):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    out = viz("-s", "dp2,tp2", "-o", page, "--trace", trace, "--tokens", "64", "--micro-batches", "2")
    assert re.fullmatch(rf"{page}: [\d.]+ MB\n{trace}: [\d.]+ k?B\n", out)
    (data,) = re.findall(r'id="fxpar-view">(.*?)</script>', page.read_text(), re.DOTALL)
    document = json.loads(data)
    assert document["strategies"] == ["dp2", "tp2"]
    assert list(document["sections"]) == ["graph", "mesh", "timeline", "memory"]
    assert ["micro-batches", "2"] in document["about"]["tp2"]
    assert json.loads(trace.read_text())["traceEvents"]


def test_data_alone(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("nodes = 2\ndevices_per_node = 2\nintra_gb_per_s = 100\ninter_gb_per_s = 10\nlatency_us = 5\n")
    document = json.loads(viz("-s", "dp2.tp2,dp2.tp2", "-o", "-", "--format", "json", "--cluster", cluster))
    assert document["format"] == "fxpar view"
    assert document["strategies"] == ["dp2.tp2"]
    assert document["made_with"].startswith("fxpar ")
    head = dict(map(tuple, document["about"]["dp2.tp2"]))
    assert head["cluster"] == "2 × 2 devices, 100 GB/s inside a node, 10 between, 5 µs"


def test_a_page_that_was_drawn_before_is_the_same_and_runs_no_program(monkeypatch):
    words = ("-s", "dp2.tp2,pp2", "-o", "-", "--format", "json", "--tokens", "32")
    first = viz(*words)
    with monkeypatch.context() as patch:
        patch.setattr("fxpar.viz.memory.memory_over_time", lambda *_, **__: pytest.fail("computed again"))
        assert viz(*words) == first
    for more in (("--tokens", "64"), ("--micro-batches", "3"), ("--tflops", "7")):
        section = json.loads(viz(*words, *more))["sections"]["memory"]
        assert section == json.loads(viz(*words, *more, "--no-cache"))["sections"]["memory"]
        assert section != json.loads(first)["sections"]["memory"]


PLAN = """fxpar_plan = 1
model = "llama"
options = ["layers=1"]
world = 2
tokens_per_step = 4096
predicted_s = 0.25

[[groups]]
limit = 64
strategy = "dp2"
token_budget = 512
seconds = 0.125

[[groups]]
limit = 256
strategy = "cp2"
token_budget = 1024
"""


@pytest.mark.parametrize("last", ["cp2", "rounds(cp2)"])
def test_a_plan_is_drawn(tmp_path, last):
    """Of rounds each formation, in micro-batches of its own."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("cp2", last))
    status, out, err = fxpar("viz", path, "-o", "-", "--format", "json")
    assert status == 0, err
    document = json.loads(out)
    assert (document["title"], document["strategies"]) == ("llama", ["dp2", "cp2"])
    assert document["notes"][:3] == [
        "planned for 4,096 tokens per mini-batch, 250 ms predicted",
        "sequences of up to 64 tokens: dp2, micro-batches of up to 512 tokens, 125 ms of a mean mini-batch",
        f"sequences of up to 256 tokens: {last}, micro-batches of up to 1,024 tokens",
    ]
    sizes = {name: dict(map(tuple, rows))["micro-batch"] for name, rows in document["about"].items()}
    assert ("512" in sizes["dp2"], "1,024" in sizes["cp2"]) == (True, True), sizes


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (("-s", "tp2"), {}, "--strategy = tp2: "),
        (("--set", "layers=2"), {}, "--set = layers=2: "),
        (("--world", "4"), {}, "it is for 2 ranks, not 4"),
        ((), {"cp2": "cp4"}, "group 2 (limit 256): "),
        ((), {"limit = 64": "limt = 64"}, "did you mean 'limit'?"),
        ((), {"world = 2": "world = 2\nparameters = 7"}, "it is for llama with 7 parameters, and this model has"),
        ((), {"= 4096": f"= {'9' * 400}"}, "tokens_per_step = a number of 400 digits cannot be used"),
        ((), {"= 4096": "= 0"}, "tokens_per_step = 0 must be from 1 to"),
        (
            (),
            {"world = 2": "world = 1000000", '"dp2"': '"dp1000000"', '"cp2"': '"dp1000000"'},
            "strategy 'dp1000000' has 1,000,000 ranks; a page shows every rank, and at most 16,384. Draw the same axes",
        ),
    ],
)
def test_mistakes_with_a_plan(tmp_path, words, change, message):
    path, text = tmp_path / "plan.toml", PLAN
    for old, new in change.items():
        text = text.replace(old, new)
    path.write_text(text)
    status, out, err = fxpar("viz", path, *words, "-o", "-", "--format", "json")
    assert (status, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


def test_a_plan_runs_no_code_unless_it_is_trusted(tmp_path):
    """It may come from anybody; `os:system` with an option `command` would be a command of the shell."""
    called = tmp_path / "called"
    (tmp_path / "mine.py").write_text(f"def make():\n    open({str(called)!r}, 'w').close()\n    return 1\n")
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace('"llama"', f'"{tmp_path / "mine.py"}:make"').replace('"layers=1"', ""))
    status, _, err = fxpar("viz", path, "-o", "-", "--format", "json")
    assert (status, called.exists()) == (1, False)
    assert "mine.py:make, is a Python function, which would be imported and called" in err
    assert "add --trust-plan" in err
    status, _, err = fxpar("viz", path, "-o", "-", "--format", "json", "--trust-plan")
    assert (status, called.exists()) == (1, True)
    assert "returned int" in err


def test_model_explorer(tmp_path):
    graph = tmp_path / "g.json"
    out = viz("-s", "dp2.tp2", "-o", graph, "--format", "model-explorer")
    names = ["g.json", "g.wire_bytes.json", "g.predicted_ms.json", "g.local_bytes.json"]
    assert [line.split(": ")[0].rpartition("/")[2] for line in out.splitlines()] == names
    found = json.loads(graph.read_text())
    assert found["label"] == "mlp"
    ids = {one["id"] for one in found["graphs"]}
    assert ids == {"dp2.tp2 forward", "dp2.tp2 backward", "dp2.tp2 epilogue"}
    assert all(set(json.loads((tmp_path / name).read_text())) <= ids for name in names[1:])


def test_graph_files(tmp_path):
    logical, lowered = tmp_path / "mlp.fxpar", tmp_path / "tp2.fxpar"
    for words in (("-o", logical), ("-s", "tp2", "-o", lowered)):
        status, _, err = fxpar("dump", *SMALL, *words)
        assert status == 0, err
    for words in ((logical, "-s", "tp2"), (lowered,), (lowered, "-s", "tp2")):
        status, out, err = fxpar("viz", *words, "-o", "-", "--format", "json")
        assert status == 0, err
        assert json.loads(out)["strategies"] == ["tp2"]
    status, _, err = fxpar("viz", logical, "-o", "-")
    assert status == 1
    assert "needs a strategy" in err


def test_the_page_is_opened(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "page.html"
    viz("-s", "tp2", "-o", page, "--open")
    assert opened == [page.as_uri()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs a strategy"),
        (("-s", "tp2", "-o", "{tmp}/none/page.html"), "there is no folder"),
        (("-s", "tp2", "-o", "{tmp}"), "it is a folder"),
        (("-s", "tp2", "--trace", "{tmp}"), "it is a folder"),
        (("-s", "tp2", "--open"), "--open needs a file to open"),
        (("-s", "tp2", "--trace", "-"), "are both stdout"),
        (("-s", "tp2", "-o", "{tmp}/x", "--trace", "{tmp}/./x"), "Name another file"),
        (("-s", "tp2", "--cluster", "{tmp}/none.toml"), "cannot be read"),
        (
            (
                "-s",
                "tp2,,dp2",
            ),
            "a strategy in the list is empty",
        ),
        (
            (
                "-s",
                "tq2",
            ),
            "strategy 'tq2'",
        ),
    ],
)
def test_mistakes(tmp_path, words, message):
    given = [word.replace("{tmp}", str(tmp_path)) for word in words]
    status, _, err = fxpar("viz", *SMALL, *(() if "-o" in given else ("-o", "-")), *given)
    assert status == 1
    assert message in err
    assert "Traceback" not in err


def test_without_plotly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = fxpar("viz", *SMALL, "-s", "tp2", "-o", tmp_path / "page.html")
    assert status == 1
    assert 'pip install "fxpar[viz]"' in err
    viz("-s", "tp2", "-o", tmp_path / "data.json", "--format", "json")
