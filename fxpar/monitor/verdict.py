"""From heartbeats to the ranks to blame: pure functions over beats, without a process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fxpar.monitor.beat import DONE, ENDED, FAILED, RUN, Beat
from fxpar.monitor.process import node_of

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
    "link": "all ranks live, but {detail}",
    "connection": "all ranks live and reach each other, but a connection between ranks broke{detail}",
    "absent": "not all ranks have come: one died before, hangs in its start, or does not reach the others",
    "unknown": "no monitor runs on this rank, so it cannot say which rank is missing",
}
LINKS = ("link", "connection")  # nobody is to blame: what lies between the ranks is
DUMB = ("died", "stopped", "silent", "unborn")  # the blamed ranks say nothing any more
AT_ONCE_S = 0.02  # ranks that are seen to end within this time of the first one ended with it, not because of it


@dataclass(frozen=True)
class Verdict:
    """Which ranks are to blame and why; the first one published holds for all ranks. Of the kinds in LINKS, `ranks`
    are the two ends.
    """

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
    nodes = list(dict.fromkeys(node_of(beat.host) for beat in known))
    prefix = "" if len(ordered) == 1 else f"on {', '.join(nodes[:8])}; rank {first.rank} "
    return (
        f"{name_ranks(ordered)} ({prefix}in phase {first.phase!r}{place}, process {first.pid} on {nodes[0]}, "
        f"last heartbeat about {age_s:.1f} s ago)"
    )


def first_gone(gone: Mapping[int, float], beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """Of the ranks whose processes ended, those that did so first and without a word; none if all said why."""
    # A rank whose operation failed before it ended saw another one go, even if it had no time to say goodbye.
    silent = {rank: at for rank, at in gone.items() if rank not in beats or beats[rank].status == RUN}
    first = min(silent.values(), default=0.0)
    return tuple(sorted(rank for rank, at in silent.items() if at <= first + AT_ONCE_S))


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
    gone: dict[int, float] = field(default_factory=dict)
    since_s: float | None = None

    def update(self, beats: Mapping[int, Beat], now_s: float, gone: Mapping[int, float] | None = None) -> None:
        """Take in what the store holds at `now_s` (this rank's monotonic clock), and what this rank saw `gone`."""
        if self.since_s is None:
            self.since_s = now_s
        for rank, beat in beats.items():
            before = self.beats.get(rank)
            if before is not None and beat.count != before.count:
                self.alive.add(rank)
            if before is not None and beat.progress != before.progress:
                self.moving.add(rank)
        self.beats.update(beats)
        for seen in (gone or {}, *(beat.gone for beat in beats.values())):
            for rank, at in seen.items():
                self.gone[rank] = min(at, self.gone.get(rank, at))

    def others(self, *statuses: str) -> list[Beat]:
        return [b for b in self.beats.values() if b.rank != self.rank and b.status in statuses]

    def certain(self, now_s: float) -> Verdict | None:
        """What can be said without waiting: a rank that says so itself, or whose process is seen to be gone."""
        failed = self.others(FAILED)
        if failed:
            return self._verdict("failed", (beat.rank for beat in failed), now_s)
        died = first_gone(self.gone, self.beats)
        if died:
            return self._verdict("died", died, now_s)
        stopped = [b.rank for b in self.others(RUN) if b.rank not in self.alive and self.state_of(b) == "stopped"]
        return self._verdict("stopped", stopped, now_s) if stopped else None

    def final(self, now_s: float) -> Verdict:
        """The verdict after `patience_s`: silent before unreachable before stuck before ended before slow before
        nobody.

        Ranks that left because of another one, and those that look for the culprit as well, are never blamed.
        """
        certain = self.certain(now_s)
        if certain is not None:
            return certain
        unborn = set(range(self.world)) - set(self.beats) - {self.rank}
        if unborn:
            return Verdict("unborn", tuple(sorted(unborn)), name_ranks(unborn))
        # A rank that stopped beating while it explained is lost too: those that ended themselves say so.
        silent = [
            b.rank for b in self.beats.values() if b.rank not in {*self.alive, self.rank} and b.status not in ENDED
        ]
        if silent:
            return self._verdict("silent", silent, now_s)
        cut = self._cut()
        if cut is not None:
            return cut
        # Where connections broke at once, those that still run may well wait for this very rank. But gloo also closes
        # the connections of a rank that timed out, so one timeout anywhere means that somebody is late.
        late = self.timed_out or any(beat.timed_out for beat in self.beats.values())
        running = self.others(RUN) if late else []
        stuck = [beat for beat in running if beat.rank not in self.moving]
        if stuck:
            # Those ahead wait themselves: the least progress is where it began.
            least = min(beat.progress for beat in stuck)
            return self._verdict("stuck", (beat.rank for beat in stuck if beat.progress == least), now_s)
        for kind, found in (("done", self.others(DONE)), ("slow", running)):
            if found:
                return self._verdict(kind, (beat.rank for beat in found), now_s)
        return self._broken()

    def _cut(self) -> Verdict | None:
        """Two ranks of which one tried in vain to connect to the other."""
        for rank, beat in sorted(self.beats.items()):
            for other in beat.unreachable or ():
                if other in self.beats:
                    here, there = (f"rank {r} on {node_of(self.beats[r].host)}" for r in (rank, other))
                    detail = f"{here} cannot connect to {there}: the network between the two is broken or blocked"
                    return Verdict("link", (rank, other), detail=detail)
        return None

    def _broken(self) -> Verdict:
        """The ranks whose operations failed at once are the ends of what broke."""
        ends = [b for _, b in sorted(self.beats.items()) if not b.timed_out and b.status not in (RUN, DONE)]
        named = " and ".join(f"rank {b.rank} on {node_of(b.host)}" for b in ends[:8])
        return Verdict("connection", tuple(b.rank for b in ends), detail=f": {named} noticed it first" if named else "")

    def _verdict(self, kind: str, found: Iterable[int], now_s: float) -> Verdict:
        ranks = tuple(sorted(found))
        return Verdict(kind, ranks, describe(self.beats, ranks, now_s))


@dataclass
class Silence:
    """How long each rank has not beaten."""

    limit_s: float
    counts: dict[int, int] = field(default_factory=dict)
    silent_s: dict[int, float] = field(default_factory=dict)

    def update(self, beats: Mapping[int, Beat], passed_s: float) -> list[Beat]:
        """The ranks that have not beaten for `limit_s`, now that `passed_s` have passed since the last look."""
        for rank, beat in beats.items():
            quiet = self.counts.get(rank) == beat.count and beat.status not in ENDED
            self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s if quiet else 0.0
            self.counts[rank] = beat.count
        return [beats[rank] for rank in sorted(beats) if self.silent_s[rank] >= self.limit_s]
