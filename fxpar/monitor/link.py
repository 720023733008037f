"""The one thread of a rank that talks to the store, so that a store that hangs never hangs the training thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from fxpar.monitor.beat import Beat
from fxpar.monitor.door import try_doors
from fxpar.monitor.process import Neighbours
from fxpar.monitor.verdict import Verdict

JUDGE = 0  # reads the beats of all ranks in every round; all others read its beat


class Owner(Protocol):
    """What the thread asks the monitor; `round_done` is called after every round, also when the store is lost."""

    def beat(self, count: int) -> Beat: ...

    def elapsed_s(self) -> float: ...

    def round_done(self) -> None: ...


@dataclass(frozen=True)
class Pace:
    """Seconds between rounds, until a store that does not answer counts as lost, and for one attempt to connect."""

    interval_s: float
    timeout_s: float
    attempt_s: float


class Link(threading.Thread):
    """Writes this rank's beat once per interval, looks whether a verdict is out, and reads the beats of the
    judge and of the ranks of this host.

    While `hurried` rounds come twice as fast and read the beats of all ranks, as those of the judge always do. A
    process of this host that ends starts a round at once. `wait_round` lets the training thread wait for a round, with
    a limit. When the store fails (`error`) the thread goes on to watch the processes of this host.
    """

    def __init__(self, rank: int, world: int, host: str, pid: int, store: dist.Store, pace: Pace, owner: Owner) -> None:
        super().__init__(daemon=True, name="fxpar-monitor")
        self._rank, self._world, self._store, self._pace, self._owner = rank, world, store, pace, owner
        self._changed = threading.Condition()
        self._neighbours = Neighbours()
        self._beside, self._known_beside = f"host/{host}", 0
        self._own_place = f"{rank} {pid}"
        self._read_always = {JUDGE}
        self._to_publish: Verdict | None = None
        self._closing = False
        self._to_try: dict[int, str] = {}
        self.unreachable: tuple[int, ...] | None = None
        self.hurried = False
        self.rounds = 0
        self.beats: dict[int, Beat] = {}
        self.gone: dict[int, float] = {}
        self.verdict: Verdict | None = None
        self.error: Exception | None = None

    # ---------------------------------------------------------------------------- called by the training thread
    def ask(self, publish: Verdict | None = None, hurry: bool = False, close: bool = False) -> None:
        """Begin the next round now; optionally offer a verdict, read all beats, or end after that round."""
        with self._changed:
            self._to_publish = publish or self._to_publish
            self.hurried = self.hurried or hurry
            self._closing = self._closing or close
            if self.is_alive():
                self._neighbours.wake()

    def try_doors(self, doors: dict[int, str]) -> None:
        """Find out which of these ranks can be reached; `unreachable` says it after the next round."""
        self._to_try = doors
        self.ask()

    def wait_round(self, after: int, limit_s: float) -> bool:
        """Wait until more than `after` rounds are done; False if that takes over `limit_s` or the store fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.rounds > after or self.error is not None, max(0.0, limit_s))
            return self.rounds > after

    # ------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        count = 0
        while True:
            closing, count = self._closing, count + 1
            if self.error is None:
                try:
                    self._round(count)
                except Exception as error:
                    self.error = error
            with self._changed:
                self.rounds += self.error is None
                self._changed.notify_all()
                if closing:
                    self._neighbours.close()
                    return
            self._owner.round_done()
            interval_s = self._pace.interval_s
            for rank in self._neighbours.wait(interval_s / 2 if self.hurried else interval_s):
                self.gone[rank] = self._owner.elapsed_s()

    def _round(self, count: int) -> None:
        if self._to_try:
            doors, self._to_try = self._to_try, {}
            self.unreachable = try_doors(doors, self._pace.attempt_s)
        beat = self._owner.beat(count)
        own = f"beat/{beat.rank}"
        self._store.set(own, beat.to_text())
        # Of all requests only this one ends when its time is up.
        self._store.wait([own], timedelta(seconds=self._pace.timeout_s))
        if count == 1:
            self._store.set(f"{self._beside}/{self._store.add(self._beside, 1)}", self._own_place)
        self._meet_neighbours()
        if self.verdict is None and self._to_publish is not None:
            self.settle(self._to_publish)
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = Verdict.from_text(self._store.get("verdict"))
        self._read(range(self._world) if self.hurried or self._rank == JUDGE else sorted(self._read_always))

    def settle(self, offered: Verdict) -> Verdict:
        """Publish a verdict; the one that holds, which another rank may have published before."""
        if self.verdict is None:
            try:
                self.verdict = Verdict.from_text(self._store.compare_set("verdict", "", offered.to_text()))
            except dist.DistError as error:
                self.error, self.verdict = error, offered
        return self.verdict

    def _meet_neighbours(self) -> None:
        """Watch the processes of this host that have come since."""
        while self._known_beside < self._store.add(self._beside, 0):
            key = f"{self._beside}/{self._known_beside + 1}"
            if not self._store.check([key]):
                return
            self._known_beside += 1
            rank, pid = map(int, self._store.get(key).split())
            if rank != self._rank:
                self._neighbours.add(rank, pid)
                self._read_always.add(rank)

    def _read(self, ranks: range | list[int]) -> None:
        keys = [f"beat/{rank}" for rank in ranks if rank != self._rank]
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]  # get() would wait for the others
        found = [Beat.from_text(text) for text in self._store.multi_get(keys)] if keys else []
        self.beats = self.beats | {beat.rank: beat for beat in found}
