"""One mini-batch on this rank: what its actions do, and what they leave for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxpar.batching import GroupPlan, LengthGroup
from fxpar.batching.borders import schedule_of
from fxpar.runtime.arrivals import Arrivals, Handed
from fxpar.runtime.binding import Bound
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.micro import MicroRun
from fxpar.runtime.report import GroupReport
from fxpar.runtime.runner import unheard
from fxpar.runtime.spans import NO_SPANS, Recorder, Spans
from fxpar.runtime.streams import carry_out
from fxpar.runtime.switching import Switching
from fxpar.schedule.mini_batch import GroupAction, in_waves

Phase = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class GroupWork:
    """A length group that runs under strategy `name`: its plan, the `lengths` of its sequences (in `unit`), and what
    makes its micro-batches.
    """

    spec: LengthGroup
    name: str
    plan: GroupPlan
    lengths: tuple[int, ...]
    micro_batches: Callable[[], list[MicroRun]]
    unit: str = "tokens"


@dataclass
class MiniBatch:
    """Groups in the order of running. `buffers` (by FQN) are replaced by their new values."""

    groups: Sequence[GroupWork]
    bound: Mapping[str, Bound]
    switching: Switching
    gradients: Gradients
    buffers: dict[str, Tensor]
    phase: Phase
    recorder: Recorder | None = None
    border_factor: float = 1.0  # on what switches and reductions are predicted to take
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)  # of each group, sums by the names of results
    experts: list[Mapping[str, Tensor]] = field(default_factory=list)  # of each group, rows by module (`ExpertRows`)
    _grads: dict[int, Handed] = field(default_factory=dict)
    _reduced: set[int] = field(default_factory=set)  # groups behind which gradients leave
    _begun: dict[str, Tensor] = field(default_factory=dict)  # gradients that the next group adds to
    _moved: dict[GroupAction, int] = field(default_factory=dict)
    _arrivals: dict[int, Arrivals] = field(default_factory=dict)

    def run(self, overlap: bool, waves: Sequence[int] = ()) -> list[GroupReport]:
        """All groups; `overlap`: switches and reductions run beside the groups, in a thread of their own. With `waves`,
        numbers of groups, those of a wave run at the same time, on ranks of their own.
        """
        names = [one.name for one in self.groups]
        resident, gradients = self.switching.resident, self.gradients
        plan = in_waves(waves) if waves else schedule_of(names, resident, overlap, gradients)
        self._reduced = {action.group for action in plan.actions if action.kind == "reduce"}
        self._arrivals = {action.group: Arrivals() for action in plan.fed_by if action.kind == "run"}
        self._grads = {number: Handed() for number in range(len(self.groups))}
        spent = carry_out(plan, self._do, self._shown)
        return [self._report(number, spent) for number in range(len(self.groups))]

    def _do(self, action: GroupAction) -> None:
        number, name = action.group, self.groups[action.group].name
        if action.kind == "switch":
            self._switch(action, name)
        elif action.kind == "run":
            with self._grads[number].arrivals.coming():
                self._compute(number)
        else:
            # Where a run fails before it has made a gradient, its rank has taken no part in the reduction: not in what
            # only other stages give either. All ranks are alike then.
            self._grads[number].arrivals.wait_for_any()
            self._moved[action] = self.gradients.add(name, self._grads[number])
            # The next switch may write where the run has its weights.
            self._grads[number].arrivals.wait_for_all()
            del self._grads[number]

    def _switch(self, action: GroupAction, name: str) -> None:
        visited, arrivals = self._visited(action.group), self._arrivals.get(action.group)
        if arrivals is None:
            self._moved[action] = self.switching.to(name, visited)
            return
        with arrivals.coming():
            self._moved[action] = self.switching.to(name, visited, arrivals.came)

    def _visited(self, number: int) -> list[str]:
        return [one.name for one in self.groups[:number]]

    def _compute(self, number: int) -> None:
        one, spans, leave = self.groups[number], self._spans, number in self._reduced
        made = self._grads[number].came if leave else unheard
        bound, arrivals = self.bound[one.name], self._arrivals.get(number)
        begun, self._begun = self._begun, {}
        with spans.span("prologue"):
            bound.prepare(self.switching.store.compute(one.name), self.buffers, arrivals, begun)
        bound.run_all(one.micro_batches(), spans, made)
        if arrivals is not None:
            arrivals.wait_for_all()  # a replica without micro-batches learns here that the switch has failed
        with spans.span("epilogue"):
            result: Mapping[str, Any] = bound.finish()
            self.losses.append(float(result["loss"]))
            self.metrics.append({name: float(value) for name, value in result["metrics"].items()})
        self.experts.append(result["experts"])
        self.buffers.update(result["buffers"])
        made(result["grads"])
        if not leave:
            self._begun = dict(result["grads"])

    @property
    def _spans(self) -> Spans:
        return NO_SPANS if self.recorder is None else self.recorder

    @contextmanager
    def _shown(self, action: GroupAction) -> Iterator[None]:
        """While this thread does an action or waits for it."""
        name = self.groups[action.group].name
        if self.recorder is not None:
            self.recorder.enter(action.group)
        if action.kind == "run":
            with self.phase(f"run {name}"):
                yield
        else:
            text = f"switch to {name}" if action.kind == "switch" else f"reduce gradients of {name}"
            with self.phase(text), self._spans.span(action.kind):
                yield

    def _report(self, number: int, spent: Mapping[GroupAction, float]) -> GroupReport:
        one = self.groups[number]
        switch, run, reduce = (spent[GroupAction(kind, number)] for kind in ("switch", "run", "reduce"))
        waited = self._arrivals[number].waited_s if number in self._arrivals else 0.0
        moved = {kind: self._moved.get(GroupAction(kind, number), 0) for kind in ("switch", "reduce")}
        reduce_s = self.gradients.predicted_s(one.name) if number in self._reduced else 0.0
        return GroupReport(
            limit=one.spec.limit,
            strategy=one.name,
            sequences=len(one.lengths),
            tokens=sum(one.lengths),
            longest=max(one.lengths),
            micro_batches=one.plan.slots,
            wall_s=switch + run + reduce,
            switch_s=switch + waited,
            switch_bytes=moved["switch"],
            reduce_s=reduce,
            reduce_bytes=moved["reduce"],
            predicted_s=one.plan.predicted_s,
            predicted_switch_s=self.border_factor * self.switching.predicted_s(one.name, self._visited(number)),
            predicted_reduce_s=self.border_factor * reduce_s,
            lengths=length_counts(one.lengths),
            unit=one.unit,
        )


def length_counts(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(2**k, number of lengths in (2**(k-1), 2**k]), ascending."""
    return tuple(sorted(Counter(1 << (length - 1).bit_length() for length in lengths).items()))
