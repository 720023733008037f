"""The engine: one mini-batch of sequences of any lengths, each length group under its own strategy.

    plan      group by length, balance over replicas, pack micro-batches (fxpar.batching); order the groups
    switch    weights go from home, and from layouts that earlier groups left, to the group's layout
    run       the group's micro-batches: gradients add up in fp32, as the graph lays them out
    reduce    all terms of a gradient go to their home shard and are added there, once per group

The next group's switch and the last group's reduction may run beside a group (fxpar.schedule.mini_batch).

Every valid token has weight 1 / (valid tokens of the mini-batch), so no plan changes the gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fxpar.batching import BatchPlan, GroupPlan, LengthGroup, MicroBatch, RunTime, plan_batch
from fxpar.batching.borders import Borders, by_strategy
from fxpar.batching.collate import check_denominator
from fxpar.batching.lengths import LengthLimits
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import Cost
from fxpar.errors import (
    LengthMultipleError,
    ModelLengthError,
    NoGradError,
    ReplanError,
    SequenceTooLongError,
    naming_task,
)
from fxpar.runtime.ahead import PlansAhead
from fxpar.runtime.binding import Bound
from fxpar.runtime.expert_rows import expert_layers
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.loss_scaler import LossScaler
from fxpar.runtime.micro import MicroRun
from fxpar.runtime.mini_batch import GroupWork
from fxpar.runtime.reading import Reading, Sequence_, TokenRows
from fxpar.runtime.spans import GroupRun, Recorder
from fxpar.runtime.switching import Switching
from fxpar.schedule.mini_batch import Pace

LATELY = 4  # mini-batches whose lengths are kept


class Watcher(Protocol):
    """Who is told what this rank does, and turns a failed collective into an error that names the missing rank."""

    def phase(self, text: str) -> AbstractContextManager[object]: ...

    def explained(self, phase: str = "") -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class EngineOptions:
    """How mini-batches are run. `order` fixes the order of the strategies; `merge` lets small groups join the next, and
    short sequences ride in longer groups;
    `split` runs the documents of a sequence as sequences of their own; `overlap` moves weights and gradients beside the
    groups. `autocast` is what was on when the step was captured. `joined`: tasks that share some ranks wait for these
    alone, as there are weights of all tasks in memory, and room for the gradients of several.
    """

    packed: bool = True
    split: bool = False
    lengths: LengthLimits = field(default_factory=LengthLimits)
    merge: bool = True
    order: tuple[str, ...] | None = None
    nan: Literal["error", "skip"] = "error"
    seed: int = 0
    check_batches: bool = True
    deterministic: bool = False
    overlap: bool = False
    autocast: torch.dtype | None = None
    joined: bool = False


@dataclass(frozen=True)
class Replanned:
    """What mini-batches are planned with instead of what the engine was opened with: limits by group, factors on the
    predicted seconds of the runs of each, and on those of switches and reductions. Plain data.
    """

    limits: tuple[int, ...]
    factors: tuple[float, ...]
    borders: float = 1.0

    @classmethod
    def of(cls, groups: Sequence[LengthGroup]) -> Replanned:
        """What changes nothing."""
        return cls(tuple(group.limit for group in groups), (1.0,) * len(groups))


@dataclass
class Engine:
    """Runs mini-batches on this rank (`fxpar.runtime.step`), or its `task`'s share of them. `names[g]` is the program
    of group g; all ranks run alike.
    """

    groups: Sequence[LengthGroup]
    names: Sequence[str]
    bound: Mapping[str, Bound]
    costs: Sequence[Cost]
    switching: Switching
    gradients: Gradients
    cluster: ClusterSpec
    device: torch.device
    options: EngineOptions = field(default_factory=EngineOptions)
    watcher: Watcher | None = None
    world_group: Any = None
    scaler: LossScaler | None = None
    recorder: Recorder | None = None
    reading: Reading = field(default_factory=TokenRows)
    task: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        self.replanned: Replanned | None = None
        self.opened, self._opened_costs = tuple(self.groups), tuple(self.costs)
        self.lately: deque[tuple[int, ...]] = deque(maxlen=LATELY)  # lengths of mini-batches
        self._ahead = PlansAhead()
        self._borders = Borders(self.switching, self.gradients, self.options.overlap, self.flowing())

    def flowing(self) -> dict[str, Pace]:
        """How the programs run to which weights come, and whose gradients leave, one by one."""
        home = self.gradients.mode == "home"
        paces = {name: bound.pace for name, bound in self.bound.items()}
        return {name: pace for name, pace in paces.items() if home and pace is not None}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that run its programs."""
        return self.gradients.programs[self.names[0]].mesh.ranks  # of all teams, where a bound program is one of them

    @property
    def border_factor(self) -> float:
        """On what switches and reductions are predicted to take."""
        return self._borders.factor

    @cached_property
    def trained(self) -> set[str]:
        """Parameters that get a gradient."""
        return {out.fqn for bound in self.bound.values() for out in bound.program.outputs if out.kind == "grad"}

    @cached_property
    def expert_layers(self) -> dict[str, int]:
        """How many experts there are by module, the same on all ranks."""
        return expert_layers(self.gradients.programs.values())

    def plan(self, sequences: Sequence[Sequence_]) -> BatchPlan:
        """What `step` would run, in that order. Raises the errors of `fxpar.batching`."""
        with naming_task(self.task):
            return self._plan(self._apart(sequences, self.options.split), self.options.packed)

    def _apart(self, sequences: Sequence[Sequence_], split: bool) -> Sequence[Sequence_]:
        """What runs: the sequences, or (`split`) their documents where the graph would not keep those apart."""
        self.reading.check(sequences)
        return self.reading.apart(sequences) if split else sequences

    def _plan(self, sequences: Sequence[Sequence_], packed: bool) -> BatchPlan:
        options = self.options
        lengths = self.reading.lengths(sequences)
        for index, length in enumerate(lengths):
            if not options.lengths.hold(length):
                raise ModelLengthError(index, length, str(options.lengths))
        try:
            plan = plan_batch(lengths, self.groups, self.costs, self.border_seconds, packed=packed, merge=options.merge)
        except (LengthMultipleError, SequenceTooLongError) as error:
            raise self.reading.retold(error) from None
        for group in plan.groups:
            self.reading.check_divides(self.gradients.programs[self.names[group.group]], sequences, group.sequences)
        return replace(plan, groups=tuple(self._in_order(plan.groups)))

    # --------------------------------------------------------------------------------------------- planned otherwise
    def replan(self, found: Replanned) -> None:
        """Plan the mini-batches from now on with these limits and factors. All ranks call it alike.

        Raises ReplanError if it is not for these groups.
        """
        if len(found.limits) != len(self.opened) or found.limits[-1] != self.opened[-1].limit:
            raise ReplanError(found.limits, [group.limit for group in self.opened])
        self.replanned = found
        self.groups, self.costs, self._borders = self._as_planned(found)
        self._ahead.clear()  # those were made of other groups

    def _as_planned(self, found: Replanned) -> tuple[Sequence[LengthGroup], Sequence[Cost], Borders]:
        costs = [cost.times(factor) for cost, factor in zip(self._opened_costs, found.factors, strict=True)]
        return self.with_limits(found.limits), costs, replace(self._borders, factor=found.borders, _known={})

    def with_limits(self, limits: Sequence[int]) -> list[LengthGroup]:
        """The groups with other limits."""
        return [replace(group, limit=limit) for group, limit in zip(self.opened, limits, strict=True)]

    def predicted_with(self, found: Replanned) -> float:
        """Seconds of the mini-batches that were run lately, as they would be planned with other limits and factors."""
        groups, costs, borders = self._as_planned(found)
        options, border_s = self.options, partial(self._border_s, borders)
        plans = (
            plan_batch(lengths, groups, costs, border_s, packed=options.packed, merge=options.merge)
            for lengths in self.lately
        )
        return sum(plan.predicted_s for plan in plans)

    def border_seconds(self, groups: Sequence[int], runs: Sequence[RunTime]) -> float:
        """Predicted seconds that switches and reductions add to a mini-batch whose groups take so long."""
        return self._border_s(self._borders, groups, runs)

    def _border_s(self, borders: Borders, groups: Sequence[int], runs: Sequence[RunTime]) -> float:
        together = by_strategy([self.names[g] for g in groups], runs)
        return borders.exposed_s(self._order_of_strategies(borders, together), together)

    def _in_order(self, groups: Sequence[GroupPlan]) -> list[GroupPlan]:
        """The groups in the order of running, those of one strategy together."""
        runs = [RunTime(group.predicted_s, group.slots) for group in groups]
        together = by_strategy([self.names[group.group] for group in groups], runs)
        order = self._order_of_strategies(self._borders, together)
        return sorted(groups, key=lambda g: (order.index(self.names[g.group]), g.group))

    def _order_of_strategies(self, borders: Borders, runs: Mapping[str, RunTime]) -> tuple[str, ...]:
        if self.options.order is not None:
            return tuple(name for name in self.options.order if name in runs)
        return borders.fastest(self.switching.schedule.order(runs), runs)

    def watched(self, phase: str) -> AbstractContextManager[object]:
        """In the block, what fails because a rank is gone raises PeerLostError, which names it and this phase."""
        return nullcontext() if self.watcher is None else self.watcher.explained(phase)

    def planned(self, given: Given) -> Share:
        """What it runs of a mini-batch, as this rank finds it. Raises NoGradError, DenominatorError, and the errors of
        `fxpar.batching`."""
        alone = given.forward_keys is not None
        if not (alone or torch.is_grad_enabled()):
            raise NoGradError
        with naming_task(self.task):
            check_denominator(given.denominator)
            parts = self._apart(given.sequences, self.options.split or alone)
            self.reading.check_present(parts, given.forward_keys or ())
            ahead = None if alone else self._ahead.take(self.reading.lengths(parts))
            plan = ahead or self._plan(parts, self.options.packed and not alone)
            return Share(self, plan, parts, self.reading.valid(parts), given.denominator, given.weight)

    def begin_plan(self, sequences: Sequence[Sequence_]) -> None:
        """Make the plan of these in a thread, for the `step` that is given them."""

        def make() -> tuple[tuple[int, ...], BatchPlan]:
            parts = self._apart(sequences, self.options.split)
            return self.reading.lengths(parts), self._plan(parts, self.options.packed)

        self._ahead.begin(make)

    def works(self, groups: Sequence[GroupPlan], sequences: Sequence[Sequence_], scale: float) -> list[GroupWork]:
        """Groups as they run, in that order; `scale` is that of every summed loss."""
        found = []
        for group in groups:
            name, lengths = self.names[group.group], self.reading.lengths([sequences[i] for i in group.sequences])
            made = partial(self._micro_batches, self.bound[name], group, sequences, scale)
            found.append(GroupWork(self.groups[group.group], name, group, lengths, made, self.reading.unit))
        return found

    def runs(self, groups: Sequence[GroupPlan], sequences: Sequence[Sequence_]) -> list[GroupRun]:
        """Groups as a trace tells of them."""
        lengths, found = self.reading.lengths(sequences), []
        for group in groups:
            micro_batches = tuple(
                tuple(tuple(lengths[i] for i in micro.sequences) for micro in replica) for replica in group.replicas
            )
            found.append(GroupRun(self.groups[group.group].limit, self.names[group.group], micro_batches))
        return found

    def _micro_batches(
        self, bound: Bound, group: GroupPlan, sequences: Sequence[Sequence_], scale: float
    ) -> list[MicroRun]:
        """What this rank's replica runs, with idle ones where it must run as many as the others."""
        program = bound.program
        if bound.rank not in program.mesh:
            return []
        beside = [group.replicas[i] for i in bound.replicas]

        def load(micro: MicroBatch, text: str) -> Mapping[str, Tensor]:
            with self.phase(f"run {program.strategy}, {text}"):
                return self.reading.row(program, sequences, micro)

        mine, seed = group.replicas[bound.replica], self._seed()
        runs = [
            MicroRun(partial(load, micro, f"micro-batch {turn + 1} of {len(mine)}"), scale, seed)
            for turn, micro in enumerate(mine)
        ]
        if program.strategy.most_zero >= 2:
            # Any small batch will do: it counts nothing.
            micro = self.reading.shortest(sequences, group)
            idle = MicroRun(partial(load, micro, "no micro-batch left"), scale, idle=True)
            runs += [idle] * (max(map(len, beside)) - len(mine))
        return runs

    def _seed(self) -> int:
        """The dropout seed of this mini-batch, the same when a run is repeated or resumed. Groups, replicas and
        micro-batches share it: masks differ by the numbers of the tokens.
        """
        return (self.options.seed * 6364136223846793005 + self.steps + 1442695040888963407) % 2**63

    def phase(self, text: str) -> AbstractContextManager[object]:
        return nullcontext() if self.watcher is None else self.watcher.phase(f"step {self.steps + 1}, {text}")


@dataclass(frozen=True)
class Given:
    """What an engine is given. The summed loss counts `weight` / `denominator`, by default over what is valid.
    `forward_keys`: for a forward outside of the captured step, which reads these keys of a batch and would not keep
    documents apart.
    """

    engine: Engine
    sequences: Sequence[Sequence_]
    denominator: float | None = None
    weight: float = 1.0
    forward_keys: Collection[str] | None = None


@dataclass(frozen=True)
class Share:
    """What an engine runs of a mini-batch: `sequences`, as `plan` says."""

    engine: Engine
    plan: BatchPlan
    sequences: Sequence[Sequence_]
    valid: int
    denominator: float | None
    weight: float

    @property
    def scale(self) -> float:
        """The factor on summed losses."""
        return self.weight / (self.denominator or self.valid)
