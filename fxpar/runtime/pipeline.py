"""`BoundPipeline`: the stages of one rank, run by a schedule."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.cost.flowing import flowing_pace
from fxpar.ir.exec_graph import Stored
from fxpar.ir.handover import Handover, Span
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, position_of
from fxpar.runtime.arrivals import Arrivals
from fxpar.runtime.channels import Channels, PendingMessage
from fxpar.runtime.micro import MicroRun, local_batch, replica_of
from fxpar.runtime.padding import batch_dims
from fxpar.runtime.runner import Backend, Made, unheard
from fxpar.runtime.spans import NO_SPANS, Spans
from fxpar.runtime.stage import BoundStage, Half
from fxpar.schedule import Action, Receive, Schedule, Send, Step, Transfer, Wait, schedule, simulate, with_transfers
from fxpar.schedule.mini_batch import Pace

_HALVES: dict[str, Half] = {"B": "backward", "I": "input_part", "W": "weight_part"}
_SENT = {"activation": "sent", "gradient": "sent_grad"}


def plan_pipeline(program: PipelineGraph, micro_batches: int) -> Schedule:
    """The schedule of a group, run on paper first: it neither deadlocks nor keeps more micro-batches than its kind may.

    interleaved_1f1b takes a multiple of the ranks: the number is rounded up.
    """
    strategy = program.strategy
    ranks, pipeline = strategy.pipeline_size, strategy.pipeline
    if pipeline.virtual > 1:
        micro_batches = -(-micro_batches // ranks) * ranks
    plan = schedule(pipeline.schedule, ranks, micro_batches, virtual=pipeline.virtual, places=strategy.places)
    most = {"1f1b": ranks, "zb_h1": ranks}.get(pipeline.schedule, micro_batches * pipeline.virtual)
    simulate(plan, limit=most)
    return plan


def forward_only(program: PipelineGraph, micro_batches: int) -> Schedule:
    """All micro-batches through all stages, without a backward."""
    if places := program.strategy.places:
        turns = [Action("F", stage, number) for number in range(micro_batches) for stage in range(len(places))]
        count = 1 + max(max(mine) for mine in places)
        mine = tuple(tuple(one for one in turns if place in places[one.stage]) for place in range(count))
        return Schedule("forward", count, micro_batches, mine, places=places)
    ranks, virtual = program.strategy.pipeline_size, program.strategy.pipeline.virtual
    actions = tuple(
        tuple(
            Action("F", chunk * ranks + rank, number)
            for first in range(0, micro_batches, ranks)
            for chunk in range(virtual)
            for number in range(first, min(first + ranks, micro_batches))
        )
        for rank in range(ranks)
    )
    return Schedule("forward", ranks, micro_batches, actions, virtual)


@dataclass(frozen=True)
class _Arriving:
    """A message on its way to its `place` in the value `fqn`, by way of `buffer`, which may be that place itself."""

    fqn: str
    value: Tensor
    place: Tensor
    buffer: Tensor
    work: PendingMessage

    def wait(self) -> None:
        self.work.wait()
        if self.buffer is not self.place:
            self.place.copy_(self.buffer)


@dataclass
class _Kept:
    """A piece that a rank has for a stage of its own: it is there when the stage before has run."""

    pieces: deque[Tensor]
    buffer: Tensor

    def wait(self) -> None:
        self.buffer.copy_(self.pieces.popleft())

    def is_completed(self) -> bool:
        return bool(self.pieces)


@dataclass
class _Group:
    """What is under way: the batches, what was received, what is being sent."""

    micro_batches: Sequence[MicroRun]
    batches: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    dims: dict[int, dict[sympy.Symbol, int]] = field(default_factory=dict)
    arriving: dict[Transfer, list[_Arriving]] = field(default_factory=dict)
    received: dict[Transfer, dict[str, Tensor]] = field(default_factory=dict)
    sending: list[tuple[PendingMessage, Tensor]] = field(default_factory=list)
    kept: dict[Transfer, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))  # for this rank itself
    left: dict[int, int] = field(default_factory=dict)  # micro-batch -> forwards on this rank that are to come
    keep: bool = True
    ends: Collection[Action] = ()  # after which a stage has its gradients
    made: Made = unheard
    sends: int = 0  # that are to come
    held: dict[str, Tensor] = field(default_factory=dict)  # gradients, until the last of these


class BoundPipeline:
    """One rank's stages. Call order per group: `prepare`, `run_all`, `finish`, as with `BoundGraph`.

    `groups[s]` names the process groups of stage s for this rank, `column` is the group of `PipelineGraph.column_of`.
    """

    tells = None  # all ranks find the loss of all replicas

    def __init__(
        self,
        program: PipelineGraph,
        rank: int,
        groups: Mapping[int, Mapping[str, str]],
        channels: Channels,
        column: Any,
        compile: Backend = "eager",
    ) -> None:
        self.program, self.rank, self.replicas = program, rank, range(program.strategy.replicas)
        self._channels, self._column = channels, column
        self._column_ranks, self.replica = program.column_of(rank), replica_of(program, rank)
        self.stages = {
            stage.index: BoundStage(stage, rank, groups[stage.index], compile) for stage in program.stages_of(rank)
        }
        self._steps: dict[int, tuple[Schedule, tuple[Step, ...]]] = {}
        self._position = position_of(program, rank)
        self._handovers: dict[tuple[str, int], list[Handover]] = defaultdict(list)  # by kind and sending stage
        for each in program.handovers:
            self._handovers[each.kind, each.stage].append(each)
        self._device = torch.device("cpu")
        self._backend = compile
        mine = Counter(fqn for stage in self.stages.values() for fqn in stage.program.given("grad"))
        self._added = {fqn for fqn, count in mine.items() if count > 1}  # up, when the group ends

    @cached_property
    def pace(self) -> Pace | None:
        """As of a `BoundGraph`; the same on all ranks."""
        return flowing_pace(self.program) if self._backend == "eager" else None

    def prepare(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        arrivals: Arrivals | None = None,
        begun: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start a group: this rank's stored parameters and all buffers, by FQN; see `TrainRunner.prepare`."""
        for stage in self.stages.values():
            stage.prepare(params, buffers, arrivals, begun)
            self._device = stage.device

    def run_all(self, micro_batches: Sequence[MicroRun], spans: Spans = NO_SPANS, made: Made = unheard) -> None:
        """All micro-batches of this replica, in the order of the schedule; they may differ in length. `made` is called
        with the gradients (by FQN) that the epilogues leave as they are: while the last backward of a stage runs, as
        soon as it has made each, but not before this rank has sent its last message. (If it fails before, no rank can
        go on, and what it had posted of a reduction would not end.) `finish` adds up those that several stages of this
        rank give.
        """
        if not micro_batches:
            group = _Group((), made=made)
            for stage in self.stages.values():
                stage.skip()
                self._hand_over(stage.final_sums(), group)
            return
        plan, steps = self._plan(len(micro_batches))
        idle = replace(micro_batches[-1], idle=True)
        filled = [*micro_batches, *[idle] * (plan.micro_batches - len(micro_batches))]
        group = _Group(filled, left=dict.fromkeys(range(len(filled)), len(self.stages)), made=made)
        group.ends = {a.stage: a for a in plan.actions[self._position] if a.part in ("B", "W")}.values()
        group.sends = sum(isinstance(step, Send) for step in steps)
        self._run_steps(steps, plan, group, spans)

    def _hand_over(self, gradients: Mapping[str, Tensor], group: _Group) -> None:
        group.held.update((fqn, value) for fqn, value in gradients.items() if fqn not in self._added)
        if group.held and not group.sends:
            given, group.held = group.held, {}
            group.made(given)

    def _run_steps(self, steps: Sequence[Step], plan: Schedule, group: _Group, spans: Spans = NO_SPANS) -> None:
        for step in steps:
            if isinstance(step, Action):
                with spans.span(step.part, step.micro_batch, step.stage):
                    self._act(step, plan, group)
            elif isinstance(step, Receive):
                self._receive(step.transfer, group)
            elif isinstance(step, Wait):
                self._begin(step.transfer, group)
                with spans.span("wait", step.transfer.micro_batch, step.transfer.target):
                    self._wait(step.transfer, group)
            else:
                self._send(step, group)
        for work, _ in group.sending:
            work.wait()

    def finish(self) -> dict[str, Any]:
        """End a group: reduce. Returns {"loss": ..., "metrics": {name: sum}, "grads": {fqn: local}, "buffers": {fqn:
        tensor}, "experts": as of a `BoundGraph`}.

        Loss, metrics and buffers are those of all stages; a gradient is what this rank's stages give: of a parameter on
        several stages one term of the sum.
        """
        made = {index: stage.reduce() for index, stage in self.stages.items()}
        grads: dict[str, Tensor] = {}
        for results in made.values():
            for (kind, fqn), value in results.items():
                if kind == "grad":
                    grads[fqn] = grads[fqn] + value if fqn in grads else value
        shared: dict[str, dict[str, Tensor]] = {"loss": {}, "buffer": {}}
        for stage in self.program.stages:
            source = self._rank_of(stage)
            for kind in shared:
                for fqn, stored in stage.given(kind).items():
                    value = made.get(stage.index, {}).get((kind, fqn))
                    shared[kind][fqn] = self._broadcast(value, stored, source)
        loss = shared["loss"].pop("loss")
        experts = {fqn: rows for stage in self.stages.values() for fqn, rows in stage.expert_rows.take().items()}
        return {
            "loss": loss,
            "metrics": shared["loss"],
            "grads": grads,
            "buffers": shared["buffer"],
            "experts": experts,
        }

    def run_forward(self, micro_batches: Sequence[MicroRun]) -> dict[str, Tensor]:
        """Forwards alone, after `prepare`: the "loss" and metrics of all micro-batches of all replicas, by name.

        Buffers stay as they are.
        """
        group = _Group(micro_batches, left=dict.fromkeys(range(len(micro_batches)), len(self.stages)), keep=False)
        if micro_batches:
            plan = forward_only(self.program, len(micro_batches))
            self._run_steps(with_transfers(plan)[self._position], plan, group)
        else:
            for stage in self.stages.values():
                stage.skip()
        mine = {name: value for stage in self.stages.values() for name, value in stage.finish_forward().items()}
        last = self.program.stages[-1]
        source = self._rank_of(last)
        return {name: self._broadcast(mine.get(name), stored, source) for name, stored in last.given("loss").items()}

    def _rank_of(self, stage: StageProgram) -> int:
        """The rank of the column that says what a stage has made."""
        return next(rank for rank in self._column_ranks if rank in stage.mesh)

    def _broadcast(self, value: Tensor | None, stored: Stored, source: int) -> Tensor:
        """A small result of one stage, on all stages."""
        meta = stored.local
        empty = torch.empty(tuple(meta.shape), dtype=meta.dtype, device=self._device)  # type: ignore[arg-type]
        tensor = empty if value is None else value.contiguous()
        dist.broadcast(tensor, source, group=self._column)
        return tensor

    def _plan(self, micro_batches: int) -> tuple[Schedule, tuple[Step, ...]]:
        if micro_batches not in self._steps:
            plan = plan_pipeline(self.program, micro_batches)
            self._steps[micro_batches] = plan, with_transfers(plan)[self._position]
        return self._steps[micro_batches]

    def _batch(self, number: int, group: _Group) -> Mapping[str, Tensor]:
        """The replica's batch, loaded when the first of this rank's stages needs it or its sizes."""
        if number not in group.batches:
            batch = group.micro_batches[number].load()
            names = {dim.name: dim.symbol for dim in self.program.dims}
            sizes = batch_dims(self.program.inputs, self.program.dims, batch)
            group.batches[number] = batch
            group.dims[number] = {names[name]: size for name, size in sizes.items()}
        return group.batches[number]

    def _act(self, action: Action, plan: Schedule, group: _Group) -> None:
        number, stage = action.micro_batch, self.stages[action.stage]
        if action.part == "F":
            run = group.micro_batches[number]
            batch = local_batch(stage.program, self._batch(number, group), self.rank, self._device)
            came = group.received.pop(Transfer("activation", action.stage - 1, number), {})
            made = stage.forward(number, batch, came, run, keep=group.keep)
            group.left[number] -= 1
            if not group.left[number]:
                group.batches[number] = {}
            out = Transfer("activation", action.stage, number)
        else:
            came = group.received.pop(Transfer("gradient", action.stage + 1, number), {})
            if action in group.ends and not group.sends:
                stage.made = partial(self._hand_over, group=group)
            made = stage.backward(number, came, _HALVES[action.part])
            if action in group.ends:
                stage.made = unheard
                self._hand_over(stage.final_sums(), group)
            out = Transfer("gradient", action.stage, number)
        if made and 0 <= out.target < plan.stages:
            group.received[out] = made  # until the step that sends it, which comes next

    def _send(self, step: Send, group: _Group) -> None:
        transfer = step.transfer
        values = group.received.pop(transfer, {})
        dims = group.dims[transfer.micro_batch]
        for handover in self._handovers[_SENT[transfer.what], transfer.stage]:
            for message in handover.messages(dims, self.replica):
                if message.source == self.rank:
                    piece = _part(values[handover.fqn], message.taken)
                    if message.target == self.rank:
                        group.kept[transfer].append(piece)
                        continue
                    piece = piece.contiguous()
                    group.sending.append((self._channels.send(piece, message.target), piece))
        group.sending = [(work, tensor) for work, tensor in group.sending if not work.is_completed()]
        group.sends -= 1
        self._hand_over({}, group)

    def _receive(self, transfer: Transfer, group: _Group) -> None:
        self._batch(transfer.micro_batch, group)
        dims = group.dims[transfer.micro_batch]
        arriving = group.arriving[transfer] = []
        for handover in self._handovers[_SENT[transfer.what], transfer.stage]:
            meta = handover.taken.local
            value = torch.empty(meta.sizes(dims), dtype=meta.dtype, device=self._device)
            for message in handover.messages(dims, self.replica):
                if message.target == self.rank:
                    place = _part(value, message.put)
                    buffer = place if place.is_contiguous() else torch.empty_like(place)
                    if message.source == self.rank:
                        work: PendingMessage = _Kept(group.kept[transfer], buffer)
                    else:
                        work = self._channels.receive(buffer, message.source)
                    arriving.append(_Arriving(handover.fqn, value, place, buffer, work))

    def _begin(self, transfer: Transfer, group: _Group) -> None:
        """While activations come, the forward that needs them does what it needs none for."""
        if transfer.what == "activation":
            number, stage = transfer.micro_batch, self.stages[transfer.target]
            run = group.micro_batches[number]
            batch = local_batch(stage.program, self._batch(number, group), self.rank, self._device)
            coming = {each.fqn: each.value for each in group.arriving[transfer]}
            stage.begin(number, batch, coming, run)

    def _wait(self, transfer: Transfer, group: _Group) -> None:
        found = {}
        for each in group.arriving.pop(transfer):
            each.wait()
            found[each.fqn] = each.value
        group.received[transfer] = found


def _part(value: Tensor, spans: Sequence[Span]) -> Tensor:
    """A box of a tensor, with a start and stop for each dim; itself if that is all of it."""
    if all(span == (0, size) for span, size in zip(spans, value.shape, strict=True)):
        return value
    return value[tuple(slice(*span) for span in spans)]
