"""The graph that all strategies of a command are lowered from: read once, and placed once for those placed alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fxpar.cli.cache import recorded
from fxpar.errors import warn
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy

if TYPE_CHECKING:  # what lowers is imported when the cache has nothing
    from fxpar.annotate import AnnotateOnce


@dataclass(frozen=True)
class Rows:
    """`read` is called when the graph is first asked for and not again; nor is it placed again for a strategy that
    differs in what saves memory alone, or for a weight store.
    """

    read: Callable[[], LogicalGraph]

    def __call__(self) -> LogicalGraph:
        """The graph. The warnings of reading are issued each time, so that the cache keeps them with whatever is made
        of it. Raises as `read` does.
        """
        again = "_found" in vars(self)
        graph, texts = self._found
        for text in texts if again else ():
            warn(text)
        return graph

    def lower(self, strategy: Strategy, **options: Any) -> TrainGraph:
        """`fxpar.lower` with options that `default_passes` has. Raises as `lower` does."""
        from fxpar.lowering import default_passes, lower

        if strategy.pipeline_size > 1 or strategy.teams:  # stages and teams are other graphs
            return lower(self(), strategy, **options)
        _, *rest = default_passes(**options)
        return lower(self(), strategy, passes=[self._placed, *rest])

    @cached_property
    def _found(self) -> tuple[LogicalGraph, list[str]]:
        return recorded(self.read)

    @cached_property
    def _placed(self) -> AnnotateOnce:
        from fxpar.annotate import AnnotateOnce

        return AnnotateOnce()
