"""The one thread of a rank that talks to the store, so that a store that hangs never hangs the training thread."""

from __future__ import annotations

import threading
from typing import Protocol

import torch.distributed as dist

from fxpar.monitor.beat import Beat
from fxpar.monitor.door import try_doors
from fxpar.monitor.verdict import Verdict

JUDGE = 0  # reads the beats of all ranks in every round; all others read its beat


class Owner(Protocol):
    """What the thread asks the monitor, and tells it."""

    def beat(self, count: int) -> Beat: ...

    def met(self, rank: int, pid: int) -> None:
        """Another rank runs on this host, as this process."""


class Link(threading.Thread):
    """Writes this rank's beat once per interval, looks whether a verdict is out, and reads the beats of the judge and
    of the ranks of this host.

    While `hurried` rounds come twice as fast and read the beats of all ranks, as those of the judge always do.
    `wait_round` lets the training thread wait for a round, with a limit. No request to a store ends when its host is
    stopped: whoever loses patience says `give_up`. `gone` are the ranks of this host whose processes ended, and when;
    `asked_s` is when the last round began, by the same clock.
    """

    def __init__(
        self, rank: int, world: int, host: str, pid: int, store: dist.Store, interval_s: float, owner: Owner
    ) -> None:
        super().__init__(daemon=True, name="fxpar-monitor")
        self._rank, self._world, self._store, self._interval_s, self._owner = rank, world, store, interval_s, owner
        self._changed = threading.Condition()
        self._asked = threading.Event()
        self._beside, self._known_beside = f"host/{host}", 0
        self._own_place = f"{rank} {pid}"
        self._read_always = {JUDGE}
        self._to_publish: Verdict | None = None
        self._closing = False
        self._to_try: dict[int, str] = {}
        self.unreachable: tuple[int, ...] | None = None
        self.hurried = self.busy = False
        self.rounds, self.asked_s = 0, 0.0
        self.beats: dict[int, Beat] = {}
        self.gone: dict[int, float] = {}
        self.verdict: Verdict | None = None
        self.error: Exception | None = None

    # ------------------------------------------------------------------------------------- called by other threads
    def begin(self) -> None:
        """Let the others know of this rank, then start the thread."""
        self._store.set(f"{self._beside}/{self._store.add(self._beside, 1)}", self._own_place)
        self._store.set(f"beat/{self._rank}", self._owner.beat(1).to_text())
        self.start()

    def ask(self, publish: Verdict | None = None, hurry: bool = False, close: bool = False) -> None:
        """Begin the next round now; optionally offer a verdict, read all beats, or end after that round."""
        with self._changed:
            self._to_publish = publish or self._to_publish
            self.hurried = self.hurried or hurry
            self._closing = self._closing or close
        self._asked.set()

    def try_doors(self, doors: dict[int, str]) -> None:
        """Find out which of these ranks can be reached; `unreachable` says it after the next round."""
        self._to_try = doors
        self.ask()

    def wait_round(self, after: int, limit_s: float) -> bool:
        """Wait until more than `after` rounds are done; False if that takes over `limit_s` or the store fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.rounds > after or self.error is not None, max(0.0, limit_s))
            return self.rounds > after

    def give_up(self, error: Exception) -> None:
        """The store has failed."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        count = 1
        while self.error is None:
            # Cleared before the round: what is asked for during it gets a round of its own.
            self._asked.clear()
            closing, count, self.busy = self._closing, count + 1, True
            try:
                self._round(count)
            except Exception as error:
                self.give_up(error)
                return
            with self._changed:
                self.rounds, self.busy = self.rounds + 1, False
                self._changed.notify_all()
            if closing:
                return
            self._asked.wait(self._interval_s / 2 if self.hurried else self._interval_s)

    def _round(self, count: int) -> None:
        if self._to_try:
            doors, self._to_try = self._to_try, {}
            self.unreachable = try_doors(doors, self._interval_s)
        beat = self._owner.beat(count)
        self.asked_s = beat.elapsed_s
        self._store.set(f"beat/{beat.rank}", beat.to_text())
        self._meet_neighbours()
        if self.verdict is None and self._to_publish is not None:
            self.verdict = Verdict.from_text(self._store.compare_set("verdict", "", self._to_publish.to_text()))
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = Verdict.from_text(self._store.get("verdict"))
        self._read(range(self._world) if self.hurried or self._rank == JUDGE else sorted(self._read_always))

    def _meet_neighbours(self) -> None:
        """Tell of the ranks of this host that have come since."""
        while self._known_beside < self._store.add(self._beside, 0):
            key = f"{self._beside}/{self._known_beside + 1}"
            if not self._store.check([key]):
                return
            self._known_beside += 1
            rank, pid = map(int, self._store.get(key).split())
            if rank != self._rank:
                self._owner.met(rank, pid)
                self._read_always.add(rank)

    def _read(self, ranks: range | list[int]) -> None:
        keys = [f"beat/{rank}" for rank in ranks if rank != self._rank]
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]  # get() would wait for the others
        found = [Beat.from_text(text) for text in self._store.multi_get(keys)] if keys else []
        self.beats = self.beats | {beat.rank: beat for beat in found}
