from __future__ import annotations

import json

from fxpar.viz.chrome_trace import chrome_trace, modules_of
from tests.viz.steps import STRATEGIES, inside, predicted, shown_step


def insides():
    return {strategy: inside(strategy) for strategy in STRATEGIES}


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_events_are_sorted_and_lie_inside_of_each_other_or_apart():
    trace = json.loads(json.dumps(chrome_trace(predicted(), insides()), allow_nan=False))
    events = complete(trace)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert all(e["dur"] >= 0 and e["name"] for e in events)
    by_track = {}
    for event in events:
        by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in by_track.values():
        around: list[float] = []  # ends of the events that are open
        for event in track:
            while around and around[-1] <= event["ts"] + 2e-3:
                around.pop()
            end = event["ts"] + event["dur"]
            assert all(end <= outer + 2e-3 for outer in around)
            around.append(end)


def test_a_process_per_lane_with_names():
    timeline = predicted()
    trace = chrome_trace(timeline, insides())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {lane.ranks[0]: str(lane) for lane in timeline.lanes}
    assert {e["pid"] for e in complete(trace)} == set(names)
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"groups", "step", "inside (predicted)"}


def test_what_is_inside_fills_its_micro_batch():
    trace = complete(chrome_trace(predicted(), insides()))
    first = next(e for e in trace if e["cat"] == "micro_batch" and e["pid"] == 0)
    inside = [
        e
        for e in trace
        if (e["pid"], e["tid"]) == (0, 2) and first["ts"] <= e["ts"] < first["ts"] + first["dur"] - 1e-3
    ]
    mine = [e for e in inside if e["cat"] != "module"]
    assert abs(sum(e["dur"] for e in mine) - first["dur"]) < 1e-3 * (len(mine) + 1)
    assert {"all_gather", "reduce_scatter", "compute"} <= {e["cat"] for e in mine}
    assert all(e["args"]["bytes"] >= 0 for e in mine)
    modules = [e for e in inside if e["cat"] == "module"]
    layer = next(e for e in modules if e["name"] == "layers.1" and not e["args"]["backward"])
    within = [e for e in inside if layer["ts"] <= e["ts"] < layer["ts"] + layer["dur"] - 1e-3 and e is not layer]
    names = {e["name"] for e in within if e["cat"] == "module"}
    assert {"layers.1.attention", "layers.1.ffn"} <= names
    assert all(name.startswith("layers.1.") for name in names)
    sums = {"bytes": 0, "sent_bytes": 0}
    for event in within:
        if event["cat"] != "module":
            sums["bytes" if event["cat"] == "compute" else "sent_bytes"] += event["args"]["bytes"]
    assert min(sums.values()) > 0
    assert sums == {name: layer["args"][name] for name in sums}


def test_switches_and_reductions_say_their_bytes():
    events = complete(chrome_trace(predicted(), insides()))
    assert {e["args"]["bytes"] for e in events if e["cat"] == "switch"} == {1000}
    assert {e["args"]["bytes"] for e in events if e["cat"] == "reduce"} == {2000}


def test_modules_from_the_outside_in():
    assert modules_of("model.layers.3.attention") == ["model", "model.layers.3", "model.layers.3.attention"]
    assert modules_of("layers.3") == ["layers.3"]
    assert modules_of("") == ["(model)"]


def test_measured_and_predicted_are_processes_of_their_own():
    step = shown_step()
    trace = chrome_trace({"measured": step.measured, "predicted": step.predicted}, insides())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(names.values())[:5] == [f"measured: rank {r}" for r in range(4)] + [
        f"predicted: {predicted().lanes[0]}"
    ]
    assert min(pid for pid, name in names.items() if name.startswith("predicted")) == 4


def test_few_events_inside_of_large_steps(monkeypatch):
    monkeypatch.setattr("fxpar.viz.chrome_trace.MOST_INSIDE", 200)
    assert 0 < sum(e["tid"] == 2 for e in complete(chrome_trace(predicted(), insides()))) <= 200
