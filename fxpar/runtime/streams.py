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


def carry_out(plan: MiniBatchSchedule, do: Do, shown: Shown) -> Mapping[GroupAction, float]:
    """`do` every action; returns the seconds that this thread spent on each, or in waiting for it.

    `shown(action)` is a context for what this thread is at. The first error of either thread is raised here: what the
    other stream has not begun is left out. If this thread fails first, a transfer that is under way is left to itself,
    as its end may depend on ranks that are gone.
    """
    transfers = _Transfers(plan, do)
    spent: dict[GroupAction, float] = defaultdict(float)

    def timed(action: GroupAction, work: Do) -> None:
        begun = time.perf_counter()
        with shown(action):
            work(action)
        spent[action] += time.perf_counter() - begun

    try:
        transfers.start()
        for action in plan.compute:
            for need in plan.needs.get(action, ()):
                if need in transfers.ended:
                    timed(need, transfers.wait)
            timed(action, do)
            transfers.has_run(action)
        for action in plan.transfer:
            timed(action, transfers.wait)
    finally:
        transfers.stopped = True
        transfers.wake()
    return spent


@dataclass(eq=False)
class _Transfers:
    """The transfer stream, and what the compute stream tells it. No thread is made for an empty one."""

    plan: MiniBatchSchedule
    do: Do
    stopped: bool = False
    error: BaseException | None = None
    ended: dict[GroupAction, threading.Event] = field(init=False)

    def __post_init__(self) -> None:
        self.ended = {action: threading.Event() for action in self.plan.transfer}
        self._computed = {action: threading.Event() for action in self.plan.compute}

    def start(self) -> None:
        if self.plan.transfer:
            threading.Thread(target=self._main, daemon=True, name="fxpar transfers").start()

    def has_run(self, action: GroupAction) -> None:
        self._computed[action].set()

    def wake(self) -> None:
        """Let the thread see that it is to stop."""
        for event in self._computed.values():
            event.set()

    def wait(self, action: GroupAction) -> None:
        """Until the action has ended; raises the error of the thread."""
        self.ended[action].wait()
        if self.error is not None:
            raise self.error

    def _main(self) -> None:
        try:
            for action in self.plan.transfer:
                for need in self.plan.needs.get(action, ()):
                    if need in self._computed:
                        self._computed[need].wait()
                if self.stopped:
                    return
                self.do(action)
                self.ended[action].set()
        except BaseException as error:
            self.error = error
        finally:
            for event in self.ended.values():
                event.set()
