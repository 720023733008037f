"""Annotate: give every value of a logical graph a `DistConfig`, for one strategy.

Data parallelism does not appear inside the graph: the logical graph is one replica's, replicas may hold different
numbers of tokens, and only the results (loss, gradients) are partial over `dp`.
"""

from __future__ import annotations

from fxpar.annotate.driver import Annotate, AnnotateOnce, annotate, unplaced

__all__ = ["Annotate", "AnnotateOnce", "annotate", "unplaced"]
