"""An `ExecGraph` bound to one rank: tokens filled in, compiled, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from fxpar.cost.flowing import flowing_pace
from fxpar.ir.exec_graph import ExecGraph, Part
from fxpar.runtime.micro import MicroRun, is_first_of_replica, local_batch, replica_of
from fxpar.runtime.replica_loss import is_of_replica
from fxpar.runtime.runner import Backend, Made, TrainRunner, own_memory, unheard
from fxpar.runtime.spans import NO_SPANS, Spans
from fxpar.schedule.mini_batch import Pace


class BoundGraph(TrainRunner[ExecGraph]):
    """One rank's program. Call order per mini-batch: `prepare`, `run` for each micro-batch, `finish`. `tells`: whether
    what this rank ends with counts where the loss of replicas is added up; None if every rank has found the sum.
    """

    def __init__(self, program: ExecGraph, rank: int, groups: Mapping[str, str], compile: Backend = "eager") -> None:
        super().__init__(program, rank, groups, compile, dict(enumerate(program.body.results)))
        self.replica, self.replicas = replica_of(program, rank), range(program.strategy.replicas)
        apart = len(self.replicas) > 1 and is_of_replica(program)
        self.tells = is_first_of_replica(program, rank) if apart else None
        for name in program.parts:
            self.compiled(name)

    @cached_property
    def pace(self) -> Pace | None:
        """See `flowing_pace`; None if the graph is compiled."""
        return flowing_pace(self.program) if self._backend == "eager" else None

    def before_gradients(self, part: Part) -> int | None:
        return 0 if part is self.program.body else None

    def run(self, batch: Mapping[str, Tensor], scale: float | Tensor, seed: int = 0, *, idle: bool = False) -> None:
        """One micro-batch (this rank's local tensors): forward, backward, results added to those so far.

        `idle`: this replica has no micro-batch left but must take part in the others' collectives (ZeRO-2 and 3). It
        adds exact zeros and leaves the buffers alone; `batch` is any that has run before.
        """
        self.expert_rows.idle = idle
        inputs = self.fill({"batch": batch, "scale": 0.0 if idle else scale, "seed": seed})
        operands, sums = self.gather("body", {"input": inputs}), self.sums.get("body")
        if sums is None:
            sums = self.call("body", operands)
            if self.made is unheard:  # more is added to them
                own_memory(sums, (*inputs, *self.prepared), self.buffers)
        else:
            operands += [value for i, value in enumerate(sums) if i not in self.buffers]
            sums = self.call("body", operands, keep=self.buffers)
        self.sums["body"] = sums
        self.carry(sums, idle)

    def run_all(self, micro_batches: Sequence[MicroRun], spans: Spans = NO_SPANS, made: Made = unheard) -> None:
        """All micro-batches of a group, one after the other. `made` is called with the gradients (by FQN) that the
        epilogue leaves as they are: while the last micro-batch runs, as soon as it has made each.
        """
        if not micro_batches:
            self.skip()
        for number, one in enumerate(micro_batches):
            with spans.span("micro_batch", number):
                batch = local_batch(self.program, one.load(), self.rank, self.device)
                self.made = made if number == len(micro_batches) - 1 else unheard
                self.run(batch, one.scale, one.seed, idle=one.idle)
        self.made = unheard
        made({fqn: self.sums["body"][i] for i, fqn in self.final.items()})

    def begin_with(self, begun: Mapping[str, Tensor]) -> None:
        self.skip()
        for i, fqn in self.final.items():
            self.sums["body"][i] = begun[fqn]

    def skip(self) -> None:
        """This replica has no micro-batch in the group: what there was, else zeros, and buffers as they are. Not for
        ZeRO-2 and 3.
        """
        if not self.sums:
            self.sums["body"] = [self.nothing(node) for node in self.program.body.results]

    def finish(self) -> dict[str, Any]:
        """End a group: reduce. Returns {"loss": ..., "metrics": {name: sum}, "grads": {fqn: local}, "buffers": {fqn:
        tensor}, "experts": what `ExpertRows.take` gives}, without a loss if the graph has none.
        """
        found: dict[str, Any] = {"metrics": {}, "grads": {}, "buffers": {}, "experts": self.expert_rows.take()}
        for (kind, fqn), value in self.reduce().items():
            found["metrics" if kind == "loss" else f"{kind}s"][fqn] = value
        if "loss" in found["metrics"]:
            found["loss"] = found["metrics"].pop("loss")
        return found

    def run_forward(self, micro_batches: Sequence[MicroRun]) -> dict[str, Tensor]:
        """As `BoundPipeline.run_forward`; of this replica alone where `finish` gives its loss alone (`tells`)."""
        sums: list[Tensor] = []
        for one in micro_batches:
            batch = local_batch(self.program, one.load(), self.rank, self.device)
            inputs = self.fill({"batch": batch, "scale": 0.0 if one.idle else one.scale, "seed": one.seed})
            found = self.call("loss_body", self.gather("loss_body", {"input": inputs}))
            sums = [before + more for before, more in zip(sums, found, strict=True)] if sums else found
        sums = sums or [self.nothing(node) for node in self.program.loss_body.results]
        names = [out.fqn for out in self.program.outputs if out.kind == "loss"]
        return dict(zip(names, self.call("loss", self.gather("loss", {"body": sums})), strict=True))


def bind(program: ExecGraph, rank: int, groups: Mapping[str, str], *, compile: Backend = "eager") -> BoundGraph:
    """`program` for `rank`; `groups` names a process group for each of `program.axes()`."""
    return BoundGraph(program, rank, groups, compile)
