"""Planning ahead: the plan of the next mini-batch is made in a thread while this one runs."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxpar.batching import BatchPlan
from fxpar.errors import MiniBatchesError, ReusedMiniBatchError

Sequence_ = Tensor | Mapping[str, Tensor]
Lengths = tuple[int, ...]


class PlanAhead:
    """A thread that finds the lengths of a mini-batch and its plan, and ends. It is joined where the plan is taken, and
    at the end of the process: a thread that is cut off there ends it by a signal.
    """

    def __init__(self, make: Callable[[], tuple[Lengths, BatchPlan]]) -> None:
        self._make = make
        self._found: tuple[Lengths, BatchPlan] | None = None
        self._thread = threading.Thread(target=self._run, name="fxpar-plan", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the step meets it again, and raises it on all ranks
            self._found = self._make()

    def plan_of(self, lengths: Lengths) -> BatchPlan | None:
        """The plan if it is one of sequences of these lengths, which is all that a plan depends on. Waits for it."""
        self._thread.join()
        return None if self._found is None or self._found[0] != lengths else self._found[1]


class PlansAhead:
    """Of the next step, and of the one after it. An older plan that nobody took is dropped."""

    def __init__(self) -> None:
        self._plans: deque[PlanAhead] = deque(maxlen=2)

    def begin(self, make: Callable[[], tuple[Lengths, BatchPlan]]) -> None:
        self._plans.append(PlanAhead(make))

    def clear(self) -> None:
        self._plans.clear()

    def take(self, lengths: Lengths) -> BatchPlan | None:
        """The plan of sequences of these lengths, if it was begun."""
        for one in tuple(self._plans):
            plan = one.plan_of(lengths)
            if plan is not None:
                self._plans.remove(one)
                return plan
        return None


class DrawnAhead:
    """The mini-batches of `batches`, one after the other. The next one is drawn, and `begin(it)` called, before one is
    handed out; an error of drawing is raised where its mini-batch would be handed out.

    A second `for` goes on where the first one stopped, as that of a loader does; after the end it begins anew.
    `state_dict` is that of `batches` as if nothing were drawn ahead; `load_state_dict` goes on from one.

    Raises MiniBatchesError for what cannot be iterated over, ReusedMiniBatchError if drawing a mini-batch writes to the
    one before.
    """

    def __init__(self, batches: Iterable[Any], begin: Callable[[Any], object]) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping):
            raise MiniBatchesError(type(batches).__name__)
        self.batches: Any = batches
        self._begin = begin
        self._iterator: Iterator[Any] = iter(batches)
        self._drawn: Callable[[], Any] | None = None
        self._state: Any = None
        self._ended = False

    def __iter__(self) -> DrawnAhead:
        if self._ended:
            self._iterator, self._drawn, self._ended = iter(self.batches), None, False
        return self

    def __next__(self) -> Any:
        drawn, self._drawn = self._drawn or self._draw(), None
        try:
            current = drawn()
        except StopIteration:
            self._ended = True
            raise
        if hasattr(self.batches, "state_dict"):
            self._state = copy.deepcopy(self.batches.state_dict())
        stamp = _stamp(current)
        self._drawn = self._draw(self._begin)
        if _stamp(current) != stamp:
            raise ReusedMiniBatchError
        return current

    def _draw(self, begin: Callable[[Any], object] = lambda _: None) -> Callable[[], Any]:
        """What gives the next mini-batch, or raises what drawing it has raised."""
        try:
            found = next(self._iterator)
        except Exception as error:
            return _raiser(error)
        begin(found)
        return lambda: found

    def state_dict(self) -> Any:
        """Where `batches` stood after the last mini-batch that was handed out."""
        return self.batches.state_dict() if self._drawn is None else self._state

    def load_state_dict(self, state: Any) -> None:
        self.batches.load_state_dict(state)
        self._iterator, self._drawn, self._ended = iter(self.batches), None, False


def _stamp(sequences: Sequence[Sequence_]) -> Hashable:
    """Changes if the list has other tensors, and with every write by torch to one of them that torch counts."""
    rows = sequences if isinstance(sequences, list | tuple) else [sequences]
    keyed = (one.items() if isinstance(one, Mapping) else [("", one)] for one in rows)
    return tuple((key, id(value), _version(value)) for items in keyed for key, value in items)


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _raiser(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
