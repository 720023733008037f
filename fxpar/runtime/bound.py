"""An `ExecGraph` bound to one rank: tokens filled in, compiled, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxpar.errors import MicroBatchError
from fxpar.ir.exec_graph import ExecGraph, Part, Program, Source, compile_graph
from fxpar.passes.write_in_place import undo
from fxpar.runtime.accumulate import accumulating, own_memory
from fxpar.runtime.gloo import graph_of_rank
from fxpar.runtime.micro import MicroRun, local_batch
from fxpar.runtime.spans import NO_SPANS, Spans

Backend = Literal["eager", "inductor"]
c10d = torch.ops._c10d_functional


class BoundGraph:
    """One rank's program. Call order per mini-batch: `prepare`, `run` for each micro-batch, `finish`."""

    def __init__(self, program: ExecGraph, rank: int, groups: Mapping[str, str], compile: Backend = "eager") -> None:
        self.program, self.rank = program, rank
        self._backend = compile
        self._groups = dict(groups)
        mesh = program.strategy.mesh
        self._indices = {axis: mesh.index(rank, axis) for axis in token_axes(program)}
        self._prologue = self._compile(program.prologue)
        self._body = self._compile(program.body)
        self._epilogue = self._compile(program.epilogue)
        self._accumulate: Callable[..., Any] | None = None
        self._inputs: list[Tensor | None] = [None] * len(program.inputs)
        self._prepared: Sequence[Tensor] = ()
        self._sums: list[Tensor] | None = None

    def _compile(self, part: Part) -> Callable[..., Any]:
        return self._compile_graph(graph_of_rank(part.graph, self._groups, self._indices), part.is_empty)

    def _compile_graph(self, graph: fx.Graph, is_empty: bool) -> Callable[..., Any]:
        if self._backend == "eager" or is_empty:
            return compile_graph(graph)
        functional_collectives(graph)  # the compiler wants these, and reuses buffers by itself
        # Sizes that come in through batch tensors are dynamic, so new lengths do not compile again.
        return torch.compile(compile_graph(graph), backend="inductor", dynamic=True, fullgraph=True)

    def prepare(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Start a mini-batch: local stored parameters (by FQN) and buffers; runs the prologue."""
        for i, info in enumerate(self.program.inputs):
            if info.kind == "param":
                self._inputs[i] = params[info.fqn]
            elif info.kind == "buffer":
                self._inputs[i] = buffers[info.fqn]
            elif info.kind == "constant":
                self._inputs[i] = self.program.constants[info.fqn]
        self._sums = None
        with torch.no_grad():
            self._prepared = self._prologue(*self._gather(self.program.prologue.sources, ()))

    def run(self, batch: Mapping[str, Tensor], scale: float | Tensor, seed: int = 0, *, idle: bool = False) -> None:
        """One micro-batch (this rank's local tensors): forward, backward, results added to those so far.

        `idle`: this replica has no micro-batch left but must take part in the others' collectives (ZeRO-2 and 3). It
        adds exact zeros and leaves the buffers alone; `batch` is any that has run before.
        """
        scale = 0.0 if idle else scale
        for i, info in enumerate(self.program.inputs):
            if info.kind == "batch":
                if info.fqn not in batch:
                    raise MicroBatchError(info.fqn, f"is missing; the batch has {sorted(batch)}")
                self._inputs[i] = batch[info.fqn]
            elif info.kind == "scale":
                self._inputs[i] = torch.as_tensor(scale, dtype=info.meta.dtype, device=self._device())
            elif info.kind == "seed":
                self._inputs[i] = torch.tensor(seed, dtype=torch.int64, device=self._device())
        with torch.no_grad(), self._factories():
            values = self._gather(self.program.body.sources, ())
            if self._sums is None:
                self._sums = list(self._body(*values))
            else:
                self._sums = list(self._later_body()(*values, *self._accumulators()))
        if idle:
            self._keep_buffers(self._sums)
        else:
            self._carry_buffers()

    def run_all(self, micro_batches: Sequence[MicroRun], spans: Spans = NO_SPANS) -> None:
        """All micro-batches of a group, one after the other."""
        if not micro_batches:
            self.skip()
        for number, one in enumerate(micro_batches):
            with spans.span("micro_batch", number):
                batch = local_batch(self.program, one.load(), self.rank, self._device())
                self.run(batch, one.scale, one.seed, idle=one.idle)

    def skip(self) -> None:
        """This replica has no micro-batch in the group: zeros, and buffers as they are. Not for ZeRO-2 and 3."""
        zeros = []
        for node in self.program.body.results:
            local = node.meta["local"]
            zeros.append(torch.zeros(local.shape, dtype=local.dtype, device=self._device()))
        self._keep_buffers(zeros)
        self._sums = zeros

    def _keep_buffers(self, results: list[Tensor]) -> None:
        position = {info.fqn: i for i, info in enumerate(self.program.inputs) if info.kind == "buffer"}
        for index, fqn in self._buffer_outputs().items():
            held = self._inputs[position[fqn]]
            assert held is not None
            results[index] = held

    def finish(self) -> dict[str, Any]:
        """End a group: reduce. Returns {"loss": ..., "grads": {fqn: local}, "buffers": {fqn: tensor}}."""
        if self._sums is None:
            raise MicroBatchError("", "no micro-batch has run since prepare()")
        with torch.no_grad():
            results = self._epilogue(*self._gather(self.program.epilogue.sources, self._sums))
        self._sums = None
        out: dict[str, Any] = {"grads": {}, "buffers": {}}
        for info, value in zip(self.program.outputs, results, strict=True):
            if info.kind == "loss":
                out["loss"] = value
            else:
                out["grads" if info.kind == "grad" else "buffers"][info.fqn] = value
        return out

    def _gather(self, sources: tuple[Source, ...], body: Sequence[Tensor]) -> list[Any]:
        table = {"input": self._inputs, "prologue": self._prepared, "body": body}
        return [table[part][i] for part, i in sources]

    def _factories(self) -> AbstractContextManager[Any]:
        """Tensors that the graph makes itself go to the inputs' device (a mode that costs a Python call per op)."""
        device = self._device()
        return nullcontext() if device.type == "cpu" else device

    def _device(self) -> torch.device:
        return next((t.device for t in self._inputs if t is not None), torch.device("cpu"))

    def _buffer_outputs(self) -> dict[int, str]:
        """Body result -> FQN of the buffer whose new value it is; these are not summed over micro-batches."""
        return {i: node.meta["buffer"] for i, node in enumerate(self.program.body.results) if "buffer" in node.meta}

    def _carry_buffers(self) -> None:
        """The next micro-batch starts from the buffers that this one left."""
        assert self._sums is not None
        position = {info.fqn: i for i, info in enumerate(self.program.inputs) if info.kind == "buffer"}
        for index, fqn in self._buffer_outputs().items():
            self._inputs[position[fqn]] = self._sums[index]

    def _accumulators(self) -> list[Tensor]:
        """Results so far as buffers that can be added to in place."""
        assert self._sums is not None
        kept = self._buffer_outputs()
        own_memory(self._sums, (*self._inputs, *self._prepared), kept)
        return [value for i, value in enumerate(self._sums) if i not in kept]

    def _later_body(self) -> Callable[..., Any]:
        """The body that adds to earlier results; compiled when a second micro-batch comes."""
        if self._accumulate is None:
            program = self.program
            graph = graph_of_rank(program.body.graph, self._groups, self._indices)
            self._accumulate = self._compile_graph(accumulating(graph, self._buffer_outputs()), is_empty=False)
        return self._accumulate


def functional_collectives(graph: fx.Graph) -> None:
    """Replace collectives and elementwise ops that work in place by those that do not; accumulators stay."""
    undo(graph)
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce_.default):
        node.target = c10d.all_reduce.default


def token_axes(program: Program) -> set[str]:
    """Axes of the `#axis` tokens in a program."""
    return {
        arg[1:]
        for part in program.parts.values()
        for node in part.graph.nodes
        for arg in node.args
        if isinstance(arg, str) and arg.startswith("#")
    }


def bind(program: ExecGraph, rank: int, groups: Mapping[str, str], *, compile: Backend = "eager") -> BoundGraph:
    """`program` for `rank`; `groups` names a process group for each of `program.axes()`."""
    return BoundGraph(program, rank, groups, compile)
