"""`Arrivals`: which weights of a layout have come, told by the thread that moves them to the one that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from torch import fx

from fxpar.ir.exec_graph import Part, Program


class Arrivals:
    """The weights of one switch. One thread says what `came`, or how it `ended`; another one calls `wait`."""

    def __init__(self) -> None:
        self.waited_s = 0.0  # by the thread that computes
        self._here: set[str] = set()
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def came(self, fqns: Collection[str]) -> None:
        with self._changed:
            self._here.update(fqns)
            self._changed.notify_all()

    def ended(self, error: BaseException | None = None) -> None:
        """Nothing more comes: all is here, or the switch has failed."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def wait(self, fqn: str) -> None:
        """Until this weight is complete. Raises the error that ended the switch before it."""
        if fqn not in self._here:
            self._wait_until(lambda: fqn in self._here)

    def wait_for_all(self) -> None:
        """Until the switch has ended. Raises its error."""
        self._wait_until(lambda: False)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        begun = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or is_there())
        self.waited_s += time.perf_counter() - begun
        if self._error is not None and not is_there():
            raise self._error


def wait_before_use(graph: fx.Graph, part: Part, program: Program, wait: Callable[[int], None]) -> None:
    """Call `wait(i)` in the graph of a part before the first op that takes input i, a parameter. (A number, as names
    may come from a file, and the graph becomes code.)
    """
    places = {node: n for n, node in enumerate(graph.nodes)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, (source, i) in zip(placeholders, part.sources, strict=False):  # what accumulates follows the operands
        if source == "input" and program.inputs[i].kind == "param" and node.users:
            with graph.inserting_before(min(node.users, key=places.__getitem__)):
                graph.call_function(wait, (i,))
