"""Pictures of a model under strategies: one self-contained HTML page, and files for Model Explorer and Perfetto."""

from fxpar.viz.document import view_document
from fxpar.viz.page import page_html
from fxpar.viz.viewed import Viewed

__all__ = ["Viewed", "page_html", "view_document"]
