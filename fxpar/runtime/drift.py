"""Drift: where steps take longer or shorter than predicted for some time, the mini-batches are planned otherwise.

Nothing is lowered or allocated anew: the prepared strategies get other limits, for the lengths that were seen lately,
and their costs are multiplied by what was measured over what was predicted. Rank 0 decides for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fxpar.batching import LengthGroup
from fxpar.runtime.engine import Engine, Replanned
from fxpar.runtime.report import StepReport
from fxpar.search.lengths import length_edges

STEPS = 5  # in a row that are off: one slow step is none
WORTH = 0.005  # of the predicted time: limits that save less stay
LEAST_SHARE = 0.02  # of the predicted time: borders that are less say nothing of links
MOST = 10.0  # times that borders are taken for dearer, or cheaper, than predicted
PASSES = 2  # over the groups, in the search for limits


@dataclass(frozen=True)
class _Seen:
    """Of the last steps, on one rank: by group measured and predicted seconds of runs, the same of borders, and
    of everything.
    """

    runs: tuple[tuple[float, float], ...]
    borders: tuple[float, float]
    whole: tuple[float, float]


@dataclass
class Drift:
    """Watches steps of an engine that take more than `share` longer or shorter than predicted. `fits(groups)` says
    whether activations of groups with these limits need no more memory than those of the groups that there are.
    """

    engine: Engine
    share: float
    fits: Callable[[Sequence[LengthGroup]], bool]
    _last: deque[StepReport] = field(default_factory=lambda: deque(maxlen=STEPS))
    _off: int = 0  # steps in a row
    _is_first: bool = True

    def after(self, report: StepReport) -> str:
        """To be called by all ranks after each step. Replans if it is time to; then what was done in one line, the same
        on all ranks, else nothing.
        """
        if self._is_first:  # sets up connections and memory
            self._is_first = False
            return ""
        self._last.append(report)
        is_off = abs(report.wall_s - report.plan_s - report.predicted_s) > self.share * report.predicted_s
        self._off = self._off + 1 if is_off else 0
        if not self._rank_0_says(self._off == STEPS):
            return ""
        found, line = self._decided()
        self._last.clear()
        self._off = 0
        self.engine.replan(found)
        return line

    def _rank_0_says(self, due: bool) -> bool:
        flag = torch.tensor([due], device=self.engine.device)
        if self.engine.switching.world > 1:
            dist.broadcast(flag, src=0, group=self.engine.world_group)
        return bool(flag.item())

    def _decided(self) -> tuple[Replanned, str]:
        """What rank 0 makes of what all ranks have seen."""
        world, group = self.engine.switching.world, self.engine.world_group
        if world == 1:
            return self._decide([self._seen()])
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, self._seen(), group=group)
        found: list[Any] = [self._decide(everyone) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0, group=group)
        return found[0]

    def _seen(self) -> _Seen:
        engine = self.engine
        names = zip((group.limit for group in engine.groups), engine.names, strict=True)
        places = {one: number for number, one in enumerate(names)}
        runs = [[0.0, 0.0] for _ in engine.groups]
        borders, whole = [0.0, 0.0], [0.0, 0.0]
        for report in self._last:
            for group in report.groups:
                mine = runs[places[group.limit, group.strategy]]
                mine[0] += group.compute_s
                mine[1] += group.predicted_s
                borders[0] += group.switch_s + group.reduce_s
                borders[1] -= group.predicted_s
            borders[1] += report.predicted_s
            whole[0] += report.wall_s - report.plan_s
            whole[1] += report.predicted_s
        return _Seen(tuple((a, b) for a, b in runs), (borders[0], borders[1]), (whole[0], whole[1]))

    def _decide(self, everyone: Sequence[_Seen]) -> tuple[Replanned, str]:
        engine, mine = self.engine, everyone[0]
        now = engine.replanned or Replanned.of(engine.groups)
        ratio = mine.whole[0] / mine.whole[1]
        factors = []
        for number, factor in enumerate(now.factors):
            pairs = [seen.runs[number] for seen in everyone if min(seen.runs[number]) > 0]
            # The slowest rank says how long a group runs; of one that did not run nothing else is known.
            factors.append(factor * max((measured / predicted for measured, predicted in pairs), default=ratio))
        borders = now.borders
        if mine.borders[1] > LEAST_SHARE * mine.whole[1]:
            # Waiting for slower ranks is no matter of links: the rank that waits least says what these take.
            waited = min(seen.borders[0] for seen in everyone if seen.whole[1] > 0)
            borders *= min(MOST, max(1 / MOST, waited / mine.borders[1]))
        fitted = replace(now, factors=tuple(factors), borders=borders)
        found = replace(fitted, limits=self._limits(fitted))
        return found, self._line(now, found, ratio)

    def _limits(self, fitted: Replanned) -> tuple[int, ...]:
        """The best limits that are found group by group, the last one as it is: longer sequences were never taken."""
        engine, best = self.engine, fitted.limits
        edges = length_edges(best[-1])
        took = engine.predicted_with(fitted)
        for _ in range(PASSES):
            before = best
            for number in range(len(best) - 1):
                lower, upper = best[number - 1] if number else 0, best[number + 1]
                for edge in edges:
                    limits = (*best[:number], edge, *best[number + 1 :])
                    if not lower < edge < upper or not self.may(limits):
                        continue
                    time = engine.predicted_with(replace(fitted, limits=limits))
                    if time < took * (1 - WORTH):
                        best, took = limits, time
            if best == before:
                break
        return best

    def may(self, limits: Sequence[int]) -> bool:
        """Whether each group holds its longest sequence, and there is memory for it."""
        groups = self.engine.with_limits(limits)
        if any(group.bin_budget < group.limit for group in groups):
            return False
        return all(new <= old.limit for new, old in zip(limits, self.engine.opened, strict=True)) or self.fits(groups)

    def _line(self, now: Replanned, found: Replanned, ratio: float) -> str:
        names = [str(group.strategy) for group in self.engine.groups]
        each = ", ".join(
            f"{name} x{f / old:.3g}" for name, f, old in zip(names, found.factors, now.factors, strict=True)
        )
        sets = ", ".join(f"<={limit} {name}" for limit, name in zip(found.limits, names, strict=True))
        kept = "limits stay" if found.limits == now.limits else "new limits"
        return (
            f"planned anew: {STEPS} steps, each more than {self.share:g} off, took {ratio:.3g} times the predicted "
            f"time; costs are taken {each}; {kept}: {sets}"
        )
