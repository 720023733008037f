"""Pictures of a model under strategies: one self-contained HTML page, and files for Model Explorer and Perfetto.

Names are imported when they are first read: a page from the cache needs nothing that draws.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.viz.document import view_document
    from fxpar.viz.page import page_html
    from fxpar.viz.viewed import Viewed

__all__ = ["Viewed", "page_html", "view_document"]

_WHERE = {"Viewed": "viewed", "page_html": "page", "view_document": "document"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fxpar.viz' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"fxpar.viz.{_WHERE[name]}"), name)
    return value
