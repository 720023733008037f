"""Carries out the two streams of a mini-batch on this rank: compute in the calling thread, transfers in another one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fxpar.schedule.mini_batch import GroupAction, MiniBatchSchedule

Do = Callable[[GroupAction], object]
Shown = Callable[[GroupAction], AbstractContextManager[object]]
INTERRUPTED_S = 2.0  # that a transfer under way has to end in when the user interrupts


def carry_out(plan: MiniBatchSchedule, do: Do, shown: Shown) -> Mapping[GroupAction, float]:
    """`do` every action; returns the seconds that this thread spent on each, or in waiting for it.

    `shown(action)` is a context for what this thread is at. The first error of either thread is raised here, once
    nothing is under way any more. If it is of this thread, transfers still run as far as they need nothing more from
    it: where all ranks raise the same error they have done the same, and the next mini-batch finds them alike.
    """
    transfers = _Transfers(plan, do)
    spent: dict[GroupAction, float] = defaultdict(float)
    coming = list(plan.transfer)

    def timed(action: GroupAction, work: Do) -> None:
        begun = time.perf_counter()
        with shown(action):
            work(action)
        spent[action] += time.perf_counter() - begun

    def wait_for(last: GroupAction) -> None:
        """One transfer after the other, so that what is shown is what is under way."""
        while last in coming:
            timed(coming[0], transfers.wait)
            del coming[0]

    try:
        transfers.start()
        for action in plan.compute:
            for need in plan.needs.get(action, ()):
                wait_for(need)
            transfers.begins(action)
            timed(action, do)
        for action in plan.transfer[-1:]:
            wait_for(action)
    except Exception:
        transfers.stop()
        for action in coming:
            with shown(action):
                transfers.ended[action].wait()
        transfers.join()
        raise
    except BaseException:
        transfers.stop()
        transfers.join(INTERRUPTED_S)
        raise
    transfers.join()
    return spent


@dataclass(eq=False)
class _Transfers:
    """The transfer stream, and what the compute stream tells it. No thread is made for an empty one."""

    plan: MiniBatchSchedule
    do: Do
    error: BaseException | None = None
    ended: dict[GroupAction, threading.Event] = field(init=False)
    _done: set[GroupAction] = field(default_factory=set)
    _running: set[GroupAction] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ended = {action: threading.Event() for action in self.plan.transfer}
        self._begun = {action: threading.Event() for action in self.plan.compute}
        self._thread = threading.Thread(target=self._main, daemon=True, name="fxpar transfers")

    def start(self) -> None:
        if self.plan.transfer:
            self._thread.start()

    def begins(self, action: GroupAction) -> None:
        """An action of the compute stream; what it feeds may begin now."""
        self._running.add(action)
        self._begun[action].set()

    def stop(self) -> None:
        """Nothing more will begin: let the thread end where it would wait for it."""
        for event in self._begun.values():
            event.set()

    def join(self, seconds: float | None = None) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

    def wait(self, action: GroupAction) -> None:
        """Until the action has ended; raises the error that ended it."""
        self.ended[action].wait()
        if self.error is not None and action not in self._done:
            raise self.error

    def _main(self) -> None:
        try:
            for action in self.plan.transfer:
                feeding = self.plan.fed_by.get(action)
                if feeding is not None:
                    self._begun[feeding].wait()
                    if feeding not in self._running:
                        return
                self.do(action)
                self._done.add(action)
                self.ended[action].set()
        except BaseException as error:
            self.error = error
        finally:
            for event in self.ended.values():
                event.set()
