"""One browser and one page of a small Llama for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.viz import page_html, view_document
from fxpar.viz.graph_view import graph_section
from fxpar.viz.memory import memory_section
from fxpar.viz.mesh import mesh_section
from fxpar.viz.timeline import timeline_section
from tests.viz.browser import browser
from tests.viz.shown import viewed

__all__ = ["browser"]

MAKERS = {"graph": graph_section, "mesh": mesh_section, "timeline": timeline_section, "memory": memory_section}


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """All tabs of two strategies, on two nodes."""
    views = [replace(viewed(name), cluster=ClusterSpec(2, 2, 300, 20, 5)) for name in ("dp2.tp2+sp", "pp2.tp2")]
    sections = {name: make(views) for name, make in MAKERS.items()}
    return json.loads(json.dumps(view_document("llama </script>", views, sections)))


@pytest.fixture(scope="session")
def page(document: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(dict(document)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def graph_page(document: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph alone: without plotly it opens at once."""
    path = tmp_path_factory.mktemp("page") / "graph.html"
    alone = {**document, "sections": {"graph": document["sections"]["graph"]}}
    path.write_text(page_html(alone), encoding="utf-8")
    return path
