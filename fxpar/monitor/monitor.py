"""A rank that dies or hangs ends the job on all ranks with an error that names it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import util
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fxpar.errors import ConnectionLostError, PeerLostError
from fxpar.monitor.beat import DONE, ENDED, EXPLAIN, FAILED, LEFT, RUN, Beat
from fxpar.monitor.door import Door, address_towards
from fxpar.monitor.link import JUDGE, Link
from fxpar.monitor.process import Neighbours, host_identity, node_of
from fxpar.monitor.search import SETTLE_S, BlameSearch, how_lost, unborn_host
from fxpar.monitor.signs import is_timeout, looks_like_peer_loss, one_line
from fxpar.monitor.stack import WatchedThread
from fxpar.monitor.standing import Standing, message_of, print_and_exit
from fxpar.monitor.verdict import DUMB, LINKS, Silence, Verdict, describe

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
    verdict: the first one that a rank reaches, from who ended first without a word, not from who ended because of it.
    The rank that hosts the store leaves when the others know the verdict.

    Nothing can interrupt a wait of torch. So a rank that still waits `leave_s` after the verdict, or after another
    rank's process is gone, is ended by its monitor: `end(lost)`, which by default prints the error and exits with
    status 1. A rank without a heartbeat for `timeout_s` is lost even if nobody waits for it; for one that beats but
    makes no progress, give the process groups a timeout of `timeout_s` too.

    `host` is the rank whose process serves the store, or None if another process does. The store is cloned: the monitor
    has a connection of its own. All ranks make a monitor of a store the same number of times. Costs about six small
    requests to the store per interval, and on rank 0 one that reads the beats of all ranks.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: dist.Store,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 60.0,
        leave_s: float = 10.0,
        host: int | None = 0,
        end: Callable[[PeerLostError], object] | None = None,
    ) -> None:
        self.rank, self.world, self.host = rank, world, host
        self.interval_s, self.timeout_s, self.leave_s = interval_s, timeout_s, leave_s
        self.patience_s = PATIENCE_INTERVALS * interval_s
        self._end = end or print_and_exit
        self._store = store
        self._link: Link | None = None
        self._search: BlameSearch | None = None
        self._neighbours: Neighbours | None = None
        self._door: Door | None = None
        self._phase, self._progress, self._status = "start", 0, RUN
        self._thread, self._own_host, self._pid = WatchedThread(), "", 0
        self._zero_s, self._in_step, self._timed_out = 0.0, False, False
        self._inside, self._lost_s = 0, 0.0
        self._rounds, self._stalled_s = 0, 0.0
        self._silence = Silence(timeout_s)
        self._standing = Standing(2 * interval_s)

    @classmethod
    def of_world(cls, **options: Any) -> Monitor:
        """The monitor of the default process group, on that group's own store (of torchrun, or of rank 0)."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("call torch.distributed.init_process_group before Monitor.of_world")
        # torch's elastic agent serves the store from a process of its own, which outlives the ranks.
        host = None if dist.is_torchelastic_launched() else 0
        return cls(group.rank(), group.size(), group.get_group_store(), host=host, **options)

    # --------------------------------------------------------------------------------------------- life
    def start(self) -> Monitor:
        """Begin to beat; call it on the thread that trains. Raises PeerLostError if the store is gone already."""
        self._thread, self._own_host, self._pid = WatchedThread(), host_identity(), os.getpid()
        self._status, self._timed_out, self._in_step = RUN, False, self.rank == JUDGE
        self._zero_s = time.monotonic()
        connection: Any = self._store  # the stubs lack clone()
        self._neighbours = Neighbours(self.interval_s, self._look)
        try:
            store = dist.PrefixStore("fxpar-monitor", self._own_connection(connection))
            # The verdict of an earlier monitor on the same store must not count: each start has keys of its own.
            store = dist.PrefixStore(str(store.add(f"starts/{self.rank}", 1)), store)
            self._door = Door(address_towards(connection))
            link = Link(self.rank, self.world, self._own_host, self._pid, store, self.interval_s, self)
            who, waits = (self.rank, self.world, self.host, self._own_host), (self.interval_s, self.patience_s)
            self._link = link
            self._search = BlameSearch(*who, *waits, link, self.elapsed_s, lambda: self.beat(link.rounds))
            link.begin()
        except dist.DistError as error:
            self._link = self._search = None
            raise self._lost(unborn_host(self.host, how_lost(error)), "start of the monitor", error) from error
        self._neighbours.start()
        return self

    def _own_connection(self, connection: Any) -> dist.Store:
        """A connection to the store for this monitor alone. Where the host is gone a new one is tried again and again,
        but the one that is there tells of it at once.
        """
        key, made = f"fxpar-monitor/{self.rank}", Future[Any]()

        def make() -> None:
            try:
                made.set_result(connection.clone())
            except BaseException as error:
                made.set_exception(error)

        connection.set(key, "")
        connection.wait([key], timedelta(seconds=self.timeout_s))
        threading.Thread(target=make, daemon=True, name="fxpar-connect").start()
        while not made.done():
            wait([made], self.interval_s / 4)
            connection.check([key])
        return made.result()

    def all_are_here(self) -> None:
        """All ranks have started their monitors: know them from now on. Without this call, within a few intervals."""
        if self._link is not None:
            before = self._link.rounds
            self._link.ask()
            self._link.wait_round(before + self._link.busy, self.interval_s)

    def stop(self, error: BaseException | None = None) -> None:
        """End this rank's heartbeat: done, or ended by `error` (PeerLostError means: because of another rank).

        The rank that hosts the store stays for a few intervals, and after an error of its own for up to `leave_s`,
        until the others ended or know the verdict.
        """
        link = self._link
        if link is None:
            return
        publish, has_left = None, self._status == LEFT
        if isinstance(error, PeerLostError) or has_left or (error is not None and self._is_caused(error)):
            self._status = LEFT
        elif error is None:
            self._status = DONE
        else:
            self._status = FAILED
            who = f"rank {self.rank} (in phase {self._phase!r} on {node_of(self._own_host)})"
            publish = Verdict("failed", (self.rank,), who, f"{type(error).__name__}: {error}"[:500])
        if not has_left:
            before = link.rounds
            link.ask(publish=publish)
            link.wait_round(before, self.interval_s)
        if self.rank == self.host:
            # What is said last must be read: ranks of a busy machine are slow, and without the store they must guess.
            self._let_others_end(link, 3 * self.interval_s if publish is None else self.leave_s)
        self._link = self._search = None
        link.ask(close=True)
        link.join(self.interval_s)
        if self._neighbours is not None:
            self._neighbours.close()
            self._neighbours.join(self.interval_s)
        if self._door is not None:
            self._door.close()

    def stop_at_exit(self) -> None:
        """Stop when this process ends; an error that ends it, and that a lost peer caused, is explained then."""
        atexit.register(self._exit)
        util.Finalize(None, self._exit, exitpriority=10)  # processes of multiprocessing do not call atexit

    def _exit(self) -> None:
        error = sys.exception() or getattr(sys, "last_value", None)
        if isinstance(error, Exception) and not isinstance(error, PeerLostError) and self._is_caused(error):
            lost = self.explain(error)
            print(message_of(lost), file=sys.stderr, flush=True)
            error = lost
        self.stop(error)

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, PeerLostError) and self._is_caused(error):
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
    @contextmanager
    def explained(self, phase: str = "") -> Iterator[None]:
        """In the block (of this phase) an error that a lost peer caused is raised as PeerLostError."""
        with self.phase(phase) if phase else nullcontext():
            self._inside += 1
            try:
                yield
            except PeerLostError:
                raise
            except Exception as error:
                if not looks_like_peer_loss(error):
                    raise
                raise self.explain(error) from error
            finally:
                self._inside -= 1

    def explain(self, error: Exception) -> PeerLostError:
        """The error to raise in place of `error`, which a collective, a send, a receive or a store call raised.

        Waits at most PATIENCE_INTERVALS + 2 intervals, on the host of the store until the others know the verdict too.
        The result has `error` as its `__cause__`.
        """
        if isinstance(error, PeerLostError):
            return error
        link, phase = self._link, self._phase
        self._timed_out, self._status = is_timeout(error), EXPLAIN
        verdict = Verdict("unknown") if self._search is None else self._search.run(self._timed_out)
        lost = self._lost(verdict, phase, error)
        lost.__cause__ = error
        self._status = LEFT
        if link is not None and self.rank == self.host:
            self._let_others_end(link, max(self.patience_s, self.leave_s))
        elif link is not None:
            link.ask(close=True)  # the host may be gone any time now
        return lost

    def _lost(self, verdict: Verdict, phase: str, error: BaseException | str) -> PeerLostError:
        text = verdict.text
        if self.rank in verdict.ranks and verdict.kind not in LINKS:
            text = f"the other ranks gave up on this rank: {text}"
        made = ConnectionLostError if verdict.kind in LINKS else PeerLostError
        noticed = error if isinstance(error, str) else one_line(error)
        return made(verdict.ranks, verdict.kind, text, self.rank, phase, noticed, node_of(self._own_host))

    def _is_caused(self, error: BaseException) -> bool:
        """Whether another rank's end caused this error: it says so, or one was there before it, without a word."""
        link, search = self._link, self._search
        if looks_like_peer_loss(error):
            return True
        if link is None or search is None or not isinstance(error, Exception):
            return False
        time.sleep(SETTLE_S)
        before = link.rounds
        link.ask()
        link.wait_round(before, self.interval_s)
        return link.verdict is not None or search.died() is not None

    # -------------------------------------------------------------------- called by the threads of link and neighbours
    def beat(self, count: int) -> Beat:
        """What this rank says of itself now."""
        where = self._thread.where() if self._status == RUN else ""
        link, search, door = self._link, self._search, self._door
        return Beat(
            self.rank,
            count,
            round(self.elapsed_s(), 3),
            self._progress,
            self._status,
            self._phase,
            where,
            self._own_host,
            self._pid,
            "" if door is None else door.name,
            self._timed_out,
            link is not None and link.verdict is not None,
            {} if search is None else search.all_gone(),
            None if link is None else link.unreachable,
        )

    def met(self, rank: int, pid: int) -> None:
        """Another rank runs on this host."""
        if self._neighbours is not None:
            self._neighbours.add(rank, pid)

    def _look(self, gone: list[int]) -> None:
        """Once per interval: has a rank ended, or is one silent for too long; does this one wait for nobody?"""
        link, search = self._link, self._search
        if link is None or search is None:
            return
        if not self._in_step and self._status == RUN and JUDGE in link.beats:
            self._fall_in_step(link)
        if gone:
            link.gone = {**link.gone, **dict.fromkeys(gone, self.elapsed_s())}
            link.ask()
        if self._door is not None:
            self._door.clear()
        passed_s = self._standing.look(self._thread)
        self._stalled_s = self._stalled_s + passed_s if link.busy and link.rounds == self._rounds else 0.0
        self._rounds = link.rounds
        if self._stalled_s >= self.timeout_s:
            link.give_up(TimeoutError("the store timed out"))
        silent = self._silence.update(link.beats, passed_s)
        if silent and link.verdict is None and link.error is None:
            stopped = [beat for beat in silent if search.state_of(beat) == "stopped"]
            ranks = tuple(beat.rank for beat in stopped or silent)
            kind = "stopped" if stopped else "silent"
            link.ask(publish=Verdict(kind, ranks, describe(link.beats, ranks, self.elapsed_s())))
        if self._status != EXPLAIN:
            self._end_in_vain(link, search, passed_s)

    def _fall_in_step(self, link: Link) -> None:
        """Count seconds as rank 0 does from now on; who ended first must not depend on when that was."""
        zero_s, self._in_step = time.monotonic() - link.beats[JUDGE].elapsed_s, True
        link.gone = {rank: at + self._zero_s - zero_s for rank, at in link.gone.items()}
        self._zero_s = zero_s

    def _end_in_vain(self, link: Link, search: BlameSearch, passed_s: float) -> None:
        """End this process if it has waited, or has been in one call of fxpar, for `leave_s` since a rank was lost."""
        verdict, certain = link.verdict or search.died(), link.verdict is not None
        if verdict is None and link.error is not None:
            beat = None if self.host is None else link.beats.get(self.host)
            if beat is None or beat.status not in ENDED:
                verdict, certain = search.of_store(how_lost(link.error)), True
        self._lost_s = self._lost_s + passed_s if verdict is not None and self._inside else 0.0
        in_vain = self._standing.seconds >= self.leave_s and (certain or self._standing.is_in_wait)
        if verdict is not None and (in_vain or self._lost_s >= self.leave_s):
            link.ask(publish=verdict)
            link.wait_round(link.rounds, self.interval_s)
            verdict = link.verdict or verdict
            by = f"its monitor, which ended it in its wait at {self._thread.where()}"
            self._end(self._lost(verdict, self._phase, by))

    def elapsed_s(self) -> float:
        """Since the start of rank 0's monitor, or of this one until it has heard of that."""
        return time.monotonic() - self._zero_s

    # ------------------------------------------------------------------------------------------- helpers
    def _let_others_end(self, link: Link, limit_s: float) -> None:
        """Keep the store up until all others ended or know the verdict, or for a while."""
        end = time.monotonic() + limit_s
        link.ask(hurry=True)
        while time.monotonic() < end and link.error is None:
            link.wait_round(link.rounds, end - time.monotonic())
            dumb = link.verdict.ranks if link.verdict is not None and link.verdict.kind in DUMB else ()
            waiting = set(range(self.world)) - {self.rank, *link.gone, *dumb}
            beats = [link.beats.get(rank) for rank in waiting]
            if all(beat is not None and (beat.knows or beat.status in ENDED) for beat in beats):
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


def unwatched(error: Exception, rank: int, phase: str, kind: str = "unknown") -> PeerLostError:
    """What to raise for an error that a lost peer caused where no monitor runs: it cannot name the rank."""
    return PeerLostError((), kind, Verdict(kind).text, rank, phase, one_line(error), node_of(host_identity()))
