"""`BoundStage`: one pipeline stage on one rank, micro-batch by micro-batch, in whatever order a schedule asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fxpar.ir.exec_graph import Part
from fxpar.ir.pipeline_graph import StageProgram
from fxpar.runtime.arrivals import Arrivals
from fxpar.runtime.micro import MicroRun
from fxpar.runtime.runner import Backend, TrainRunner, own_memory

Half = Literal["backward", "input_part", "weight_part"]


class BoundStage(TrainRunner[StageProgram]):
    """Call order: `prepare`; for each micro-batch `forward`, then `backward` (or its halves); `reduce`.

    Gradients add up over the micro-batches in the order in which their
    backward runs.
    """

    def __init__(self, program: StageProgram, rank: int, groups: Mapping[str, str], compile: Backend = "eager") -> None:
        self.sent = tuple(program.given("sent"))
        self.sent_grads = tuple(program.given("sent_grad"))
        first = len(self.sent)
        epilogue = [i for source, i in program.epilogue.sources if source == "forward"]
        # What the epilogue reads stands behind what is sent, without a gap.
        self._ends = range(first, max([first, *(i + 1 for i in epilogue)]))
        results = program.forward.results
        super().__init__(program, rank, groups, compile, {i: results[i] for i in self._ends})
        self._kept: dict[int, dict[str, dict[int, Any]]] = {}  # what each micro-batch leaves for its backward
        self._begun: dict[int, list[Any]] = {}  # what each has of its forward already

    def before_gradients(self, part: Part) -> int | None:
        if part is self.program.weight_part:
            return len(self.sent_grads)
        return 0 if part is self.program.backward else None

    def prepare(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        arrivals: Arrivals | None = None,
        begun: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start a group, as a TrainRunner does, without a micro-batch under way."""
        self._kept.clear()
        self._begun.clear()
        super().prepare(params, buffers, arrivals, begun)

    def begin_with(self, begun: Mapping[str, Tensor]) -> None:
        late = self._late([self.nothing(node) for node in self.program.weight_part.results])
        self.sums["backward"] = [begun[self.final[i]] if i in self.final else value for i, value in enumerate(late)]

    def begin(
        self, micro_batch: int, batch: Mapping[str, Tensor], received: Mapping[str, Tensor], run: MicroRun
    ) -> list[Any]:
        """Run what of a forward needs no values of what is `received`, its sizes at most, if there is such work and it
        has not run yet. The inputs of the forward.
        """
        self.expert_rows.idle = run.idle
        scale = 0.0 if run.idle else run.scale
        inputs = self.fill({"batch": batch, "received": received, "scale": scale, "seed": run.seed})
        if self.program.early is not None and micro_batch not in self._begun:
            self._begun[micro_batch] = self.call("early", self.gather("early", {"input": inputs}))
        return inputs

    def forward(
        self,
        micro_batch: int,
        batch: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        run: MicroRun,
        *,
        keep: bool = True,
    ) -> dict[str, Tensor]:
        """Run the forward of a micro-batch on this rank's pieces; what it sends, by name. `keep` what the backward
        needs.
        """
        tables = {"input": self.begin(micro_batch, batch, received, run)}
        if self.program.early is None:
            operands, rest = self.gather("forward", tables), "forward"
        else:
            operands, rest = self.gather("late", {**tables, "early": self._begun.pop(micro_batch)}), "late"
        results = tables["forward"] = self.call(rest, operands)
        ends = self.sums.setdefault("forward", [None] * self._ends.stop)
        for i in self._ends:
            before = None if i in self.buffers else ends[i]
            ends[i] = results[i] if before is None else before + results[i]
        self.carry(ends, run.idle)
        if keep:
            self._kept[micro_batch] = {source: self.read("backward", source, tables[source]) for source in tables}
        return dict(zip(self.sent, results, strict=False))

    def final_sums(self) -> dict[str, Tensor]:
        """The sums so far that the epilogue leaves as they are, by FQN."""
        return {fqn: self.sums["backward"][i] for i, fqn in self.final.items()}

    def backward(self, micro_batch: int, received: Mapping[str, Tensor], half: Half = "backward") -> dict[str, Tensor]:
        """Run the backward of a micro-batch, or a half of it; the gradients that it sends, by name."""
        kept = self._kept[micro_batch]
        for fqn, value in received.items():
            kept["input"][self.place["received_grad", fqn]] = value
        operands = self.gather(half, kept)
        if half == "input_part":
            for source in kept:
                kept[source] = self.read("weight_part", source, kept[source])
            results = self.call(half, operands)
            kept[half] = dict(enumerate(results))
        else:
            # What the first half has sent may be on its way still.
            sent = list(kept.get("input_part", {}).values())[: len(self.sent_grads)]
            self._kept.pop(micro_batch).clear()
            results = self._accumulate(half, operands, sent)
        return {} if half == "weight_part" else dict(zip(self.sent_grads, results, strict=False))

    def skip(self) -> None:
        """No micro-batch in this group: zeros, and buffers as they are."""
        results = self.program.forward.results
        late = self.sums.get("backward")
        self.sums["forward"] = [None] * len(self.sent) + [self.nothing(results[i]) for i in self._ends]
        self.sums["backward"] = late or self._late([self.nothing(one) for one in self.program.weight_part.results])

    def finish_forward(self) -> dict[str, Tensor]:
        """End a group of forwards: the loss and metrics by name, on the stage that has them."""
        sums, self.sums = self.sums, {}
        if not sums or not self.program.given("loss"):
            return {}
        # Some gradients may be reduced together with the loss; they are of no interest here.
        late = self._late(self.program.weight_part.results)
        backward = {i: self.nothing(node) for i, node in self.read("loss", "backward", late).items()}
        found = self.call("loss", self.gather("loss", {**sums, "backward": backward}))
        return dict(zip(self.program.given("loss"), found, strict=True))

    def _late(self, results: Any) -> list[Any]:
        """What the epilogue reads of the backward, at its places: behind the gradients that are sent."""
        return [*[None] * len(self.sent_grads), *results]

    def _accumulate(self, half: Half, operands: list[Any], sent: list[Any]) -> list[Any]:
        """Run the backward, or the half of it that ends it, and add its gradients up; the gradients to send. Nothing is
        added into the memory of `sent`.
        """
        skipped = len(self.sent_grads) if half == "backward" else 0
        late = self.sums.get("backward")
        if late is None:
            results = self.call(half, operands)
            late = results[skipped:]
            own_memory(late, (*self.inputs, *self.prepared, *results[:skipped], *sent))
            self.sums["backward"] = self._late(late)
            return results[:skipped]
        operands += late[len(self.sent_grads) :]  # the same list, which the call empties
        return self.call(half, operands, keep=range(skipped))[:skipped]
