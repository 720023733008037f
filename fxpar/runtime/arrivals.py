"""What one thread of a rank hands to the other piece by piece: weights that have come, gradients that are made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, fx

from fxpar.cost.flowing import final_gradients
from fxpar.ir.exec_graph import ExecGraph, Part, Program
from fxpar.ir.pass_base import right_behind
from fxpar.ir.pipeline_graph import PipelineGraph, side_by_side


class Arrivals:
    """The pieces of one transfer, by name. One thread says what `came`, within a block `coming`; others wait."""

    def __init__(self) -> None:
        self.waited_s = 0.0  # by the thread that waits
        self._here: set[str] = set()
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._awaited: list[Callable[[], bool]] = []  # what threads that wait need

    def came(self, fqns: Collection[str]) -> None:
        with self._changed:
            self._here.update(fqns)
            if any(is_there() for is_there in self._awaited):  # waking them for each piece costs more than the piece
                self._changed.notify_all()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """What comes, comes in this block; its error is that of who waits for what has not come."""
        try:
            yield
        except BaseException as error:
            self.ended(error)
            raise
        self.ended()

    def ended(self, error: BaseException | None = None) -> None:
        """Nothing more comes: all is here, or what brings it has failed."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def wait(self, fqn: str) -> None:
        """Until this piece is there, or nothing more comes. Raises the error that ended it before."""
        if fqn not in self._here:
            self._wait_until(lambda: fqn in self._here)

    def wait_for_any(self) -> None:
        """Until the first piece is there, or nothing comes. Raises the error that ended it before."""
        self._wait_until(lambda: bool(self._here))

    def wait_for_all(self) -> None:
        """Until nothing more comes. Raises the error that ended it."""
        self._wait_until(lambda: False)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        begun = time.perf_counter()
        with self._changed:
            self._awaited.append(is_there)
            self._changed.wait_for(lambda: self._ended or is_there())
            self._awaited.remove(is_there)
        self.waited_s += time.perf_counter() - begun
        if self._error is not None and not is_there():
            raise self._error


class Handed(Mapping[str, Tensor]):
    """The gradients of a group, while they are made: whoever looks one up waits for it. A run that fails gives those
    that it has made before, and its error for all others: what leaves a rank does not depend on how fast it leaves.
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._tensors: dict[str, Tensor] = {}

    def came(self, gradients: Mapping[str, Tensor]) -> None:
        """These are final; those that have come before stay as they are."""
        self._tensors.update({fqn: value for fqn, value in gradients.items() if fqn not in self._tensors})
        self.arrivals.came(gradients)

    def __contains__(self, fqn: object) -> bool:
        self.arrivals.wait(str(fqn))
        return fqn in self._tensors

    def __getitem__(self, fqn: str) -> Tensor:
        self.arrivals.wait(fqn)
        return self._tensors[fqn]

    def __iter__(self) -> Iterator[str]:
        self.arrivals.wait_for_all()
        return iter(self._tensors)

    def __len__(self) -> int:
        self.arrivals.wait_for_all()
        return len(self._tensors)


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


def hand_over(graph: fx.Graph, places: Collection[int], give: Callable[[int, Tensor], None], skipped: int = 0) -> None:
    """Call `give(i, value)` in a graph as soon as its result i is final; the first `skipped` ones it does not have."""
    (output,) = graph.find_nodes(op="output")
    for i in places:
        result = output.args[0][i - skipped]  # type: ignore[index]
        with right_behind(graph, result):
            graph.call_function(give, (i, result))


def order_of_gradients(program: Program) -> list[str]:
    """The gradients of a program about in the order in which they are final; those of stages are made side by side, but
    for those of one rank, the last one first.
    """
    early: list[str] = []
    if isinstance(program, ExecGraph):
        early = list(final_gradients(program).values())
    elif isinstance(program, PipelineGraph):
        early = side_by_side(program, lambda stage: list(final_gradients(stage).values()), last_first=True)
    return [*early, *(out.fqn for out in program.outputs if out.kind == "grad" and out.fqn not in set(early))]
