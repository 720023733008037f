"""What runs a placed program on one rank: its parts, compiled, and the tables of values that flow between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, fx

from fxpar.cost.flowing import final_gradients
from fxpar.errors import MicroBatchError
from fxpar.ir.exec_graph import ExecGraph, Part, Program, compile_graph, make_tensors_on
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.pipeline_graph import StageProgram
from fxpar.passes.accumulate_gradients import accumulate
from fxpar.passes.write_in_place import functional
from fxpar.runtime.arrivals import Arrivals, hand_over, wait_before_use
from fxpar.runtime.expert_rows import ExpertRows
from fxpar.runtime.gloo import graph_of_rank
from fxpar.runtime.host import CudaStreams, HostCopies, copy_beside_kernels
from fxpar.torch_api.inductor import compile_whole
from fxpar.torch_api.modules import compile_boxed

Backend = Literal["eager", "inductor"]
Values = Sequence[Any] | Mapping[int, Any]
Compiled = Callable[[list[Any]], Sequence[Any]]
P = TypeVar("P", bound=Program)
T = TypeVar("T", ExecGraph, StageProgram)
Made = Callable[[Mapping[str, Tensor]], object]


def unheard(gradients: Mapping[str, Tensor]) -> None:
    """Nobody waits for gradients before the end of the group."""


class Runner(Generic[P]):
    """A program on one rank; `groups` names a process group for each of `program.axes()`.

    `inputs` and `prepared`, the results of the prologue, are the tables that all calls share. `place` has the position
    of each input by kind and FQN.
    """

    def __init__(self, program: P, rank: int, groups: Mapping[str, str], compile: Backend = "eager") -> None:
        self.program, self.rank, self.device = program, rank, torch.device("cpu")
        self.constants: Mapping[str, Tensor] = program.constants
        self.place = {(info.kind, info.fqn): i for i, info in enumerate(program.inputs)}
        self.inputs: list[Any] = [None] * len(program.inputs)
        self.prepared: Sequence[Any] = ()
        self._groups, self._backend = groups, compile
        self._indices = {axis: program.mesh.index(rank, axis) for axis in token_axes(program)}
        self._compiled: dict[tuple[str, bool], Compiled] = {}
        self._copies: HostCopies | None = None

    def move_to(self, tensors: Iterable[Tensor]) -> None:
        """Run where the first of these tensors is, if there are any."""
        device = next((tensor.device for tensor in tensors), self.device)
        if device != self.device:
            self.device = device
            self.constants = {name: value.to(device) for name, value in self.program.constants.items()}
            self._compiled.clear()
            self._copies = None

    def fill(self, given: Mapping[str, Any]) -> list[Any]:
        """`inputs` and what is given by kind: tensors by FQN, or a number.

        Raises MicroBatchError for a key that the batch has not.
        """
        inputs = list(self.inputs)
        for i, info in enumerate(self.program.inputs):
            if info.kind not in given:
                continue
            value = given[info.kind]
            if info.kind in ("scale", "seed"):
                inputs[i] = torch.as_tensor(value, dtype=info.meta.dtype, device=self.device)
            elif info.kind == "batch" and info.fqn not in value:
                raise MicroBatchError(info.fqn, f"is missing; the batch has {sorted(value)}")
            else:
                inputs[i] = value[info.fqn]
        return inputs

    def gather(self, name: str, tables: Mapping[str, Values]) -> list[Any]:
        """The operands of a part; `tables` are the inputs, or results of a part, that differ from call to call."""
        tables = {"input": self.inputs, "prologue": self.prepared, **tables}
        return [tables[source][i] for source, i in getattr(self.program, name).sources]

    def read(self, name: str, source: str, values: Values) -> dict[int, Any]:
        """Those of a table's values that a part reads, by position."""
        return {i: values[i] for found, i in getattr(self.program, name).sources if found == source}

    def call(self, name: str, operands: list[Any], *, keep: Collection[int] | None = None) -> list[Any]:
        """Run a part. The eager backend empties the list: what nobody else holds is freed after its last use.

        With `keep` the results but those at these positions add up, in place, with earlier ones, which follow the
        operands.
        """
        run = self.compiled(name, keep)
        with torch.no_grad():
            return list(run(operands))

    def compiled(self, name: str, keep: Collection[int] | None = None) -> Compiled:
        """What `call` runs, made the first time."""
        key = name, keep is not None
        if key not in self._compiled:
            part = getattr(self.program, name)
            graph = graph_of_rank(part.graph, self._groups, self._indices)
            if name in ("input_part", "weight_part", "early", "late"):
                # In the joint order nothing reads later what an op writes over; in that of the halves something may.
                functional(graph)
            if keep is not None:
                accumulate(graph, keep)
            self.finish_graph(graph, part)
            make_tensors_on(graph, self.device)
            if self._copies is None:
                self._copies = self.host_copies()
            if self._copies is not None and self._backend == "eager":
                copy_beside_kernels(graph, self._copies)
            self._compiled[key] = compile_part(graph, "eager" if part.is_empty else self._backend)
        return self._compiled[key]

    def host_copies(self) -> HostCopies | None:
        """What copies between the device and its host, beside kernels; None: the ops do, one after the other."""
        return HostCopies(CudaStreams(self.device)) if self.device.type == "cuda" else None

    def finish_graph(self, graph: fx.Graph, part: Part) -> None:
        """What a kind of runner still has to do to the graph of a part before it is compiled."""


class TrainRunner(Runner[T], ABC):
    """A program of a training step. Call order per group: `prepare`, micro-batches, `reduce`.

    `ends` are the results of the first part of a micro-batch that the epilogue reads, by position. `sums` are the
    tables that it reads: what the micro-batches add up to, and the buffers that the last one left. `final` are the
    gradients that it leaves as they are, by their places in those tables: whoever sets `made` before the last
    micro-batch is given each of them as soon as it is there. `expert_rows` counts rows where the backend is eager.
    """

    def __init__(
        self, program: T, rank: int, groups: Mapping[str, str], compile: Backend, ends: Mapping[int, fx.Node]
    ) -> None:
        super().__init__(program, rank, groups, compile)
        self.buffers = {i: node.meta["buffer"] for i, node in ends.items() if "buffer" in node.meta}
        self.sums: dict[str, list[Any]] = {}
        self.final = final_gradients(program)
        self.made: Made = unheard
        self.expert_rows = ExpertRows(program.mesh, rank)
        self._arrivals: Arrivals | None = None

    def finish_graph(self, graph: fx.Graph, part: Part) -> None:
        if self._backend != "eager":
            return
        self.expert_rows.watch(graph)
        wait_before_use(graph, part, self.program, self._wait)
        skipped = self.before_gradients(part)
        if skipped is not None:
            hand_over(graph, self.final, self._hand_over, skipped)

    @abstractmethod
    def before_gradients(self, part: Part) -> int | None:
        """How many places of the table of gradients a part does not fill; None if it makes no gradients."""

    def _hand_over(self, place: int, gradient: Tensor) -> None:
        self.made({self.final[place]: gradient})

    def _wait(self, place: int) -> None:
        if self._arrivals is not None:
            self._arrivals.wait(self.program.inputs[place].fqn)

    def prepare(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        arrivals: Arrivals | None = None,
        begun: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start a group: local stored parameters and buffers by FQN (those of other stages too); runs the prologue. If
        `arrivals` are under way, each parameter is waited for where it is first used. Micro-batches add to the
        gradients that are `begun` (those of other stages too), in place: all of the program's, or none.
        """
        self._arrivals, self.made = arrivals, unheard
        self.expert_rows.take()
        if arrivals is not None and self._backend != "eager":
            arrivals.wait_for_all()
        self.move_to((*params.values(), *buffers.values()))
        self.inputs = self.fill({"param": params, "buffer": buffers, "constant": self.constants})
        self.sums = {}
        self.prepared = self.call("prologue", self.gather("prologue", {}))
        if begun:
            self.begin_with(begun)

    @abstractmethod
    def begin_with(self, begun: Mapping[str, Tensor]) -> None:
        """Let `sums` be these gradients, and zeros."""

    def carry(self, results: list[Any], idle: bool) -> None:
        """The next micro-batch starts from the buffers that this one left; an idle one leaves them as they are."""
        for i, fqn in self.buffers.items():
            place = self.place["buffer", fqn]
            if idle:
                results[i] = self.inputs[place]
            else:
                self.inputs[place] = results[i]

    def nothing(self, node: fx.Node) -> Tensor:
        """What a result is without micro-batches: a buffer as it is, or zeros."""
        if "buffer" in node.meta:
            return self.inputs[self.place["buffer", node.meta["buffer"]]]
        local = local_tensor(node)
        return torch.zeros(local.sizes({}), dtype=local.dtype, device=self.device)

    def reduce(self) -> dict[tuple[str, str], Tensor]:
        """End the group: results over all data ranks by kind (loss, grad, buffer) and FQN.

        Raises MicroBatchError if no micro-batch has run.
        """
        if not self.sums:
            raise MicroBatchError("", "no micro-batch has run since prepare()")
        operands = self.gather("epilogue", self.sums)
        self.sums = {}
        results = self.call("epilogue", operands)
        outputs = [out for out in self.program.outputs if out.kind in ("loss", "grad", "buffer")]
        return {(out.kind, out.fqn): value for out, value in zip(outputs, results, strict=True)}


def own_memory(values: list[Any], taken: Iterable[Any], keep: Collection[int] = ()) -> None:
    """Make `values` (but those at `keep`) buffers that can be added to: copy what shares memory with another or with
    the tensors of `taken`, or is a view. A gradient may be a view (of another one, transposed, of a bucket that would
    stay) or an expanded scalar.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in taken if isinstance(tensor, Tensor)}
    for i, value in enumerate(values):
        if i in keep:
            continue
        memory = value.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != value.numel() * value.element_size():
            values[i] = value.clone(memory_format=torch.contiguous_format)
        seen.add(values[i].untyped_storage().data_ptr())


def token_axes(program: Program) -> set[str]:
    """Axes of the `#axis` tokens in a program."""
    return {
        arg[1:]
        for part in program.parts.values()
        for node in part.graph.nodes
        for arg in node.args
        if isinstance(arg, str) and arg.startswith("#")
    }


def compile_part(graph: fx.Graph, backend: Backend) -> Compiled:
    """What runs a graph, which it takes over, on a list of operands."""
    if backend == "eager":
        return compile_boxed(graph)
    functional(graph)  # the compiler wants these ops, and reuses buffers by itself
    # Sizes that come in through batch tensors are dynamic, so new lengths do not compile again. It is `forward` that is
    # compiled, as a call of the module would hide the error of a kernel behind one of the compiler.
    run = compile_whole(compile_graph(graph).forward)
    return lambda operands: run(*operands)
