"""The page in a real browser: it opens, every tab draws, modules unfold, strategies switch, the search finds."""

from __future__ import annotations

import pytest

from fxpar.viz import page_html, view_document
from fxpar.viz.graph_view import graph_section
from tests.viz.browser import console_errors, open_page, open_tab
from tests.viz.shown import tall

pytestmark = pytest.mark.browser
STRATEGIES = ("dp2.tp2+sp", "pp2.tp2")
FITS = "return document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def tall_page(tmp_path_factory):
    """The graph of 32 layers."""
    path = tmp_path_factory.mktemp("page") / "tall.html"
    view = tall(32)
    path.write_text(page_html(view_document("tall", [view], {"graph": graph_section([view])})), encoding="utf-8")
    return path


def boxes(browser) -> list[str]:
    """Keys of all boxes that are drawn."""
    return browser.execute_script("return [...document.querySelectorAll('#graph-frame .box')].map(b => b.dataset.key)")


def press(browser, key: str) -> None:
    """Enter on a box, as without a mouse."""
    head = browser.find_element("css selector", f"[data-key='{key}'] > .head")
    browser.execute_script("arguments[0].focus({preventScroll: true})", head)
    head.send_keys("\n")


def overlaps(browser) -> list:
    """Pairs of boxes of one parent that cover each other."""
    return browser.execute_script("""
        const covers = (r, s) => r.left < s.right && s.left < r.right && r.top < s.bottom && s.top < r.bottom;
        const found = [];
        for (const inner of document.querySelectorAll(".inner")) {
          const all = [...inner.children].filter((e) => e.classList.contains("box"));
          const places = all.map((e) => e.getBoundingClientRect());
          all.forEach((e, i) => places.slice(i + 1).forEach((r, j) => {
            if (covers(places[i], r)) found.push([e.dataset.key, all[i + 1 + j].dataset.key]);
          }));
        }
        return found;
    """)


@pytest.mark.parametrize(("dark", "strategies"), [(False, STRATEGIES), (True, STRATEGIES[1:])])
def test_every_tab_draws_under_every_strategy(browser, page, dark, strategies):
    open_page(browser, page, dark=dark)
    assert browser.title == "llama </script>"
    assert browser.execute_script("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
    from selenium.webdriver.support.wait import WebDriverWait

    for strategy in strategies:
        browser.find_element("css selector", f"[data-strategy='{strategy}']").click()
        for name in ("graph", "mesh", "timeline", "memory"):
            panel = open_tab(browser, name)
            assert panel.is_displayed()
            assert panel.text.strip()
            assert not panel.find_elements("css selector", ".failed")
            # Charts take a frame to fit.
            WebDriverWait(browser, 5).until(lambda d: d.execute_script(FITS), f"{name} is wider than the window")
    assert console_errors(browser) == []


def test_modules_unfold_to_nodes_and_fold_again(browser, graph_page):
    open_page(browser, graph_page)
    first = boxes(browser)
    assert "m:layers.0" in first
    assert "m:layers.0.attention" not in first
    for key in ("m:layers.0", "m:layers.0.attention", "m:layers.0.attention.q_proj"):
        press(browser, key)
        head = browser.find_element("css selector", f"[data-key='{key}'] > .head")
        assert head.get_attribute("aria-expanded") == "true"
    inside = browser.find_elements("css selector", "[data-key='m:layers.0.attention.q_proj'] .box.node")
    assert "mm" in [box.text.splitlines()[0] for box in inside]
    assert overlaps(browser) == []
    side = browser.find_element("id", "graph-side").text
    assert "layers.0.attention.q_proj" in side
    assert "f64[32@tp, 32]" in side
    press(browser, "m:layers.0")
    assert boxes(browser) == first
    assert console_errors(browser) == []


def test_a_node_tells_all_and_leads_on(browser, graph_page):
    open_page(browser, graph_page)
    search = browser.find_element("id", "graph-search")
    search.send_keys("layers.1.ffn.down_proj.mm\n")
    side = browser.find_element("id", "graph-side")
    assert browser.find_element("id", "graph-found").text == "1 of 3"  # the others are in the backward
    for word in (
        "module",
        "layers.1.ffn.down_proj",
        "on each axis",
        "P",
        "local",
        "bytes per rank",
        "Operands",
        "Users",
    ):
        assert word in side.text
    selected = browser.find_elements("css selector", ".box.selected")
    assert len(selected) == 1
    name = selected[0].get_attribute("data-node")
    side.find_element("css selector", ".links .link").click()
    assert browser.find_element("css selector", ".box.selected").get_attribute("data-node") != name


def test_what_is_sent_and_how_a_value_lies_is_said_for_each_axis(browser, graph_page):
    open_page(browser, graph_page, hash="#graph/dp2.tp2%2Bsp")
    facts = browser.find_elements("css selector", "#about [data-sent-over]")
    assert [fact.get_attribute("data-sent-over") for fact in facts] == ["dp", "dp.tp", "tp"]
    assert facts[0].text.endswith(" once")
    assert "once" not in facts[2].text
    assert [axis.text for axis in facts[1].find_elements("css selector", ".axis")] == ["dp", "tp"]
    chips = browser.find_elements("css selector", "[data-key='m:layers.0'] > .head .chip")
    assert chips
    assert all(chip.find_element("css selector", ".axis").text == "tp" for chip in chips)
    browser.find_element("id", "graph-search").send_keys("layers.1.ffn.down_proj.mm\n")
    lies = browser.find_elements("css selector", "#graph-side [data-lies-on]")
    assert [(one.get_attribute("data-lies-on"), one.text) for one in lies] == [("dp", "dp R"), ("tp", "tp P")]


def test_search_by_op_goes_from_hit_to_hit(browser, graph_page):
    open_page(browser, graph_page)
    search = browser.find_element("id", "graph-search")
    search.send_keys("all_gather")
    count = len(browser.find_elements("css selector", "#graph-hits li"))
    assert count > 2
    seen = []
    for i in range(3):
        search.send_keys("\n")
        assert browser.find_element("id", "graph-found").text == f"{i + 1} of {count}"
        seen.append(browser.find_element("css selector", ".box.selected").get_attribute("data-node"))
    assert len(set(seen)) == 3
    search.clear()
    search.send_keys("no such thing")
    assert browser.find_element("id", "graph-found").text == "0 found"


def test_search_looks_into_all_parts_and_stages(browser, graph_page):
    """Those of the part that is shown come first; a hit elsewhere leads there."""
    open_page(browser, graph_page, hash="#graph/pp2.tp2")
    search = browser.find_element("id", "graph-search")
    search.send_keys("layers.1.ffn.down_proj")
    hits = browser.find_elements("css selector", "#graph-hits li")
    places = [hit.find_element("css selector", "[data-hit-part]").get_attribute("data-hit-part") for hit in hits]
    assert places == ["stage1.forward", "stage1.backward"]
    search.send_keys("\n\n")
    assert browser.find_element("id", "graph-found").text == "2 of 2"
    pressed = browser.find_elements("css selector", "#graph-parts [aria-pressed='true']")
    assert [button.text for button in pressed] == ["Stage 1", "Backward"]
    assert browser.find_element("css selector", ".box.selected").get_attribute("data-fqn") == "layers.1.ffn.down_proj"
    browser.find_element("css selector", "[data-part='stage1.forward']").click()
    assert "from stage 0" in browser.find_element("id", "graph-frame").text
    assert console_errors(browser) == []


def test_parts_stages_and_strategies_switch_in_place(browser, graph_page):
    open_page(browser, graph_page, hash="#graph/dp2.tp2%2Bsp")
    press(browser, "m:layers.0")
    browser.find_element("css selector", "[data-part='backward']").click()
    assert "m:layers.0.attention" in boxes(browser)  # what was unfolded stays so
    browser.find_element("css selector", "[data-strategy='pp2.tp2']").click()
    browser.find_element("css selector", "[data-stage='1']").click()
    assert "m:layers.1" in boxes(browser)
    assert "m:layers.0" not in boxes(browser)
    assert "from stage 0" in browser.find_element("id", "graph-frame").text
    browser.find_element("css selector", "[data-stage='0']").click()
    frame = browser.find_element("id", "graph-frame").text
    assert "from stage 1" in frame
    assert "from stage 0" not in frame
    assert browser.execute_script("return location.hash") == "#graph/pp2.tp2"
    assert "pp 2 × tp 2" in browser.find_element("id", "about").text
    assert console_errors(browser) == []


def test_32_layers_draw_only_what_is_unfolded(browser, tall_page):
    open_page(browser, tall_page)
    assert len(boxes(browser)) < 20
    press(browser, "m:layers")
    drawn = boxes(browser)
    assert {f"m:layers.{i}" for i in range(32)} <= set(drawn)
    press(browser, "m:layers.17")
    assert 0 < len(boxes(browser)) - len(drawn) < 20
    assert overlaps(browser) == []
    assert console_errors(browser) == []
