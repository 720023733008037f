"""Planning ahead: the plan of the next mini-batch is made in a thread while this one runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxpar.batching import BatchPlan
from fxpar.errors import FxparError, MiniBatchesError

Sequence_ = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class OwnPlan:
    """What a rank finds of a mini-batch by itself: the plan, the number of valid tokens and what runs, or the problem
    that all ranks are to raise once they agree on it.
    """

    sequences: Sequence[Sequence_]
    plan: BatchPlan | None = None
    valid: int = 0
    problem: FxparError | None = None


class PlanAhead:
    """A thread that makes the plan of a mini-batch and ends. It is joined where the plan is taken; one that nobody
    takes holds nothing up.
    """

    def __init__(self, sequences: Sequence[Sequence_], make: Callable[[Sequence[Sequence_]], OwnPlan]) -> None:
        self._sequences, self._make = sequences, make
        self._values = _values(sequences)  # alive, so that no others get their ids
        self._stamp = _stamp(self._values)
        self._found: OwnPlan | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fxpar-plan", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._make(self._sequences)
        except BaseException as error:
            self._error = error

    def is_of(self, sequences: Sequence[Sequence_]) -> bool:
        """Whether it is the plan of just these sequences, and nobody wrote to them since."""
        return _stamp(_values(sequences)) == self._stamp

    def result(self) -> OwnPlan:
        """Waits for it. Raises what making it raised."""
        self._thread.join()
        if self._found is None:
            assert self._error is not None
            raise self._error
        return self._found


def _values(sequences: object) -> list[tuple[object, object]]:
    """All that a mini-batch consists of, each with its place."""
    if not isinstance(sequences, list | tuple):
        return [("", sequences)]
    return [
        ((number, key), value)
        for number, one in enumerate(sequences)
        for key, value in (one.items() if isinstance(one, Mapping) else (("", one),))
    ]


def _stamp(values: Sequence[tuple[object, object]]) -> Hashable:
    """Changes with the values, and with every write by torch to one of them."""
    return tuple((place, id(one), _version(one)) for place, one in values)


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class DrawnAhead:
    """The mini-batches of `batches`, one after the other. The next one is drawn, and `begin(it)` called, before one is
    handed out; an error of drawing is raised where its mini-batch would be handed out.

    `state_dict` is that of `batches` as if nothing were drawn ahead; `load_state_dict` goes on from one.
    Raises MiniBatchesError for what cannot be iterated over.
    """

    def __init__(self, batches: Iterable[Sequence[Sequence_]], begin: Callable[[Sequence[Sequence_]], object]) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping):
            raise MiniBatchesError(type(batches).__name__)
        self._batches: Any = batches
        self._begin = begin
        self._iterator: Iterator[Sequence[Sequence_]] = iter(batches)
        self._drawn: Callable[[], Sequence[Sequence_]] | None = None
        self._state: Any = None

    def __iter__(self) -> DrawnAhead:
        return self

    def __next__(self) -> Sequence[Sequence_]:
        drawn, self._drawn = self._drawn or self._draw(), None
        current = drawn()
        if hasattr(self._batches, "state_dict"):
            self._state = copy.deepcopy(self._batches.state_dict())
        self._drawn = self._draw(self._begin)
        return current

    def _draw(self, begin: Callable[[Sequence[Sequence_]], object] = lambda _: None) -> Callable[[], Any]:
        """What gives the next mini-batch, or raises what drawing it has raised."""
        try:
            found = next(self._iterator)
        except Exception as error:
            return _raiser(error)
        begin(found)
        return lambda: found

    def state_dict(self) -> Any:
        """Where `batches` stood after the last mini-batch that was handed out."""
        return self._batches.state_dict() if self._drawn is None else self._state

    def load_state_dict(self, state: Any) -> None:
        self._batches.load_state_dict(state)
        self._iterator, self._drawn = iter(self._batches), None


def _raiser(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
