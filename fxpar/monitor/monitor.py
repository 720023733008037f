"""A rank that dies or hangs ends the job on all ranks with an error that names it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import util
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fxpar.errors import ConnectionLostError, PeerLostError
from fxpar.monitor.beat import DONE, ENDED, EXPLAIN, FAILED, LEFT, RUN, Beat
from fxpar.monitor.door import Door, address_towards, try_doors
from fxpar.monitor.link import JUDGE, Link, Pace
from fxpar.monitor.process import host_identity, node_of, process_state, where_is
from fxpar.monitor.signs import is_timeout, looks_like_peer_loss
from fxpar.monitor.standing import Standing, message_of, print_and_exit
from fxpar.monitor.verdict import LINKS, Silence, Verdict, Watch, describe, first_gone

# A heartbeat thread of a busy machine may miss a beat or two; that many intervals without one mean that it is gone.
PATIENCE_INTERVALS = 4
# The end of a process is seen a little later than that of its connections.
_SETTLE_S = 0.1


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
        self._door: Door | None = None
        self._phase, self._progress, self._status = "start", 0, RUN
        self._thread_id, self._own_host, self._pid = 0, "", 0
        self._zero_s, self._in_step, self._timed_out = 0.0, False, False
        self._silence = Silence(timeout_s, 2 * interval_s)
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
        self._thread_id, self._own_host, self._pid = threading.get_ident(), host_identity(), os.getpid()
        self._status, self._timed_out, self._in_step = RUN, False, self.rank == JUDGE
        self._zero_s = time.monotonic()
        connection: Any = self._store  # the stubs lack clone()
        try:
            store = dist.PrefixStore("fxpar-monitor", connection.clone())
            # The verdict of an earlier monitor on the same store must not count: each start has keys of its own.
            store = dist.PrefixStore(str(store.add(f"starts/{self.rank}", 1)), store)
        except dist.DistError as error:
            raise self._lost(self._host_verdict({}, {}, _how_lost(error)), "start of the monitor", error) from error
        self._door = Door(address_towards(connection))
        pace = Pace(self.interval_s, self.timeout_s, self.patience_s / 4)
        self._link = Link(self.rank, self.world, self._own_host, self._pid, store, pace, self)
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
        if isinstance(error, PeerLostError) or self._status == LEFT or (error is not None and self._is_caused(error)):
            self._status = LEFT
        elif error is None:
            self._status = DONE
        else:
            self._status = FAILED
            who = f"rank {self.rank} on {node_of(self._own_host)} (in phase {self._phase!r})"
            publish = Verdict("failed", (self.rank,), who, f"{type(error).__name__}: {error}"[:500])
        before = link.rounds
        link.ask(publish=publish)
        link.wait_round(before, self.interval_s)
        if self.rank == self.host:
            self._let_others_end(link, 3 * self.interval_s)
        self._link = None
        link.ask(close=True)
        link.join(self.interval_s)
        if self._door is not None:
            self._door.close()

    def stop_at_exit(self) -> None:
        """Stop when this process ends, told by the error that ends it; one that a lost peer caused is explained then."""
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
            try:
                yield
            except PeerLostError:
                raise
            except Exception as error:
                if not looks_like_peer_loss(error):
                    raise
                raise self.explain(error) from error

    def explain(self, error: Exception) -> PeerLostError:
        """The error to raise in place of `error`, which a collective, a send, a receive or a store call raised.

        Waits at most PATIENCE_INTERVALS + 2 intervals, on the host of the store until the others know the verdict too.
        The result has `error` as its `__cause__`.
        """
        if isinstance(error, PeerLostError):
            return error
        link, phase = self._link, self._phase
        self._timed_out, self._status = is_timeout(error), EXPLAIN
        verdict = Verdict("unknown") if link is None else self._search(link)
        lost = self._lost(verdict, phase, error)
        lost.__cause__ = error
        self._status = LEFT
        if link is not None:
            link.ask()
            if self.rank == self.host:
                self._let_others_end(link, self.patience_s)
        return lost

    def _search(self, link: Link) -> Verdict:
        watch = Watch(self.rank, self.world, self.patience_s, self._state_of, self._timed_out)
        end_s = self.elapsed_s() + self.patience_s + self.interval_s
        rounds, first = link.rounds, link.rounds + 1  # the round under way may not read the beats yet
        link.ask(hurry=True)
        while link.verdict is None:
            seen = link.wait_round(rounds, end_s - self.elapsed_s())
            rounds, now_s = link.rounds, self.elapsed_s()
            if link.verdict is not None:
                break
            if link.error is not None:
                time.sleep(_SETTLE_S)
                return self._host_verdict(link.beats, link.gone, _how_lost(link.error))
            if not seen and rounds < first:
                return self._host_verdict(link.beats, link.gone, "")
            watch.update({**link.beats, self.rank: self.beat(rounds)}, now_s, link.gone)
            began_s = now_s if watch.since_s is None else watch.since_s
            if began_s == now_s:
                link.try_doors(self._doors(link))
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

    def _doors(self, link: Link) -> dict[int, str]:
        """One door of each other address."""
        own = "" if self._door is None else self._door.name.partition("|")[0]
        by_address = {beat.door.partition("|")[0]: beat for beat in reversed(link.beats.values()) if beat.door}
        return {beat.rank: beat.door for address, beat in by_address.items() if address != own}

    def _host_verdict(self, beats: dict[int, Beat], gone: dict[int, float], detail: str) -> Verdict:
        """The store itself fails (`detail`, empty if it does not answer): what was known before, or its host."""
        now_s = self.elapsed_s()
        died = first_gone(gone, beats)
        if died:
            return Verdict("died", died, describe(beats, died, now_s))
        if self.host is None:
            return Verdict("host", (), "the launcher, not a rank,", detail or "does not answer")
        beat = beats.get(self.host)
        if beat is None:
            return Verdict("host", (self.host,), f"rank {self.host}", detail or "does not answer")
        who, state = describe(beats, [self.host], now_s), self._state_of(beat)
        if not detail:
            detail = f"does not answer on {node_of(self._own_host)}: its process is stopped"
            if state != "stopped" and beat.door and try_doors({self.host: beat.door}, self.interval_s):
                detail = f"cannot be reached from {node_of(self._own_host)}: its machine is down, or the network between"
        kind = "done" if beat.status == DONE else {"gone": "died", "stopped": "stopped"}.get(state, "host")
        return Verdict(kind, (self.host,), who, detail)

    def _lost(self, verdict: Verdict, phase: str, error: BaseException | str) -> PeerLostError:
        text = verdict.text
        if self.rank in verdict.ranks and verdict.kind not in LINKS:
            text = f"the other ranks gave up on this rank: {text}"
        made = ConnectionLostError if verdict.kind in LINKS else PeerLostError
        noticed = error if isinstance(error, str) else _one_line(error)
        return made(verdict.ranks, verdict.kind, text, self.rank, phase, noticed, node_of(self._own_host))

    def _is_caused(self, error: BaseException) -> bool:
        """Whether another rank's end caused this error: it says so, or one was there before it, without a word."""
        link = self._link
        if link is None or looks_like_peer_loss(error):
            return looks_like_peer_loss(error)
        if not isinstance(error, Exception):
            return False
        time.sleep(_SETTLE_S)
        before = link.rounds
        link.ask()
        link.wait_round(before, self.interval_s)
        return link.verdict is not None or bool(first_gone(self._all_gone(link), link.beats))

    # ----------------------------------------------------------------------------- called by the link's thread
    def beat(self, count: int) -> Beat:
        """What this rank says of itself now."""
        where = where_is(self._thread_id) if self._status == RUN else ""
        link, door = self._link, self._door
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
            {} if link is None else self._all_gone(link),
            None if link is None else link.unreachable,
        )

    def round_done(self) -> None:
        """Look whether a rank is silent for too long, and whether this one waits for nobody."""
        link = self._link
        if link is None:
            return
        if self._door is not None:
            self._door.clear()
        if not self._in_step and self._status == RUN and JUDGE in link.beats:
            self._zero_s, self._in_step = time.monotonic() - link.beats[JUDGE].elapsed_s, True
        passed_s, standing_s = self._standing.look(self._thread_id)
        silent = self._silence.update(link.beats, passed_s)
        if silent and link.verdict is None and link.error is None:
            stopped = [beat for beat in silent if self._state_of(beat) == "stopped"]
            ranks = [beat.rank for beat in stopped or silent]
            kind = "stopped" if stopped else "silent"
            link.ask(publish=Verdict(kind, tuple(ranks), describe(link.beats, ranks, self.elapsed_s())))
        if standing_s < self.leave_s or self._status == EXPLAIN:
            return
        verdict = link.verdict
        if verdict is None and link.error is not None:
            verdict = self._host_verdict(link.beats, link.gone, _how_lost(link.error))
        died = first_gone(self._all_gone(link), link.beats)
        if verdict is None and died and self._standing.is_in_wait:
            verdict = link.settle(Verdict("died", died, describe(link.beats, died, self.elapsed_s())))
        if verdict is not None:
            by = f"its monitor, as it still waited at {where_is(self._thread_id)}"
            self._end(self._lost(verdict, self._phase, by))

    def elapsed_s(self) -> float:
        """Since the start of rank 0's monitor, or of this one until it has heard of that."""
        return time.monotonic() - self._zero_s

    # ------------------------------------------------------------------------------------------- helpers
    def _all_gone(self, link: Link) -> dict[int, float]:
        """The processes that this rank saw end, and those of which the judge knows."""
        found = dict(link.gone)
        for beat in link.beats.values() if self.rank == JUDGE else [link.beats[JUDGE]] if JUDGE in link.beats else []:
            for rank, at in beat.gone.items():
                found[rank] = min(at, found.get(rank, at))
        return found

    def _state_of(self, beat: Beat) -> str:
        return process_state(beat.pid) if beat.host == self._own_host else ""

    def _let_others_end(self, link: Link, limit_s: float) -> None:
        """Keep the store up until all others ended or know the verdict, or for a while."""
        end = time.monotonic() + limit_s
        link.ask(hurry=True)
        while time.monotonic() < end and link.error is None:
            link.wait_round(link.rounds, end - time.monotonic())
            blamed = {self.rank, *(() if link.verdict is None else link.verdict.ranks)}
            waiting = set(range(self.world)) - set(self._all_gone(link)) - blamed
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


def unwatched(error: Exception, rank: int, phase: str) -> PeerLostError:
    """What to raise for an error that a lost peer caused where no monitor runs: it cannot name the rank."""
    return PeerLostError((), "unknown", Verdict("unknown").text, rank, phase, _one_line(error))


def _one_line(error: BaseException) -> str:
    """`Type: first line of its text`, without gloo's source line and advice and the C++ stack that torch appends."""
    line = (str(error).splitlines() or [""])[0]
    if line.startswith("[/"):
        line = line.partition("] ")[2] or line
    return f"{type(error).__name__}: {line.partition('. This is typically')[0][:300]}".rstrip(".")


def _how_lost(error: BaseException) -> str:
    """What the store did; empty if it did not answer."""
    return "" if is_timeout(error) else f"closed the connection ({_one_line(error)})"
