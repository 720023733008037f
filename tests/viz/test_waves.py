"""The page of a plan of waves."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from fxpar.viz.waves import waves_html
from fxpar.waves import MetaOp, TaskGraph, plan_waves
from tests.waves.plain import nodes

GRAPH = TaskGraph(
    (MetaOp("a<b", 6, {1: 4.0, 2: 2.2}, output_bytes=1e7), MetaOp("lm", 4, {1: 3.0, 2: 1.6, 4: 0.9})), (("a<b", "lm"),)
)


def test_each_run_has_a_box_on_each_of_its_devices():
    plan = plan_waves(GRAPH, nodes(4))
    page = waves_html(plan, "two & two", {(1, 4): "cp4"})
    drawn = ElementTree.fromstring(re.search(r"<svg viewBox.*?</svg>\n(?=<table)", page, re.S)[0])
    boxes = [one for one in drawn.iter("rect") if one.find("title") is not None]
    assert len(boxes) == sum(len(plan.pieces[run.piece].devices) for run in plan.step.runs)
    assert max(float(one.get("x")) + float(one.get("width")) for one in boxes) == 1060  # the end of the step
    told = {one.find("title").text for one in boxes}
    assert any(text.startswith("lm, layers 0 to 3, forward, wave ") and text.endswith(", cp4") for text in told)
    assert any(text.startswith("a<b, layers 0 to") for text in told)
    assert "<title>two &amp; two</title>" in page
    assert "<script" not in page


def test_gradients_are_added_up_below_what_runs():
    held = TaskGraph((MetaOp("a", 2, {2: 2.0}, state_bytes=8e8),))
    plan = plan_waves(held, nodes(2))
    page = waves_html(plan, "one")
    assert len(re.findall('class="reduces"', page)) == 2 * len(plan.step.reductions) == 2
    assert f"which takes {plan.step.exposed_ms:.1f} ms at the end" in page
