"""From heartbeats to the ranks to blame: pure functions over beats, without a process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fxpar.monitor.beat import DONE, ENDED, FAILED, RUN, Beat

# What each kind says of `{who}`, the blamed ranks with what is known of each.
TEXTS: dict[str, str] = {
    "failed": "{who} failed by an error of its own: {detail}",
    "died": "{who} died: its process is gone",
    "stopped": "{who} is stopped (SIGSTOP or a debugger)",
    "silent": "{who} gives no sign of life: the process died or is stopped, or its machine is down or unreachable",
    "unborn": "{who} never started its monitor: the process died before, or hangs in its start",
    "host": "{who} hosts the store of the heartbeats, and the store {detail}",
    "stuck": "{who} lives but makes no progress",
    "done": "{who} ended its work while other ranks still wait for it: the ranks do not run the same steps",
    "slow": "{who} still makes progress, but others waited longer for it than the timeout allows",
    "connection": "no rank is missing: all heartbeats go on, so a connection between ranks broke",
    "unknown": "the monitor of this rank does not run, so it cannot say which rank is missing",
}


@dataclass(frozen=True)
class Verdict:
    """Which ranks are to blame and why; the first one published holds for all ranks."""

    kind: str
    ranks: tuple[int, ...] = ()
    who: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        return TEXTS[self.kind].format(who=self.who, detail=self.detail)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> Verdict:
        values: dict[str, Any] = json.loads(text)
        values["ranks"] = tuple(values["ranks"])
        return Verdict(**values)


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 3, 5` (at most eight, then `and 12 more`)."""
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:8])) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
    return f"rank{'s' if len(ordered) != 1 else ''} {shown}"


def describe(beats: Mapping[int, Beat], ranks: Iterable[int], now_s: float) -> str:
    """`rank 3 (in phase 'step 12' at train.py:8 in f, process 71 on node4, last heartbeat about 2.1 s ago)`."""
    ordered = sorted(ranks)
    known = [beats[rank] for rank in ordered if rank in beats]
    if not known:
        return name_ranks(ordered)
    first = known[0]
    place = f" at {first.where}" if first.where else ""
    age_s = max(0.0, now_s - first.elapsed_s)
    prefix = "" if len(ordered) == 1 else f"rank {first.rank} "
    node = first.host.partition("/")[0]
    return (
        f"{name_ranks(ordered)} ({prefix}in phase {first.phase!r}{place}, process {first.pid} on {node}, "
        f"last heartbeat about {age_s:.1f} s ago)"
    )


@dataclass
class Watch:
    """Collects what one rank sees of the others from the moment on at which an operation of it failed.

    `state_of(beat)` is `process_state` for ranks of this host; `patience_s` is how long a rank must not change to count
    as silent or stuck; `timed_out` says whether this rank's operation failed after its timeout or at once.
    """

    rank: int
    world: int
    patience_s: float
    state_of: Callable[[Beat], str]
    timed_out: bool = True
    beats: dict[int, Beat] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    moving: set[int] = field(default_factory=set)
    since_s: float | None = None

    def update(self, beats: Mapping[int, Beat], now_s: float) -> None:
        """Take in what the store holds at `now_s` (this rank's monotonic clock)."""
        if self.since_s is None:
            self.since_s = now_s
        for rank, beat in beats.items():
            before = self.beats.get(rank)
            if before is not None and beat.count != before.count:
                self.alive.add(rank)
            if before is not None and beat.progress != before.progress:
                self.moving.add(rank)
        self.beats.update(beats)

    def others(self, *statuses: str) -> list[Beat]:
        return [b for b in self.beats.values() if b.rank != self.rank and b.status in statuses]

    def certain(self, now_s: float) -> Verdict | None:
        """What can be said without waiting: a rank that says so itself, or whose process is seen to be gone."""
        failed = self.others(FAILED)
        if failed:
            return self._verdict("failed", failed, now_s)
        states = {beat.rank: self.state_of(beat) for beat in self.others(RUN)}
        for state, kind in (("gone", "died"), ("stopped", "stopped")):
            found = [self.beats[rank] for rank, seen in states.items() if seen == state and rank not in self.alive]
            if found:
                return self._verdict(kind, found, now_s)
        return None

    def final(self, now_s: float) -> Verdict:
        """The verdict after `patience_s`: silent before stuck before ended before slow before nobody.

        Ranks that left because of another one, and those that look for the culprit as well, are never blamed.
        """
        certain = self.certain(now_s)
        if certain is not None:
            return certain
        unborn = set(range(self.world)) - set(self.beats) - {self.rank}
        if unborn:
            return Verdict("unborn", tuple(sorted(unborn)), name_ranks(unborn))
        # A rank that stopped beating while it explained is lost too: those that ended themselves say so.
        silent = [b for b in self.beats.values() if b.rank not in {*self.alive, self.rank} and b.status not in ENDED]
        if silent:
            return self._verdict("silent", silent, now_s)
        # Where connections broke at once, those that still run may well wait for this very rank. But gloo also closes
        # the connections of a rank that timed out, so one timeout anywhere means that somebody is late.
        late = self.timed_out or any(beat.timed_out for beat in self.beats.values())
        running = self.others(RUN) if late else []
        stuck = [beat for beat in running if beat.rank not in self.moving]
        if stuck:
            # Those ahead wait themselves: the least progress is where it began.
            least = min(beat.progress for beat in stuck)
            return self._verdict("stuck", [beat for beat in stuck if beat.progress == least], now_s)
        for kind, found in (("done", self.others(DONE)), ("slow", running)):
            if found:
                return self._verdict(kind, found, now_s)
        return Verdict("connection")

    def _verdict(self, kind: str, found: list[Beat], now_s: float) -> Verdict:
        ranks = tuple(sorted(beat.rank for beat in found))
        return Verdict(kind, ranks, describe(self.beats, ranks, now_s))
