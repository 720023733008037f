"""From a failed operation to the verdict that holds for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fxpar.monitor.beat import DONE, FAILED, Beat
from fxpar.monitor.door import try_doors
from fxpar.monitor.link import JUDGE, Link
from fxpar.monitor.process import node_of, process_state
from fxpar.monitor.signs import is_timeout, one_line
from fxpar.monitor.verdict import Verdict, Watch, describe, first_gone

# The end of a process is seen a little later than that of its connections, and others may end together with it.
SETTLE_S = 0.1


@dataclass(frozen=True)
class BlameSearch:
    """One rank's search for the rank to blame, on what its link has read.

    `host` is the rank that serves the store, or None; `elapsed_s` this rank's clock, `own_beat` what it says of itself
    (both for descriptions), `patience_s` how long a rank must not change to count as silent or stuck.
    """

    rank: int
    world: int
    host: int | None
    own_host: str
    interval_s: float
    patience_s: float
    link: Link
    elapsed_s: Callable[[], float]
    own_beat: Callable[[], Beat]

    def run(self, timed_out: bool) -> Verdict:
        """The verdict that holds, after at most `patience_s` and two intervals."""
        link = self.link
        watch = Watch(self.rank, self.world, self.patience_s, self.state_of, timed_out)
        end_s = self.elapsed_s() + self.patience_s + self.interval_s
        rounds, first = link.rounds, link.rounds + 1  # the round under way may not read the beats yet
        link.ask(hurry=True)
        while link.verdict is None:
            if link.error is None and self.host in link.beats and self.state_of(link.beats[self.host]) == "stopped":
                return self.of_store("")
            seen = link.wait_round(rounds, end_s - self.elapsed_s())
            rounds, now_s = link.rounds, self.elapsed_s()
            if link.verdict is not None:
                break
            if link.error is not None:
                time.sleep(SETTLE_S)
                return self.of_store(how_lost(link.error))
            if not seen and rounds < first:
                return self.of_store("")
            is_first = watch.since_s is None
            watch.update({**link.beats, self.rank: self.own_beat()}, now_s, link.gone)
            if is_first:
                link.try_doors(self._doors())  # and another round
            waited_s = now_s - (watch.since_s or now_s)
            verdict = watch.certain(now_s)
            if verdict is not None and is_first:
                time.sleep(SETTLE_S)
                continue
            if verdict is None and (waited_s >= self.patience_s or not seen):
                verdict = watch.final(now_s)
            if verdict is not None:
                return self._publish(verdict)
        return link.verdict

    def of_store(self, detail: str) -> Verdict:
        """The store itself fails (`detail`, empty if it does not answer): what was known before, or its host."""
        died = self.died()
        if died is not None:
            return died
        if self.host is None:
            return Verdict("host", (), "the launcher, not a rank,", detail or "does not answer")
        beat = self.link.beats.get(self.host)
        if beat is None:
            return unborn_host(self.host, detail)
        who, state, node = describe(self.link.beats, [self.host], self.elapsed_s()), self.state_of(beat), self.own_host
        if beat.status == FAILED:
            unread = "its store was gone before this rank had read the error, which its own output shows"
            return Verdict("failed", (self.host,), who, unread)
        if not detail:
            detail = f"does not answer on {node_of(node)}: its process is stopped"
            if state != "stopped" and beat.door and try_doors({self.host: beat.door}, self.interval_s):
                detail = f"cannot be reached from {node_of(node)}: its machine is down, or the network between"
        kind = "done" if beat.status == DONE else {"gone": "died", "stopped": "stopped"}.get(state, "host")
        return Verdict(kind, (self.host,), who, detail)

    def died(self) -> Verdict | None:
        """The ranks whose processes ended without a word, as far as this rank knows.

        Where the store does not answer, only those that ended before it fell silent: later ones ended because of that,
        and their words did not arrive.
        """
        link, gone = self.link, self.all_gone()
        waits = link.busy and self.elapsed_s() > link.asked_s + self.interval_s
        if waits if link.error is None else is_timeout(link.error):
            gone = {rank: at for rank, at in gone.items() if at <= link.asked_s}
        ranks = first_gone(gone, link.beats)
        return Verdict("died", ranks, describe(self.link.beats, ranks, self.elapsed_s())) if ranks else None

    def all_gone(self) -> dict[int, float]:
        """The processes that this rank saw end, and those of which the judge knows."""
        beats, found = self.link.beats, dict(self.link.gone)
        for beat in beats.values() if self.rank == JUDGE else [beats[JUDGE]] if JUDGE in beats else []:
            for rank, at in beat.gone.items():
                found[rank] = min(at, found.get(rank, at))
        return found

    def state_of(self, beat: Beat) -> str:
        """As `process_state`; empty for a rank of another machine."""
        return process_state(beat.pid) if beat.host == self.own_host else ""

    def _publish(self, verdict: Verdict) -> Verdict:
        """Offer a verdict to all ranks; the one that holds, which another rank may have published before."""
        for _ in range(2):  # the round under way may have looked already
            before = self.link.rounds
            self.link.ask(publish=verdict)
            if not self.link.wait_round(before, self.interval_s) or self.link.verdict is not None:
                break
        return self.link.verdict or verdict

    def _doors(self) -> dict[int, str]:
        """One door of each other address."""
        own = self.own_beat().door.partition("|")[0]
        by_address = {beat.door.partition("|")[0]: beat for beat in self.link.beats.values() if beat.door}
        return {beat.rank: beat.door for address, beat in by_address.items() if address != own}


def how_lost(error: BaseException) -> str:
    """What the store did; empty if it did not answer."""
    return "" if is_timeout(error) else f"closed the connection ({one_line(error)})"


def unborn_host(host: int | None, detail: str) -> Verdict:
    """The store fails before its host has said anything."""
    who, ranks = ("the launcher", ()) if host is None else (f"rank {host}", (host,))
    return Verdict("host", ranks, who, detail or "does not answer")
