"""The one thread of a rank that talks to the store, so that a store that hangs never hangs the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from fxpar.monitor.beat import Beat
from fxpar.monitor.verdict import Verdict


class Link(threading.Thread):
    """Writes this rank's beat once per interval, looks whether a verdict is out, and reads the beat of `host`.

    `beat_of(count)` gives the beat to write. While `watching`, each round also reads the beats of all ranks.
    `wait_round` lets the training thread wait for a round, with a limit. The host's beat is read all the time because
    nobody can read anything any more once the host of the store is gone.
    """

    def __init__(
        self, store: dist.Store, world: int, interval_s: float, beat_of: Callable[[int], Beat], host: int | None
    ) -> None:
        super().__init__(daemon=True, name="fxpar-monitor")
        self._store, self._world, self._interval_s, self._beat_of = store, world, interval_s, beat_of
        self._host = host
        self._changed = threading.Condition()
        self._asked = threading.Event()
        self._to_publish: Verdict | None = None
        self._closing = False
        self.watching = False
        self.rounds = 0
        self.beats: dict[int, Beat] = {}
        self.host_beat: Beat | None = None
        self.verdict: Verdict | None = None
        self.error: Exception | None = None

    # ---------------------------------------------------------------------------- called by the training thread
    def ask(self, publish: Verdict | None = None, watch: bool = False, close: bool = False) -> None:
        """Begin the next round now; optionally offer a verdict, read all beats, or end after that round."""
        with self._changed:
            self._to_publish = publish or self._to_publish
            self.watching = self.watching or watch
            self._closing = self._closing or close
        self._asked.set()

    def wait_round(self, after: int, limit_s: float) -> bool:
        """Wait until more than `after` rounds are done; False if that takes over `limit_s` or the store fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.rounds > after or self.error is not None, max(0.0, limit_s))
            return self.rounds > after

    # ------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        count = 0
        while True:
            # Cleared before the round: what is asked for during it gets a round of its own.
            self._asked.clear()
            closing, count = self._closing, count + 1
            try:
                self._round(count)
            except Exception as error:
                with self._changed:
                    self.error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self.rounds += 1
                self._changed.notify_all()
            if closing:
                return
            self._asked.wait(self._interval_s / 2 if self.watching else self._interval_s)

    def _round(self, count: int) -> None:
        beat = self._beat_of(count)
        self._store.set(f"beat/{beat.rank}", beat.to_text())
        offered = self._to_publish
        if self.verdict is None and offered is not None:
            self.verdict = Verdict.from_text(self._store.compare_set("verdict", "", offered.to_text()))
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = Verdict.from_text(self._store.get("verdict"))
        if self.watching:
            self.beats = self._read_all()
        elif self._host is not None and self._host != beat.rank and self._store.check([f"beat/{self._host}"]):
            self.host_beat = Beat.from_text(self._store.get(f"beat/{self._host}"))

    def _read_all(self) -> dict[int, Beat]:
        keys = [f"beat/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]  # get() would wait for the others
        beats = [Beat.from_text(text) for text in self._store.multi_get(keys)]
        return {beat.rank: beat for beat in beats}
