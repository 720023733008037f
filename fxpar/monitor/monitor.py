"""A rank that dies or hangs ends the job on all ranks with an error that names it."""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fxpar.errors import PeerLostError
from fxpar.monitor.beat import DONE, ENDED, EXPLAIN, FAILED, LEFT, RUN, Beat, host_identity, process_state, where_is
from fxpar.monitor.link import Link
from fxpar.monitor.signs import is_timeout, looks_like_peer_loss
from fxpar.monitor.verdict import Verdict, Watch, describe

# A heartbeat thread of a busy machine may miss a beat or two; that many intervals without one mean that it is gone.
PATIENCE_INTERVALS = 4


class Monitor:
    """Heartbeats of one rank, and the search for the missing peer when an operation of this rank failed.

        with Monitor(rank, world, store, timeout_s=60) as monitor:
            for step in steps:
                with monitor.phase(f"step {step}"):
                    ...

    On the way out of the `with` an error that looks like a lost peer becomes PeerLostError (its `__cause__` is the
    original); any other error is told to the other ranks, whose PeerLostError then quotes it. All ranks report the same
    verdict: the first one that a rank reaches. The monitor cannot interrupt a wait: give the process groups a timeout
    of `timeout_s` too (`dist.init_process_group(timeout=...)`); an error then comes within that plus about
    `PATIENCE_INTERVALS` intervals. Costs one small write and two small reads of the store per interval.

    `host` is the rank whose process serves the store, or None if another process does. The store is cloned: the monitor
    has a connection of its own. All ranks make a monitor of a store the same number of times.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: dist.Store,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 60.0,
        host: int | None = 0,
    ) -> None:
        self.rank, self.world, self.host = rank, world, host
        self.interval_s, self.timeout_s = interval_s, timeout_s
        self.patience_s = PATIENCE_INTERVALS * interval_s
        self._store = store
        self._link: Link | None = None
        self._phase, self._progress, self._status = "start", 0, RUN
        self._thread_id, self._own_host, self._pid = 0, "", 0
        self._zero_s, self._timed_out = 0.0, False

    @classmethod
    def of_world(cls, *, interval_s: float = 1.0, timeout_s: float = 60.0) -> Monitor:
        """The monitor of the default process group, on that group's own store (of torchrun, or of rank 0)."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("call torch.distributed.init_process_group before Monitor.of_world")
        # torch's elastic agent serves the store from a process of its own, which outlives the ranks.
        host = None if dist.is_torchelastic_launched() else 0
        store = group.get_group_store()
        return cls(group.rank(), group.size(), store, interval_s=interval_s, timeout_s=timeout_s, host=host)

    # --------------------------------------------------------------------------------------------- life
    def start(self) -> Monitor:
        """Begin to beat; call it on the thread that trains. Raises PeerLostError if rank 0 does not start as well."""
        connection: Any = self._store  # the stubs lack clone()
        store = dist.PrefixStore("fxpar-monitor", connection.clone())
        # The verdict of an earlier monitor on the same store must not count: each start has keys of its own.
        store = dist.PrefixStore(str(store.add(f"starts/{self.rank}", 1)), store)
        self._thread_id, self._own_host, self._pid = threading.get_ident(), host_identity(), os.getpid()
        self._status, self._timed_out, self._zero_s = RUN, False, time.monotonic()
        if self.rank != 0:
            self._zero_s -= self._elapsed_of_rank_0(store)
        self._link = Link(store, self.world, self.interval_s, self._beat, self.host)
        self._link.start()
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """End this rank's heartbeat: done, or ended by `error` (PeerLostError means: because of another rank).

        The rank that hosts the store stays for a few intervals, until the others ended or know the verdict.
        """
        link = self._link
        if link is None:
            return
        publish = None
        if error is None:
            self._status = DONE
        elif isinstance(error, PeerLostError):
            self._status = LEFT
        else:
            self._status = FAILED
            detail = f"{type(error).__name__}: {error}"[:500]
            publish = Verdict("failed", (self.rank,), f"rank {self.rank} (in phase {self._phase!r})", detail)
        before = link.rounds
        link.ask(publish=publish)
        link.wait_round(before, self.interval_s)
        if self.rank == self.host:
            self._let_others_end(link)
        link.ask(close=True)
        link.join(self.interval_s)
        self._link = None

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, PeerLostError) and looks_like_peer_loss(error):
            lost = self.explain(error)
            self.stop(lost)
            raise lost from error
        self.stop(None if isinstance(error, SystemExit) and not error.code else error)

    # -------------------------------------------------------------------------------------------- progress
    def phase(self, text: str) -> AbstractContextManager[None]:
        """Say what this rank does now, from here on or inside a `with`; each call counts as progress. Costs no I/O.

        Of ranks that all wait the one with the least progress is blamed: a call right before each transfer tells the
        rank that never came there from those that wait for it.
        """
        before, self._phase = self._phase, text
        self._progress += 1
        return _Phase(self, before)

    # ------------------------------------------------------------------------------------------- explain
    def explain(self, error: Exception) -> PeerLostError:
        """The error to raise in place of `error`, which a collective, a send, a receive or a store call raised.

        Waits at most PATIENCE_INTERVALS + 2 intervals. The result has `error` as its `__cause__`.
        """
        if isinstance(error, PeerLostError):
            return error
        phase, self._timed_out, self._status = self._phase, is_timeout(error), EXPLAIN
        lost = self._lost(self._search(), phase, error)
        lost.__cause__ = error
        self._status = LEFT
        if self._link is not None:
            self._link.ask()
        return lost

    def _search(self) -> Verdict:
        link = self._link
        if link is None:
            return Verdict("unknown")
        watch = Watch(
            self.rank, self.world, self.patience_s, lambda beat: process_state(beat, self._own_host), self._timed_out
        )
        end_s = self._elapsed_s() + self.patience_s + self.interval_s
        rounds, first = link.rounds, link.rounds + 1  # the round under way may not read the beats yet
        link.ask(watch=True)
        while link.verdict is None:
            seen = link.wait_round(rounds, end_s - self._elapsed_s())
            rounds, now_s = link.rounds, self._elapsed_s()
            if link.verdict is not None:
                break
            if link.error is not None:
                return self._host_verdict(link, f"closed the connection ({_one_line(link.error)})")
            if not seen and rounds < first:
                return self._host_verdict(link, "does not answer: its process is stopped, or its machine unreachable")
            if link.beats:
                watch.update(link.beats, now_s)
            began_s = now_s if watch.since_s is None else watch.since_s
            verdict = watch.certain(now_s)
            if verdict is None and (now_s - began_s >= self.patience_s or not seen):
                verdict = watch.final(now_s)
            if verdict is not None:
                return self._publish(link, verdict)
        return link.verdict

    def _publish(self, link: Link, verdict: Verdict) -> Verdict:
        """Offer a verdict to all ranks; the one that holds, which another rank may have published before."""
        for _ in range(2):  # the round under way may have looked already
            before = link.rounds
            link.ask(publish=verdict)
            if not link.wait_round(before, self.interval_s) or link.verdict is not None:
                break
        return link.verdict or verdict

    def _host_verdict(self, link: Link, detail: str) -> Verdict:
        """The store itself fails: its host is to blame, with what was read of it last."""
        if self.host is None:
            return Verdict("host", (), "the launcher, not a rank,", detail)
        beat = link.beats.get(self.host) or link.host_beat
        known = {} if beat is None else {self.host: beat}
        who, kind = describe(known, [self.host], self._elapsed_s()), "host"
        if beat is not None:
            state = process_state(beat, self._own_host)
            kind = "done" if beat.status == DONE else {"gone": "died", "stopped": "stopped"}.get(state, "host")
        return Verdict(kind, (self.host,), who, detail)

    def _lost(self, verdict: Verdict, phase: str, error: Exception) -> PeerLostError:
        if self.rank in verdict.ranks:
            text = f"the other ranks gave up on this rank: {verdict.text}"
        else:
            text = verdict.text
        return PeerLostError(verdict.ranks, verdict.kind, text, self.rank, phase, _one_line(error))

    # ------------------------------------------------------------------------------------------- helpers
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _beat(self, count: int) -> Beat:
        where = where_is(self._thread_id) if self._status == RUN else ""
        state = (self._progress, self._status, self._phase, where, self._own_host, self._pid, self._timed_out)
        return Beat(self.rank, count, round(self._elapsed_s(), 3), *state)

    def _elapsed_of_rank_0(self, store: dist.Store) -> float:
        """Rank 0's time since its start: only says how long ago a rank was seen, so a late answer does no harm."""
        try:
            store.wait(["beat/0"], timedelta(seconds=self.timeout_s))
        except dist.DistError as error:
            lost = self._lost(Verdict("unborn", (0,), "rank 0"), "start of the monitor", error)
            raise lost from error
        return Beat.from_text(store.get("beat/0")).elapsed_s

    def _let_others_end(self, link: Link) -> None:
        """Keep the store up until all others ended, or for a few intervals (each reads the verdict once in one)."""
        end = time.monotonic() + 3 * self.interval_s
        link.ask(watch=True)
        while time.monotonic() < end and link.error is None:
            link.wait_round(link.rounds, end - time.monotonic())
            if len(link.beats) == self.world and all(beat.status in ENDED for beat in link.beats.values()):
                return


class _Phase(AbstractContextManager[None]):
    """Restores the phase before when its `with` ends without an error (the text of an error names the inner one)."""

    def __init__(self, monitor: Monitor, before: str) -> None:
        self._monitor, self._before = monitor, before

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._monitor.phase(self._before)


def _one_line(error: BaseException) -> str:
    """`Type: first line of its text`, without gloo's source line and advice and the C++ stack that torch appends."""
    line = (str(error).splitlines() or [""])[0]
    if line.startswith("[/"):
        line = line.partition("] ")[2] or line
    return f"{type(error).__name__}: {line.partition('. This is typically')[0][:300]}".rstrip(".")
