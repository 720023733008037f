"""The mesh and the memory tab in a browser: they draw, follow what is chosen, and log no error."""

from __future__ import annotations

import pytest

from fxpar.viz import page_html, view_document
from fxpar.viz.memory import memory_section
from fxpar.viz.mesh import mesh_section
from tests.viz.browser import console_errors, open_page, open_tab
from tests.viz.shown import viewed

pytestmark = pytest.mark.browser
pytest.importorskip("plotly", reason="needs plotly")


@pytest.fixture
def opened(browser, page):
    """The page, which tests share, under its first strategy; what it has logged is looked at afterwards."""
    if not browser.current_url.startswith(page.resolve().as_uri()):
        open_page(browser, page)
    browser.execute_script("fxpar.choose('dp2.tp2+sp')")
    yield browser
    assert console_errors(browser) == []


@pytest.fixture
def mesh(opened):
    return open_tab(opened, "mesh")


@pytest.fixture
def memory(opened):
    return open_tab(opened, "memory")


def find(root, selector):
    return root.find_elements("css selector", selector)


def text(root, selector):
    return [one.text for one in find(root, selector)]


def choose(root, title):
    (button,) = (one for one in find(root, "[data-kind-number]") if one.get_attribute("title") == title)
    button.click()


def test_pieces_are_drawn(mesh):
    choose(mesh, "head.weight")
    (after,) = find(mesh, '[data-layout="dp2.tp2+sp"]')
    assert len(find(after, "rect[data-piece]")) == 2
    assert text(after, ".mesh-rank") == ["A\n0", "B\n1", "A\n2", "B\n3"]
    (before,) = find(mesh, '[data-layout="home"]')
    assert [cell.split("\n")[0] for cell in text(before, ".mesh-rank")] == ["A", "B", "C", "D"]


def test_another_parameter_redraws(mesh):
    title = mesh.find_element("id", "mesh-title")
    before = title.text
    choose(mesh, "norm.weight")
    assert mesh.find_element("id", "mesh-title").text == "norm.weight" != before
    (after,) = find(mesh, '[data-layout="dp2.tp2+sp"]')
    assert len(find(after, "rect[data-piece]")) == 1
    (pressed,) = find(mesh, '[data-kind-number][aria-pressed="true"]')
    assert pressed.get_attribute("title") == "norm.weight"


def test_roles_of_modules(browser, tmp_path):
    views = [viewed("tp4+sp[*.attention: cp2.tp2]")]
    page = tmp_path / "roles.html"
    page.write_text(page_html(view_document("llama", views, {"mesh": mesh_section(views)})), encoding="utf-8")
    open_page(browser, page)
    tab = open_tab(browser, "mesh")
    assert len(find(tab, "[data-roles] tbody tr")) == 7
    assert [one.get_attribute("data-role") for one in find(tab, "[data-roles] [data-role]")][:4] == [*["tp+sp"] * 4]
    assert "cp" in text(tab, "[data-roles] .mesh-role.cp")
    assert console_errors(browser) == []


def test_filter(mesh):
    box = mesh.find_element("id", "mesh-filter")
    box.send_keys("layers.1.ffn.up")
    assert [one.get_attribute("title") for one in find(mesh, "[data-kind-number]")] == ["layers.1.ffn.up_proj.weight"]
    box.send_keys("nothing")
    assert find(mesh, "[data-kind-number]") == []
    box.send_keys("\ue009a\ue000\ue003")  # control and a, backspace
    assert len(find(mesh, "[data-kind-number]")) > 2


def test_matrix_follows_parameter_and_scope(mesh, browser, document):
    flow = document["sections"]["mesh"]["by_strategy"]["dp2.tp2+sp"]["switches"][0]
    find(mesh, '[data-choice="all"]')[0].click()
    (moved,) = find(mesh, "[data-moved]")
    assert int(moved.get_attribute("data-moved")) == flow["inside_bytes"] + flow["between_bytes"]
    drawn = "return [...document.querySelector('[data-matrix]').data[0].z].flat().reduce((a, b) => a + (b ?? 0), 0)"
    assert browser.execute_script(drawn) == flow["inside_bytes"] + flow["between_bytes"]
    find(mesh, '[data-choice="nodes"]')[0].click()
    assert browser.execute_script(drawn) == flow["inside_bytes"] + flow["between_bytes"]
    assert browser.execute_script("return document.querySelector('[data-matrix]').data[0].z.length") == 2
    find(mesh, '[data-choice="kind"]')[0].click()
    (chosen,) = find(mesh, '[aria-pressed="true"][data-kind-number]')
    kind = flow["kinds"][int(chosen.get_attribute("data-kind-number"))]
    assert browser.execute_script(drawn) == kind["inside_bytes"] + kind["between_bytes"]


def test_what_a_rank_gets(mesh):
    """97 rows: rank 1 has rows 25 to 49 at home, rank 3 needs the second half, from row 49 on."""
    choose(mesh, "head.weight")
    find(mesh, '[data-layout="dp2.tp2+sp"] .mesh-rank')[3].click()
    (card,) = find(mesh, "[data-arrivals]")
    assert card.get_attribute("data-arrivals") == "3"
    assert len(find(card, "rect.had")) == 1
    assert {one.get_attribute("data-from") for one in find(card, "rect[data-from]")} == {"1", "2"}
    assert text(card, "tbody tr")[0].startswith("had already")


def test_sources_and_strategies(mesh, browser):
    options = find(mesh, "#mesh-from option")
    assert [one.text for one in options] == ["home", "pp2.tp2", "pp2.tp2 and home"]
    options[1].click()
    assert find(mesh, '[data-layout="pp2.tp2"]')
    assert find(mesh, '[data-switch="pp2.tp2 -> dp2.tp2+sp"]')
    browser.find_element("css selector", '[data-strategy="pp2.tp2"]').click()
    choose(mesh, "head.weight")
    ranks = text(mesh, '[data-layout="pp2.tp2"] .mesh-rank')
    assert [cell.split("\n")[0] for cell in ranks] == ["–", "–", "A", "B"]


def test_memory_over_time(memory, browser, document):
    shown = document["sections"]["memory"]["by_strategy"]
    drawn = "const c = document.querySelector('[data-memory]'); return Math.max(...c.data.at(-1).y)"
    (rank,) = shown["dp2.tp2+sp"]["ranks"]
    most = max(map(sum, zip(*rank["series"].values(), strict=True)))
    assert browser.execute_script(drawn) == sum(rank["level"].values()) + most
    find(memory, '[data-choice="what a micro-batch adds"]')[0].click()
    assert browser.execute_script(drawn) == most
    find(memory, '[data-choice="everything"]')[0].click()
    assert find(memory, '[data-table="stages"]') == []


def test_memory_of_pipeline_ranks(memory, browser, document):
    browser.find_element("css selector", '[data-strategy="pp2.tp2"]').click()
    assert len(find(memory, '[data-table="stages"] tbody tr')) == 2
    find(memory, '[data-choice="ranks 2–3"]')[0].click()
    assert find(memory, '[data-memory="1"]')
    names = [one.text for one in find(memory, '[data-table="rank"] tbody td:first-child')]
    assert names[-2:] == ["peak", "reserved"]
    assert "messages" in names


def test_a_bar_chooses_its_strategy(memory, browser):
    (chart,) = find(memory, "[data-peaks]")
    assert chart.get_attribute("data-peaks") == "2"
    browser.execute_script("document.querySelector('[data-peaks]').emit('plotly_click', {points: [{y: 'pp2.tp2'}]})")
    (button,) = browser.find_elements("css selector", '[data-strategy="pp2.tp2"]')
    assert button.get_attribute("aria-checked") == "true"


def test_one_strategy_without_a_switch(browser, tmp_path):
    views = [viewed("pp2.tp2")]
    sections = {"mesh": mesh_section(views), "memory": memory_section(views)}
    path = tmp_path / "one.html"
    path.write_text(page_html(view_document("one strategy", views, sections)), encoding="utf-8")
    open_page(browser, path, dark=True)
    mesh = open_tab(browser, "mesh")
    assert len(find(mesh, "[data-layout]")) == 2
    assert find(mesh, "[data-matrix], [data-switch], [data-arrivals], #mesh-from") == []
    assert find(open_tab(browser, "memory"), "[data-peaks]") == []
    assert console_errors(browser) == []
