"""One browser for all tests of this folder."""

from tests.viz.browser import browser

__all__ = ["browser"]
