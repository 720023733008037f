"""The timeline and the run tab in a browser."""

from __future__ import annotations

import pytest

from fxpar.viz import page_html, view_document
from fxpar.viz.run import run_section
from fxpar.viz.timeline import timeline_section
from tests.viz.browser import console_errors, open_page, open_tab
from tests.viz.shown import tall
from tests.viz.steps import COMPARISON, inside, metrics, shown_step, views

pytestmark = pytest.mark.browser
pytest.importorskip("plotly", reason="charts need plotly")
BARS = "return document.querySelectorAll('[data-timeline={}] .bars path').length"
ENDS = "return [...document.querySelectorAll('[data-timeline]')].map((node) => node.layout.xaxis.range[1])"
TEXTS = "return document.querySelector('[data-timeline]').data.flatMap((one) => one.text)"
CLICK = """
const chart = document.querySelector('[data-timeline=predicted]');
const trace = chart.data.find((one) => one.name.startsWith('B '));
chart.emit('plotly_click', {points: [{customdata: trace.customdata[0]}]});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    shown = views()
    insides = {view.strategy: inside(view.strategy) for view in shown}
    sections = {
        "timeline": timeline_section(shown, [shown_step(7), shown_step(3)], insides),
        "run": run_section(metrics(6), comparison=COMPARISON, environment=["4 ranks on CPU"]),
    }
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(view_document("run tiny", shown, sections)), encoding="utf-8")
    return path


def test_timeline(browser, page):
    open_page(browser, page)
    panel = open_tab(browser, "timeline")
    predicted, measured = (browser.execute_script(BARS.format(name)) for name in ("predicted", "measured"))
    assert predicted == measured > 50
    assert "Inside micro-batch 0 under dp2.tp2+sp" in panel.text
    groups = panel.find_element("css selector", "[data-groups]").text
    assert "2.00×" in groups
    assert "tokens/s, measured" in groups
    kinds = panel.find_element("css selector", "[data-kinds]").text
    assert "all gather over tp" in kinds
    assert "matrix products" in kinds

    browser.execute_script(CLICK)
    assert "Inside backward of micro-batch" in panel.text
    browser.execute_script("fxpar.choose('pp2.dp2')")
    assert "Inside forward of micro-batch 0 on stage 0 under pp2.dp2" in panel.text

    options = panel.find_element("id", "timeline-step").find_elements("tag name", "option")
    assert [option.text for option in options] == ["Step 7, the last one", "Step 3, the last one"]
    options[1].click()
    panel.find_element("id", "timeline-scale").click()
    one, two = browser.execute_script(ENDS)
    assert one == two
    assert console_errors(browser) == []


def test_run_in_the_dark(browser, page):
    open_page(browser, page, dark=True)
    panel = open_tab(browser, "run")
    charts = panel.find_elements("css selector", "[data-chart]")
    assert len(charts) == 5
    assert all(chart.find_elements("css selector", ".main-svg") for chart in charts)
    assert panel.find_element("id", "run-environment").text == "4 ranks on CPU"
    assert "7.7500 → 6.5000" in panel.text
    assert "1.25×" in panel.find_element("css selector", "[data-groups]").text
    assert "1.50×" in panel.find_element("css selector", "[data-comparison]").text
    open_tab(browser, "timeline")
    assert browser.execute_script(BARS.format("predicted")) > 50
    assert console_errors(browser) == []


def test_the_step_follows_the_strategy_and_chunks_are_told_apart(browser, tmp_path):
    shown = [tall(4, "dp4"), tall(4, "pp2+interleaved_1f1b(2)")]
    path = tmp_path / "page.html"
    document = view_document("two worlds", shown, {"timeline": timeline_section(shown)})
    path.write_text(page_html(document), encoding="utf-8")
    open_page(browser, path)
    panel = open_tab(browser, "timeline")
    assert panel.find_element("id", "timeline-step").get_attribute("value") == "0"
    browser.execute_script("fxpar.choose('pp2+interleaved_1f1b(2)')")
    assert panel.find_element("id", "timeline-step").get_attribute("value") == "1"
    assert {"F0@0", "F0@2", "F1@1", "B1@3"} <= set(browser.execute_script(TEXTS))
    assert console_errors(browser) == []
