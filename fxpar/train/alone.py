"""Whether one of a run's strategies alone would have been predicted to be faster than all of them together."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpar.batching.groups import LengthGroup
from fxpar.batching.planner import plan_batch
from fxpar.runtime.engine import Engine

MINI_BATCHES = 16  # the last ones of a run are looked at: planning takes milliseconds each
_WORTH_SAYING = 1.02  # predictions that are closer say nothing


@dataclass(frozen=True)
class Faster:
    """`strategy` alone is predicted to be `times` as fast as the run, over its last `mini_batches`."""

    strategy: str
    times: float
    mini_batches: int

    def line(self) -> str:
        """As the end of a run says it."""
        return (
            f"predicted: {self.strategy} alone is {self.times:.2f} times as fast (the last {self.mini_batches} "
            f"mini-batches, with switches and reductions); measure it with --compare {shlex.quote(self.strategy)}"
        )


def faster_alone(engine: Engine, batches: Sequence[Sequence[int]]) -> Faster | None:
    """The fastest such strategy; `batches` are the lengths in tokens of the sequences of some mini-batches.

    Only strategies whose micro-batches hold the longest sequence anyway: their memory is then what it is.
    """
    names = dict.fromkeys(engine.names)
    if len(names) < 2 or not batches:
        return None
    longest, options = max(map(max, batches)), engine.options
    together = sum(
        plan_batch(
            lengths, engine.groups, engine.costs, engine.border_seconds, packed=options.packed, merge=options.merge
        ).predicted_s
        for lengths in batches
    )
    found: dict[str, float] = {}
    for name in names:
        mine = [g for g, other in enumerate(engine.names) if other == name]
        g = max(mine, key=lambda g: engine.groups[g].token_budget)
        group = replace(engine.groups[g], limit=longest)
        if group.bin_budget >= longest and all(group.takes(n) for lengths in batches for n in lengths):
            found[name] = sum(_alone_s(engine, g, group, n) for n in batches)
    best = min(found, key=found.__getitem__, default="")
    if not best or together < _WORTH_SAYING * found[best]:
        return None
    return Faster(best, together / found[best], len(batches))


def _alone_s(engine: Engine, g: int, group: LengthGroup, lengths: Sequence[int]) -> float:
    """Predicted seconds of a mini-batch that runs in `group` alone, which is group `g` with another limit."""
    plan = plan_batch(
        lengths,
        [group],
        [engine.costs[g]],
        lambda _, runs: engine.border_seconds([g], runs),
        packed=engine.options.packed,
    )
    return plan.predicted_s
