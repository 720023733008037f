"""`BoundStage`: one pipeline stage on one rank, micro-batch by micro-batch, in whatever order a schedule asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxpar.errors import MicroBatchError
from fxpar.ir.exec_graph import Part
from fxpar.ir.pipeline_graph import StageProgram
from fxpar.runtime.accumulate import accumulating, own_memory
from fxpar.runtime.bound import Backend, functional_collectives, token_axes
from fxpar.runtime.gloo import graph_of_rank
from fxpar.torch_api.boxed import compile_boxed

Half = Literal["backward", "input_part", "weight_part"]


@dataclass
class _Kept:
    """What a micro-batch leaves for its backward; emptied as that runs."""

    inputs: list[Any]
    forward: list[Any]
    input_part: list[Any]


class BoundStage:
    """Call order: `prepare`; for each micro-batch `forward`, then `backward` (or its halves); `finish`.

    Gradients add up over the micro-batches in the order in which their
    backward runs.
    """

    def __init__(self, program: StageProgram, rank: int, groups: Mapping[str, str], compile: Backend = "eager") -> None:
        self.program, self.rank, self._backend = program, rank, compile
        mesh = program.strategy.mesh
        indices = {axis: mesh.index(rank, axis) for axis in token_axes(program)}
        names = ("prologue", "forward", "backward", "input_part", "weight_part", "epilogue")
        self._parts: dict[str, Part] = {
            name: Part(graph_of_rank(part.graph, groups, indices), part.sources)
            for name in names
            for part in (getattr(program, name),)
        }
        for name in ("input_part", "weight_part"):
            # In the joint order nothing reads the operand of an in-place collective later; in this one it may.
            functional_collectives(self._parts[name].graph)
        self._calls: dict[tuple[str, bool], Callable[[list[Any]], Sequence[Any]]] = {}
        self.sent = tuple(program.given("sent"))
        self.sent_grads = tuple(program.given("sent_grad"))
        self._reads = {
            (name, source): {i for found, i in part.sources if found == source}
            for name, part in self._parts.items()
            for source in ("input", "forward")
        }
        self._inputs: list[Any] = [None] * len(program.inputs)
        self._place = {(info.kind, info.fqn): i for i, info in enumerate(program.inputs)}
        epilogue = [i for source, i in program.epilogue.sources if source == "forward"]
        # What the epilogue reads stands behind what is sent, without a gap.
        self._ends = range(len(self.sent), max([len(self.sent), *(i + 1 for i in epilogue)]))
        results = program.forward.results
        self._buffers = {i: results[i].meta["buffer"] for i in self._ends if "buffer" in results[i].meta}
        self._early: list[Any] | None = None
        self._late: list[Tensor] | None = None
        self._prepared: Sequence[Any] = ()
        self._kept: dict[int, _Kept] = {}

    def prepare(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Start a group: local stored parameters and buffers by FQN (of all stages); runs the prologue."""
        held = {"param": params, "buffer": buffers, "constant": self.program.constants}
        for i, info in enumerate(self.program.inputs):
            if info.kind in held:
                self._inputs[i] = held[info.kind][info.fqn]
        self._early = self._late = None
        self._kept.clear()
        self._prepared = self._run("prologue", {"input": self._inputs})

    def forward(
        self,
        micro_batch: int,
        batch: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        scale: float,
        seed: int,
        idle: bool,
        *,
        keep: bool = True,
    ) -> dict[str, Tensor]:
        """Run the forward of a micro-batch on this rank's pieces; what it sends, by name. `keep` what the backward
        needs.
        """
        inputs = list(self._inputs)
        for i, info in enumerate(self.program.inputs):
            if info.kind == "batch":
                if info.fqn not in batch:
                    raise MicroBatchError(info.fqn, f"is missing; the batch has {sorted(batch)}")
                inputs[i] = batch[info.fqn]
            elif info.kind == "received":
                inputs[i] = received[info.fqn]
            elif info.kind == "scale":
                inputs[i] = torch.as_tensor(0.0 if idle else scale, dtype=info.meta.dtype, device=self._device())
            elif info.kind == "seed":
                inputs[i] = torch.tensor(seed, dtype=torch.int64, device=self._device())
        results = list(self._run("forward", {"input": inputs, "prologue": self._prepared}))
        self._take_ends(results, idle)
        sent = dict(zip(self.sent, results, strict=False))
        if keep:
            self._kept[micro_batch] = _Kept(
                _only(inputs, self._reads["backward", "input"]), _only(results, self._reads["backward", "forward"]), []
            )
        return sent

    def backward(self, micro_batch: int, received: Mapping[str, Tensor], half: Half = "backward") -> dict[str, Tensor]:
        """Run the backward of a micro-batch, or a half of it; the gradients that it sends, by name."""
        kept = self._kept[micro_batch]
        for fqn, value in received.items():
            kept.inputs[self._place["received_grad", fqn]] = value
        tables = {
            "input": kept.inputs,
            "prologue": self._prepared,
            "forward": kept.forward,
            "input_part": kept.input_part,
        }
        values = self._gather(half, tables)
        del tables
        if half == "input_part":
            kept.inputs = _only(kept.inputs, self._reads["weight_part", "input"])
            kept.forward = _only(kept.forward, self._reads["weight_part", "forward"])
            results = kept.input_part = list(self._call(half)(values))
        else:
            self._kept.pop(micro_batch)
            # What the first half has sent may be on its way still.
            sent = kept.input_part[: len(self.sent_grads)]
            kept.inputs, kept.forward, kept.input_part = [], [], []
            results = self._accumulate(half, values, sent)
        return {} if half == "weight_part" else dict(zip(self.sent_grads, results, strict=False))

    def skip(self) -> None:
        """No micro-batch in this group: zeros, and buffers as they are."""
        results = self.program.forward.results
        self._early = [None] * len(self.sent)
        for i in self._ends:
            fqn = self._buffers.get(i)
            held = None if fqn is None else self._inputs[self._place["buffer", fqn]]
            self._early.append(self._zeros(results[i]) if held is None else held)
        self._late = [self._zeros(node) for node in self.program.weight_part.results]

    def finish_loss(self) -> Tensor | None:
        """End a group of forwards: the loss, on the stage that has it."""
        early, self._early = self._early, None
        outputs = [out.kind for out in self.program.outputs if out.kind in ("loss", "grad", "buffer")]
        if early is None or "loss" not in outputs:
            return None
        if "loss" not in self._parts:
            self._parts["loss"] = self._loss_part(outputs.index("loss"))
        part = self._parts["loss"]
        # Some gradients may be reduced together with the loss; they are of no interest here.
        read = {source for source, place in zip(part.sources, _places(part.graph), strict=True) if place.users}
        tables = {"input": self._inputs, "prologue": self._prepared, "forward": early}
        tables["backward"] = [None] * len(self.sent_grads)
        for node in self.program.weight_part.results:
            needed = ("backward", len(tables["backward"])) in read
            tables["backward"].append(self._zeros(node) if needed else None)
        (loss,) = self._run("loss", tables)
        return loss

    def _loss_part(self, index: int) -> Part:
        """What makes result `index` of the epilogue."""
        part, graph = self._parts["epilogue"], fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(part.graph, copied)
        graph.output((copied[part.results[index]],))
        graph.eliminate_dead_code()
        return Part(graph, part.sources)

    def finish(self) -> dict[tuple[str, str], Tensor]:
        """End the group: reduce. Results by kind (loss, grad, buffer) and FQN."""
        if self._early is None or self._late is None:
            raise MicroBatchError("", "no micro-batch has run since prepare()")
        tables = {
            "input": self._inputs,
            "prologue": self._prepared,
            "forward": self._early,
            "backward": [*[None] * len(self.sent_grads), *self._late],
        }
        results = self._run("epilogue", tables)
        self._early = self._late = None
        outputs = [out for out in self.program.outputs if out.kind in ("loss", "grad", "buffer")]
        return {(out.kind, out.fqn): value for out, value in zip(outputs, results, strict=True)}

    def _take_ends(self, results: list[Any], idle: bool) -> None:
        """Add what the epilogue reads to that of earlier micro-batches; the next one starts from new buffers."""
        if self._early is None:
            self._early = [None] * self._ends.stop
        for i in self._ends:
            fqn, before = self._buffers.get(i), self._early[i]
            if fqn is None:
                self._early[i] = results[i] if before is None else before + results[i]
                continue
            place = self._place["buffer", fqn]
            self._early[i] = self._inputs[place] if idle else results[i]
            self._inputs[place] = self._early[i]

    def _accumulate(self, half: Half, values: list[Any], sent: list[Any]) -> list[Any]:
        """Run the backward, or the half of it that ends it, and add its gradients up; the gradients to send. Nothing is
        added into the memory of `sent`.
        """
        skipped = len(self.sent_grads) if half == "backward" else 0
        if self._late is None:
            results = list(self._call(half)(values))
            self._late = results[skipped:]
            taken = self._tensors([*self._inputs, *self._prepared, *results[:skipped], *sent])
            own_memory(self._late, taken)
            return results[:skipped]
        values += self._late  # the same list, which the call empties: operands are freed after their last use
        return list(self._call(half, again=True)(values))[:skipped]

    def _run(self, name: str, tables: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
        return self._call(name)(self._gather(name, tables))

    def _gather(self, name: str, tables: Mapping[str, Sequence[Any]]) -> list[Any]:
        return [tables[source][i] for source, i in self._parts[name].sources]

    def _call(self, name: str, *, again: bool = False) -> Callable[[list[Any]], Sequence[Any]]:
        """The compiled part; `again`: the one that adds to earlier gradients."""
        if (name, again) not in self._calls:
            graph = self._parts[name].graph
            if again:
                graph = accumulating(graph, range(len(self.sent_grads) if name == "backward" else 0))
            self._calls[name, again] = self._compile(graph)
        call = self._calls[name, again]

        def run(values: list[Any]) -> Sequence[Any]:
            with torch.no_grad(), self._factories():
                return call(values)

        return run

    def _compile(self, graph: fx.Graph) -> Callable[[list[Any]], Sequence[Any]]:
        if self._backend == "eager":
            return compile_boxed(graph)
        functional_collectives(graph)
        compiled: Any = torch.compile(fx.GraphModule(torch.nn.Module(), graph), backend="inductor", dynamic=True)
        return lambda values: compiled(*values)

    def _factories(self) -> AbstractContextManager[Any]:
        """Tensors that a graph makes itself go to the inputs' device (a mode that costs a Python call per op)."""
        device = self._device()
        return nullcontext() if device.type == "cpu" else device

    def _zeros(self, node: fx.Node) -> Tensor:
        local = node.meta["local"]
        return torch.zeros(local.shape, dtype=local.dtype, device=self._device())

    def _device(self) -> torch.device:
        return next((t.device for t in self._tensors(self._inputs)), torch.device("cpu"))

    @staticmethod
    def _tensors(values: Sequence[Any]) -> list[Tensor]:
        return [value for value in values if isinstance(value, Tensor)]


def _only(values: list[Any], places: Collection[int]) -> list[Any]:
    """`values` at these places, None elsewhere."""
    return [value if i in places else None for i, value in enumerate(values)]


def _places(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))
