"""Walk through what a rank of a pipeline does in a group, and count what it holds, as the runtime does.

A received tensor is there from the receive on. A forward keeps what the backward reads, a backward lets go of it as it
goes on. What is sent stays until the next message is sent. A batch stays until the rank's last stage has read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from fxpar.ir.exec_graph import Stored
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.memory.ledger import Effect, Ledger
from fxpar.memory.parts import StageTrace, trace_stage
from fxpar.memory.series import Peak, Series
from fxpar.memory.workspace import Conditions
from fxpar.schedule import Action, Receive, Schedule, Send, Step, Transfer, with_transfers

_PARTS = {"F": "forward", "B": "backward", "I": "input_part", "W": "weight_part"}
_RECEIVED = {"activation": "received", "gradient": "received_grad"}
_SENT = {"activation": "sent", "gradient": "sent_grad"}


@dataclass(frozen=True)
class RankPeak:
    """What a rank holds over a schedule, and by stage (index) the fullest moment of that stage alone and the bytes that
    a micro-batch leaves for its backward.
    """

    series: Series
    stages: Mapping[int, Peak]
    saved_bytes: Mapping[int, int]

    @property
    def whole(self) -> Peak:
        """The fullest moment of the rank."""
        return self.series.peak


def rank_peak(
    program: PipelineGraph,
    plan: Schedule,
    position: int,
    dims: Mapping[sympy.Symbol, int],
    places: Sequence[Mapping[str, int]],
    conditions: Conditions,
    brief: bool = False,
) -> RankPeak:
    """The peak of pipeline rank `position` over all micro-batches of `plan`, each with the dynamic dims at `dims`, on
    the fullest of the ranks at `places` on the axes of a stage; those where nothing differs from the first are it.
    `brief`: of each part that it runs there are only the fullest moments; what micro-batches do alike is played once.
    """
    stages = {s.index: s for s in program.stages if position in plan.ranks_of(s.index)}
    halves = any(action.part == "I" for action in plan.actions[position])
    names = ("forward", "input_part", "weight_part") if halves else ("forward", "backward")
    traces = {
        (index, again): trace_stage(stage, names, dims, places[0], conditions, again=again, others=places[1:])
        for index, stage in stages.items()
        for again in (False, True)
    }
    first = _Walk(program, plan, stages, traces, dims, brief).run(with_transfers(plan)[position])
    differ = [place for place in places[1:] if any(place in trace.differ for trace in traces.values())]
    more = (rank_peak(program, plan, position, dims, [place], conditions, brief) for place in differ)
    return max([first, *more], key=lambda peak: peak.whole.total_bytes)


@dataclass
class _Walk:
    program: PipelineGraph
    plan: Schedule
    stages: Mapping[int, StageProgram]
    traces: Mapping[tuple[int, bool], StageTrace]
    dims: Mapping[sympy.Symbol, int]
    brief: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    messages: dict[Transfer, list[Hashable]] = field(default_factory=dict)  # received
    going: dict[Transfer, list[Hashable]] = field(default_factory=dict)  # about to be sent
    sending: list[Hashable] = field(default_factory=list)
    kept: dict[tuple[int, int], set[Hashable]] = field(default_factory=dict)
    handed: dict[tuple[int, int], list[Hashable]] = field(default_factory=dict)  # gradients that I sends, until W
    batches: dict[int, list[Hashable]] = field(default_factory=dict)
    left: Counter[int] = field(default_factory=Counter)  # micro-batch -> forwards that have run
    adding: set[int] = field(default_factory=set)  # stages with accumulators
    saved: dict[int, int] = field(default_factory=dict)
    waiting: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of what is `kept`
    most_saved: Counter[int | None] = field(default_factory=Counter)
    effects: dict[Hashable, Effect] = field(default_factory=dict)
    lasts: dict[tuple[int, str], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = {stage: self.traces[stage, False].inputs for stage in self.stages}
        self.names = {stage: {storage: name for name, storage in found.items()} for stage, found in inputs.items()}

    def run(self, steps: Iterable[Step]) -> RankPeak:
        for step in steps:
            if isinstance(step, Receive):
                self._receive(step.transfer)
            elif isinstance(step, Send):
                self._send(step.transfer)
            elif isinstance(step, Action):
                if step.part == "F":
                    self._forward(step)
                else:
                    self._backward(step)
                self._count_saved(step)
        fullest = self.ledger.fullest
        host = self.ledger.host
        peaks = {stage: fullest[stage].peak(self.most_saved[stage], host[stage]) for stage in self.stages}
        return RankPeak(Series(tuple(self.ledger.moments), self.most_saved[None]), peaks, self.saved)

    # ------------------------------------------------------------------------------------------------- messages
    def _receive(self, transfer: Transfer) -> None:
        stage = transfer.target
        self._load(transfer.micro_batch, stage)
        keys = []
        for fqn, stored in self.stages[stage].taken(_RECEIVED[transfer.what]).items():
            keys.append(self._input(stage, transfer.micro_batch, (_RECEIVED[transfer.what], fqn)))
            self.ledger.take(keys[-1], stage, "message", self._local_bytes(stored))
        self.messages[transfer] = keys
        self.ledger.look(stage, None, str(transfer))

    def _send(self, transfer: Transfer) -> None:
        keys = self.going.pop(transfer, [])
        self.ledger.drop_all(self.sending)
        self.sending = keys

    def _load(self, micro_batch: int, stage: int) -> None:
        """The replica's batch."""
        if micro_batch in self.batches:
            return
        keys: list[Hashable] = []
        for info in self.program.inputs:
            if info.kind == "batch":
                keys.append(("batch", micro_batch, info.fqn))
                self.ledger.take(keys[-1], stage, "message", info.meta.numel(self.dims) * info.meta.dtype.itemsize)
        self.batches[micro_batch] = keys

    # -------------------------------------------------------------------------------------------------- actions
    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        self._load(number, stage)
        trace = self.traces[stage, False]
        pieces = [self._input(stage, number, ("batch", fqn)) for fqn in self.stages[stage].taken("batch")]
        for key, stored in zip(pieces, self.stages[stage].taken("batch").values(), strict=True):
            self.ledger.take(key, stage, "message", self._local_bytes(stored))
        results = self._part(action, trace, "forward", set())
        kept = self._keys(stage, number, self._lasts(trace, "forward"))
        for key in kept:
            self.ledger.hold(key)
            self.ledger.turn(key, "saved")
        self.kept[stage, number] = kept
        self.saved[stage] = self.ledger.nbytes(kept)
        self._pass_on(action, "activation", trace)
        self.ledger.drop_all([*results.values(), *pieces])
        self.ledger.drop_all(self.messages.pop(Transfer("activation", stage - 1, number), []))
        self.left[number] += 1
        if self.left[number] == len(self.stages):
            self.ledger.drop_all(self.batches[number])

    def _backward(self, action: Action) -> None:
        stage, number, name = action.stage, action.micro_batch, _PARTS[action.part]
        adds = action.part != "I"
        again = adds and stage in self.adding
        trace = self.traces[stage, again]
        later = self._keys(stage, number, self._lasts(trace, name)) if not adds else set()
        kept = self.kept.pop((stage, number))
        # A loss in chunks may have made the gradient that is sent, in the forward.
        storages = self._sent_storages(action, "gradient", trace) if action.part != "W" else []
        sent = self._keys(stage, number, storages) & (kept - later)
        results = self._part(action, trace, name, kept - later - sent)
        self.kept[stage, number] = kept & later
        if action.part == "I":
            for key in later - kept:
                self.ledger.hold(key)
                self.kept[stage, number].add(key)
            self.handed[stage, number] = self._pass_on(action, "gradient", trace)
            for key in self.handed[stage, number]:
                self.ledger.hold(key)
            self.ledger.drop_all(sent)
        else:
            del self.kept[stage, number]
            if action.part == "B":
                self._pass_on(action, "gradient", trace)
                self.ledger.drop_all(sent)
            if stage not in self.adding:
                self._own(stage)
            self.ledger.drop_all(self.handed.pop((stage, number), ()))
        self.ledger.drop_all(results.values())
        if action.part != "W":
            self.ledger.drop_all(self.messages.pop(Transfer("gradient", stage + 1, number), []))

    def _part(self, action: Action, trace: StageTrace, name: str, owned: set[Hashable]) -> dict[int, Hashable]:
        """Run a part, which frees what it owns after its last use; its own results by storage, each held once."""
        stage, number, part = action.stage, action.micro_batch, trace.parts[name]
        results = {s: self._key(stage, number, s) for s in part.results if s in part.makes and s is not None}
        alike = self._looks(action, trace, name, owned) if self.brief else None
        if alike in self.effects:
            self.ledger.again(stage, self.effects[alike], str(action), owned, results)
            return results
        begun, before, there = len(self.ledger.moments), tuple(self.ledger.whole), len(self.ledger.held)
        gone = sum(self.ledger.holders[key] == 1 for key in owned)
        self._play(action, trace, name, set(owned), results)
        if alike is not None and len(self.ledger.held) == there - gone + len(results):
            self.effects[alike] = self.ledger.effect(begun, before, results)
        return results

    def _looks(self, action: Action, trace: StageTrace, name: str, owned: set[Hashable]) -> Hashable | None:
        """What a part does to the ledger follows from; None if it has something that is counted to another stage."""
        held = [(key, self.ledger.held[key]) for key in owned]
        if any(stage != action.stage for _, (stage, _, _) in held):
            return None
        # Of a key what is left without the micro-batch.
        mine = frozenset((key[2], self.ledger.holders[key] == 1, kind, n) for key, (_, kind, n) in held)  # type: ignore[index]
        return action.stage, id(trace), name, action.part, mine

    def _play(
        self, action: Action, trace: StageTrace, name: str, owned: set[Hashable], results: Mapping[int, Hashable]
    ) -> None:
        stage, number, part = action.stage, action.micro_batch, trace.parts[name]
        for step in part.steps:
            for storage, kind in step.births:
                self.ledger.take(self._key(stage, number, storage), stage, kind, trace.nbytes[storage])
            if step.births or step.workspace_bytes:
                self.ledger.look(stage, step.node, str(action), step.workspace_bytes)
            for storage in step.deaths:
                key = self._key(stage, number, storage)
                if key in owned:
                    owned.remove(key)
                    self.ledger.drop(key)
                elif storage in part.makes and storage not in results:
                    self.ledger.drop(key)
        self.ledger.drop_all(owned)

    def _lasts(self, trace: StageTrace, after: str) -> frozenset[int]:
        """`trace.kept`, once."""
        key = id(trace), after
        if key not in self.lasts:
            self.lasts[key] = trace.kept(after)
        return self.lasts[key]

    def _pass_on(self, action: Action, what: str, trace: StageTrace) -> list[Hashable]:
        """Hold what the stage sends until the message is on its way; the keys."""
        stage, number = action.stage, action.micro_batch
        transfer = Transfer(what, stage, number)  # type: ignore[arg-type]
        if not 0 <= transfer.target < self.plan.stages:
            return []
        part = trace.parts[_PARTS[action.part]]
        keys: list[Hashable] = []
        for storage in self._sent_storages(action, what, trace):
            keys.append(self._key(stage, number, storage))
            self.ledger.hold(keys[-1])
            if storage in part.makes and keys[-1] not in self.kept.get((stage, number), ()):
                self.ledger.turn(keys[-1], "message")
        if self.plan.ranks == 1 and not self.plan.places:  # the next stage reads it where it is
            self.messages[transfer] = keys
        else:
            self.going[transfer] = keys
        return keys

    def _sent_storages(self, action: Action, what: str, trace: StageTrace) -> list[int]:
        """Storages of what a part sends, but those that last."""
        results = trace.parts[_PARTS[action.part]].results[: len(self.stages[action.stage].given(_SENT[what]))]
        return [storage for storage in results if storage is not None and storage not in trace.lasting]

    def _own(self, stage: int) -> None:
        """Gradients of the first micro-batch become what later ones add to."""
        self.adding.add(stage)
        for i, node in enumerate(self.stages[stage].weight_part.results):
            local = local_tensor(node)
            self.ledger.take(("sum", stage, i), stage, "result", local.numel(self.dims) * local.dtype.itemsize)

    # ----------------------------------------------------------------------------------------------------- keys
    def _count_saved(self, action: Action) -> None:
        """Behind an action, which has changed what is kept of its micro-batch in its stage."""
        mine = action.stage, action.micro_batch
        self.waiting.pop(mine, None)
        if mine in self.kept:
            self.waiting[mine] = self.ledger.nbytes(self.kept[mine])
        sums = {stage: sum(n for (s, _), n in self.waiting.items() if s == stage) for stage in self.stages}
        for stage, nbytes in (*sums.items(), (None, sum(sums.values()))):
            self.most_saved[stage] = max(self.most_saved[stage], nbytes)

    def _input(self, stage: int, number: int, name: tuple[str, str]) -> Hashable:
        """A batch piece that is not cut is the batch's own."""
        kind, fqn = name
        if kind == "batch":
            dist = self.stages[stage].taken("batch")[fqn].dist
            return (stage, number, name) if any(dist.dims) else ("batch", number, fqn)
        return (stage, number, name)

    def _key(self, stage: int, number: int, storage: int) -> Hashable:
        name = self.names[stage].get(storage)
        return (stage, number, storage) if name is None else self._input(stage, number, name)

    def _keys(self, stage: int, number: int, storages: Iterable[int]) -> set[Hashable]:
        return {self._key(stage, number, storage) for storage in storages}

    def _local_bytes(self, stored: Stored) -> int:
        return stored.local.numel(self.dims) * stored.local.dtype.itemsize
