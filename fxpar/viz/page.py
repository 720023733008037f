"""The page: data, scripts and style in one HTML file that opens without a network."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from fxpar.errors import VizDependencyError

SCRIPTS = {"graph": ("graph_data.js", "graph_layout.js", "graph_panel.js", "graph.js")}  # others: NAME.js
CHARTED = frozenset({"mesh", "timeline", "memory", "run"})  # tabs that draw with plotly
# Nothing is loaded from anywhere; plotly makes functions at run time and saves pictures as blobs.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:"
)


def page_html(document: dict[str, Any]) -> str:
    """The whole page of a `view_document`. Raises VizDependencyError without plotly, if a tab has charts."""
    sections = document["sections"]
    scripts = [plotly_js()] if CHARTED & set(sections) else []
    names = [name for tab in sections for name in SCRIPTS.get(tab, (f"{tab}.js",))]
    scripts += [asset("core.js"), *filter(None, map(asset, names)), "fxpar.start();"]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{html.escape(document['title'])}</title>",
            f"<style>\n{asset('style.css')}{''.join(asset(f'{tab}.css') for tab in sections)}</style>",
            "</head>",
            "<body>",
            "<noscript>This page needs JavaScript.</noscript>",
            f'<script type="application/json" id="fxpar-view">{embedded(document)}</script>',
            *(f"<script>\n{script}\n</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def embedded(document: dict[str, Any]) -> str:
    """JSON that can stand inside of a script element. Raises ValueError for infinities and NaN."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def asset(name: str) -> str:
    """Text of a file of the folder `assets`; empty if there is none."""
    file = resources.files("fxpar.viz") / "assets" / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def plotly_js() -> str:
    """The script of the installed plotly. Raises VizDependencyError."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise VizDependencyError("plotly", "charts on the page") from None
    return get_plotlyjs()
