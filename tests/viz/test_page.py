"""The page as text: whole, without anything from elsewhere, safe whatever the data says."""

from __future__ import annotations

import json
import re
import sys

import pytest

from fxpar.errors import VizDependencyError
from fxpar.viz.page import asset, embedded, page_html


def document(**sections):
    return {"format": "fxpar view", "version": 1, "title": "a <b> & c", "strategies": ["tp2"], "sections": sections}


def test_data_comes_back_whatever_it_says():
    nasty = {"x": "</script><!-- <script> \u2028 é", "y": [1.5, None]}
    text = page_html(document(graph=nasty))
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    (found,) = re.findall(r'id="fxpar-view">(.*?)</script>', text, re.DOTALL)
    assert json.loads(found)["sections"]["graph"] == nasty
    assert text.count("<script") == 1 + text.count("<script>\n")


def test_nothing_is_loaded_from_elsewhere():
    text = page_html(document(graph={}))
    assert not re.findall(r"""(?:src|href)=["']|@import|url\(""", text)
    assert "default-src 'none'" in text


def test_a_page_without_charts_needs_no_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert len(page_html(document(graph={}))) < 200_000
    with pytest.raises(VizDependencyError, match=r'plotly, which is not installed: pip install "fxpar\[viz\]"'):
        page_html(document(memory={}))


def test_no_number_that_json_does_not_have():
    with pytest.raises(ValueError, match="JSON"):
        embedded({"x": float("nan")})


def test_scripts_are_plain():
    for name in ("core.js", "graph.js", "graph_data.js", "graph_layout.js", "graph_panel.js"):
        text = asset(name)
        assert text.startswith('"use strict";')
        assert "innerHTML" not in text
        assert "</script" not in text
    assert asset("none.js") == ""


def test_the_legend_explains_every_notation_of_the_graph():
    """`64@tp` and `P(tp)` of values, and `4@tp` behind the parameters of a module."""
    legend = asset("graph_panel.js").partition("function legend()")[2]
    assert 'placed("64@tp")' in legend
    assert 'placed("P(tp)")' in legend
    assert '"4", placed("@tp")), " behind the parameters of a module' in legend
    assert "view.asked[name]" in asset("memory.js")  # beside the padded sizes
