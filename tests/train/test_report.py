"""The report of a run from its parts, and which steps are kept for it. A real run's is in tests/cli/test_train.py."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fxpar.errors import OutputError, VizDependencyError
from fxpar.runtime.spans import GroupRun, RunSpan, StepTrace
from fxpar.switch.layout import ParamLayout
from fxpar.train import report
from fxpar.train.report import ReportParts, _shown, read_metrics, write_report
from fxpar.train.traces import StepSpans, StepTraces, gathered
from tests.viz.steps import CLUSTER, COMPARISON, STRATEGIES, inside, metrics, shown_step, views


@pytest.fixture
def folder(tmp_path):
    """A run's folder after six steps; a crash has left half a line."""
    lines = [json.dumps(line) for line in metrics(6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "lo']))
    return tmp_path


def parts():
    insides = {strategy: inside(strategy) for strategy in STRATEGIES}
    return ReportParts(tuple(views()), insides, (shown_step(),), ("4 ranks",))


def page_data(path):
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="fxpar-view">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.replace("<\\/", "</"))


def test_all_tabs_and_every_step(folder):
    pytest.importorskip("plotly")
    path = write_report(folder, "tiny", parts(), COMPARISON)
    assert path == folder / "report.html"
    data = page_data(path)
    assert data["title"] == "run tiny"
    assert data["notes"] == [report.ABOUT]
    assert set(data["sections"]) == {"run", "graph", "mesh", "timeline", "memory"}
    assert data["sections"]["run"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert data["sections"]["run"]["comparison"]["speedup"] == 1.5
    assert data["strategies"] == list(STRATEGIES)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "measured, step 7, the last one: rank 3" in names


def test_large_graphs_are_left_out(folder, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setattr(report, "MOST_NODES", 10)
    data = page_data(write_report(folder, "tiny", parts()))
    assert set(data["sections"]) == {"run", "timeline"}
    assert re.search(r"nodes are too many .* fxpar viz shows it", data["notes"][0])


def test_without_plotly_there_is_the_trace(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr(report, "MOST_NODES", 0)
    with pytest.raises(VizDependencyError, match=r"plotly.*pip install"):
        write_report(folder, "tiny", parts())
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OutputError, match=r"trace\.json"):
        write_report(tmp_path / "missing", "tiny", parts())


def test_half_a_line_is_left_out(folder):
    assert [step["step"] for step in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_the_next_group_adds_to_do_not_leave(overlap):
    """Of three groups the first two have theirs alike; the engine is made up."""
    one, other = STRATEGIES[0], STRATEGIES[2]
    plan = SimpleNamespace(intra_node_bytes=300, inter_node_bytes=100, predicted_s=0.5)
    moves: Any = SimpleNamespace(
        plan=lambda *names: plan,
        predicted_s=lambda *names: 0.25,
        pass_on=lambda name, following: name == following,
        is_filled=lambda name, visited: name in visited,
        resident=(one, other),
    )
    moves.schedule = moves
    options = SimpleNamespace(overlap=overlap)
    engine = SimpleNamespace(switching=moves, gradients=moves, options=options, cluster=CLUSTER)
    store = SimpleNamespace(home=ParamLayout("home", 4, {}), trained=())
    session: Any = SimpleNamespace(engine=engine, store=store, tasks={})
    ran = tuple(GroupRun(limit, name, (((5,),),) * 4) for limit, name in ((16, one), (64, one), (512, other)))
    insides = {name: inside(name) for name in (one, other)}
    shown = _shown(session, insides, [StepSpans(3, ran, ())] * 4, 0)
    assert [group.reduce_bytes for group in shown.predicted.groups] == [0, 400, 400]
    assert [group.switch_bytes for group in shown.predicted.groups] == [400, 0, 400]
    assert {span.group for span in shown.predicted.spans if span.kind == "reduce"} == {1, 2}


def trace(ms):
    return StepTrace((), 0.0, (("switch", 0, 0.0, ms / 1e3, -1, -1),))


def run(traces, walls, first=1):
    for step, wall_s in enumerate(walls, first):
        traces.take(step, trace(step), 10.0, 11.0)
        traces.choose(wall_s)
    return [one.step for one in traces.kept()]


@pytest.mark.parametrize(
    ("walls", "kept"),
    [
        ([9.0, 1.0, 3.0, 2.0], [4, 3]),  # the first step sets things up
        ([9.0, 1.0, 2.0], [3]),
        ([9.0], [1]),
        ([], []),
    ],
)
def test_the_last_and_the_slowest_step_are_kept(walls, kept):
    assert run(StepTraces(), walls) == kept


def test_spans_of_a_kept_step():
    traces = StepTraces()
    run(traces, [1.0], first=5)
    (found,) = traces.kept()
    assert found.step == 5
    assert found.spans == (RunSpan("switch", 0, 0.0, 5.0), RunSpan("optimizer", -1, 10.0, 11.0))


def test_traces_of_all_ranks():
    from fxpar.runtime.forked import run_forked

    def work(rank):
        traces = StepTraces()
        run(traces, [9.0, 1.0, 3.0, 2.0])
        return [[one.step for one in step] for step in gathered(traces)]

    assert run_forked(2, work) == [[[4, 4], [3, 3]], []]
