"""Pictures of a model under strategies: one self-contained HTML page, and files for Model Explorer and Perfetto."""

from fxpar.viz.document import view_document
from fxpar.viz.page import page_html
from fxpar.viz.viewed import Viewed, assumed_cluster

__all__ = ["Viewed", "assumed_cluster", "page_html", "view_document"]
