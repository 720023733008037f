"""The two graphs of fxpar: `LogicalGraph` (one replica, global shapes) and `ExecGraph` (what one rank runs).

Both hold `torch.fx` graphs; what their nodes say of themselves is in node_meta.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import sympy
import torch
from torch import fx, nn

from fxpar.errors import DimNameError
from fxpar.ir.dist_config import DistConfig, size_text
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.serialize import graph_from_data, graph_to_data
from fxpar.ir.strategy import Strategy

aten = torch.ops.aten

Size = int | sympy.Expr
# A batch input that fxpar adds where a model drops out, shaped like the token ids (`fxpar.ops.dropout.token_numbers`).
TOKEN_NUMBERS = "token_numbers"
TOKENS = "T"  # the dim that counts tokens
DOCUMENTS = "document_ids"  # the key of a batch that marks the documents of a row
POSITIONS = "document_positions"  # the key of a batch that counts tokens in each document
IS_TOKEN = "is_token"  # the key of a batch that is 1 at tokens and 0 at padding
COUNT = ":count"  # behind the name of a metric: what it is divided by in the end

InputKind = Literal["param", "buffer", "constant", "batch", "scale", "seed", "tangent", "received", "received_grad"]
OutputKind = Literal["loss", "grad", "buffer", "value", "input_grad", "sent", "sent_grad"]


@dataclass(frozen=True)
class TensorMeta:
    """Shape (sizes may be sympy expressions in the dynamic dims) and dtype of a value."""

    shape: tuple[Size, ...]
    dtype: torch.dtype

    def sizes(self, dims: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        """The shape with the dynamic dims at `dims`."""
        if all(type(size) is int for size in self.shape):
            return self.shape  # type: ignore[return-value]
        return _sizes(self.shape, tuple(dims.items()))

    def numel(self, dims: Mapping[sympy.Symbol, int]) -> int:
        """Number of elements with the dynamic dims at `dims`."""
        return math.prod(self.sizes(dims))

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(size_text, self.shape))}]"


@functools.lru_cache(maxsize=4096)  # sympy takes long, and layers repeat
def _sizes(shape: tuple[Size, ...], dims: tuple[tuple[sympy.Symbol, int], ...]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else int(size.subs(dims)) for size in shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Dim:
    """A dynamic dim: its name (also of the sympy symbol), the size in the example, and what guards allow. Where code of
    the model decided a bound (an `if` about the size), `minimum_at` and `maximum_at` are its "file:line"; `minimum_in`
    and `maximum_in` where a call takes one side (`x[:, :16]`).
    """

    name: str
    example: int
    minimum: int = 1
    maximum: int | None = None
    minimum_at: str | None = field(default=None, compare=False, repr=False)  # not the same on all machines
    maximum_at: str | None = field(default=None, compare=False, repr=False)
    minimum_in: str | None = field(default=None, compare=False, repr=False)
    maximum_in: str | None = field(default=None, compare=False, repr=False)

    @property
    def symbol(self) -> sympy.Symbol:
        return dim_symbol(self.name)


def dim_symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of a dynamic dim."""
    return sympy.Symbol(name, integer=True, positive=True)


class Sized(Protocol):
    """What has dynamic dims, some of which a run pads to a multiple."""

    @property
    def dims(self) -> tuple[Dim, ...]: ...

    @property
    def divisors(self) -> Mapping[str, int]: ...


def run_sizes(graph: Sized, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """The dynamic dims by name as a run has them, padded: those of `sizes`, the others as in the example. All figures
    are for these. Raises DimNameError.
    """
    given = {dim.name: dim.example for dim in graph.dims}
    for name in sizes or {}:
        if name not in given:
            raise DimNameError(name, given)
    return {name: size + -size % graph.divisors.get(name, 1) for name, size in (given | dict(sizes or {})).items()}


def run_dims(graph: Sized, sizes: Mapping[str, int] | None = None) -> dict[sympy.Symbol, int]:
    """`run_sizes` by symbol."""
    found = run_sizes(graph, sizes)
    return {dim.symbol: found[dim.name] for dim in graph.dims}


@dataclass(frozen=True)
class Input:
    """One placeholder. `fqn` is a parameter's or buffer's FQN, a constant's name, a batch key, "scale" or "seed".

    A tangent, the gradient of the loss with respect to a value, has the `fqn` of that value. On a pipeline stage
    "received" is an activation of the stage before, "received_grad" the gradient of one that was sent.
    """

    kind: InputKind
    fqn: str
    meta: TensorMeta
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()  # further FQNs of a tied parameter


@dataclass(frozen=True)
class Output:
    """One result: the loss, the gradient of parameter `fqn`, or the new value of buffer `fqn`.

    A metric is a sum over tokens like the loss, and of its kind: `fqn` is its name, "NAME:count" for what it is divided
    by in the end (`fxpar.tracer.metrics`). The loss itself is called "loss".

    Where the loss is outside of the graph: a value that the model returns ("0", "1", ...), the gradient with respect to
    the batch tensor `fqn` ("input_grad"). On a pipeline stage: an activation for the next stage ("sent"), the gradient
    of one that was received ("sent_grad").
    """

    kind: OutputKind
    fqn: str


@dataclass(frozen=True)
class Packing:
    """What holds of a graph whose rows may be several documents, each of `minimum` to `maximum` tokens.

    `padding_hazard` says why a row must not be padded by a document that has no labels; None if it may.
    `order_hazard` says why tokens must lie in their order; None if the batch alone says where each belongs, but for
    attention.
    """

    padding_hazard: str | None
    minimum: int = 1
    maximum: int | None = None
    order_hazard: str | None = "nobody has looked"


@dataclass(frozen=True)
class Averaged:
    """The mean that a loss function returns, in words. `fewer`: it divides by all tokens but so many of each sequence,
    also by those without a label; None for one by the labels, or of which a user has been told that it is another.
    """

    words: str
    fewer: int | None = None


@dataclass
class LogicalGraph:
    """Forward + loss + backward of one replica with global shapes, as the model treats one sequence.

    With `packing` a row may be several documents (`fxpar.passes.pack_documents`). `averaged`: the user's loss function
    returns that mean, of which the graph has the sum. `own_backward` names code of the model's own that gradients go
    through, so that they are not known to be the derivatives of the forward.

    Placeholders come in the order of `inputs` (params, buffers, batch, scale, seed), results in the order of `outputs`
    (loss, gradients, buffers). The loss is `scale` times a sum over valid tokens. `constants` are tensors that the
    model holds as plain attributes or makes from Python numbers; they travel with the graph.
    """

    gm: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    dims: tuple[Dim, ...]
    name: str = "model"
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    packing: Packing | None = None
    averaged: Averaged | None = None
    own_backward: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A module of fx pickles as its code, without what nodes know of themselves."""
        return {**vars(self), "gm": graph_to_data(self.gm.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gm=fx.GraphModule(nn.Module(), graph_from_data(state["gm"])))

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.gm.graph.find_nodes(op="placeholder"))

    def carried_buffers(self) -> list[str]:
        """FQNs of buffers that the forward writes and the loss depends on: a forward sees what the last one left.

        A batch norm that trains reads its statistics only to write them.
        """
        found = _made_of([n for n, o in zip(self.results, self.outputs, strict=True) if o.kind == "loss"])
        written = {out.fqn for out in self.outputs if out.kind == "buffer"}
        placed = zip(self.placeholders, self.inputs, strict=True)
        return [i.fqn for node, i in placed if i.kind == "buffer" and i.fqn in written and node in found]

    def counted_buffers(self) -> list[str]:
        """FQNs of the other buffers whose new values the forward makes of the old ones, such as a counter; those of
        batch norms, which nobody takes for exact, left out.
        """
        norms = {node.meta.get("fqn") for node in self.gm.graph.nodes if _is_batch_norm(node)}
        carried, old = set(self.carried_buffers()), dict(zip(self.placeholders, self.inputs, strict=True))
        found = []
        for node, out in zip(self.results, self.outputs, strict=True):
            module, _, name = out.fqn.rpartition(".")
            of_norm = module in norms and name in _STATISTICS
            if out.kind == "buffer" and out.fqn not in carried and not of_norm:
                sources = (old[source] for source in _made_of([node]) if source in old)
                found += [out.fqn] * any((info.kind, info.fqn) == ("buffer", out.fqn) for info in sources)
        return found

    @property
    def results(self) -> tuple[fx.Node, ...]:
        (output,) = self.gm.graph.find_nodes(op="output")
        return tuple(output.args[0])

    def params(self) -> Iterator[Input]:
        return (i for i in self.inputs if i.kind == "param")

    def example_dims(self) -> dict[sympy.Symbol, int]:
        return {dim.symbol: dim.example for dim in self.dims}

    @property
    def divisors(self) -> Mapping[str, int]:
        """Of a graph that nothing cuts: none."""
        return {}


_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}  # of a batch norm; a subclass may count more


def _is_batch_norm(node: fx.Node) -> bool:
    """Whether it computes with the statistics of the batch, and only writes those of its buffers."""
    return bool(node.target is aten._native_batch_norm_legit_functional.default and node.args[5])


def _made_of(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and all that their values come from."""
    todo, found = list(nodes), set(nodes)
    while todo:
        node = todo.pop()
        for source in [node.args[0], *node.args[1:3]] if _is_batch_norm(node) else node.all_input_nodes:
            if isinstance(source, fx.Node) and source not in found:
                found.add(source)
                todo.append(source)
    return found


@dataclass(frozen=True)
class ValueRef:
    """A leaf of what a forward returns: the graph's value of this name."""

    fqn: str


@dataclass(frozen=True)
class SizeRef:
    """A leaf of what a forward returns: an integer that depends on the dynamic dims."""

    size: sympy.Expr


@dataclass(frozen=True)
class CallStructure:
    """How a forward is called and what it returns, as flattened by `fxpar.torch_api.tree`.

    `arguments` has the batch key of each leaf of `(args, kwargs)`, None for one that is no tensor. `leaves` are those
    of the returned structure: ValueRef, SizeRef, or a constant. `restarting` names tensors of positions whose zeros
    begin documents; a call must not bring others that jump.
    """

    call: Any
    arguments: tuple[str | None, ...]
    constants: tuple[Any, ...]  # leaves of the call that are no tensors, in order
    returned: Any
    leaves: tuple[Any, ...]
    restarting: tuple[str, ...] = ()


@dataclass
class ForwardGraph(LogicalGraph):
    """Forward of one replica, and the gradients of sum(value * tangent) over the values that have a tangent.

    Tangents come behind the seed; there is no loss and no scale. Without tangents there are no gradients.
    """

    structure: CallStructure = field(kw_only=True)


def bins_of(strategy: Strategy, outputs: Sequence[Output]) -> int:
    """In how many bins of equal length the documents of a row come: as the strategy says, but where a user calls the
    model, as values must come out as they went in.
    """
    return 1 if any(out.kind == "value" for out in outputs) else strategy.bins


@dataclass
class AnnotatedGraph:
    """A replica's graph on its way to an `ExecGraph`: every value has a `DistConfig` for one strategy.

    The passes of the lowering change `graph` in place. `divisors[dim]` is what a dynamic dim must divide by (the
    runtime pads to it); `notes` say what the compiler decided that a user may not expect. `deferred` has the partial
    placement of gradients that leave the graph unreduced, `passes` the names of those that have run.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    dims: tuple[Dim, ...]
    strategy: Strategy
    name: str = "model"
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    divisors: dict[str, int] = field(default_factory=dict)
    padding_hazard: str | None = None
    notes: list[str] = field(default_factory=list)
    deferred: dict[str, DistConfig] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> tuple[fx.Node, ...]:
        (output,) = self.graph.find_nodes(op="output")
        return tuple(output.args[0])

    @property
    def bins(self) -> int:
        """In how many bins the documents of a row come."""
        return bins_of(self.strategy, self.outputs)

    @property
    def is_local(self) -> bool:
        """Whether the shapes are those of a rank's own pieces: `global_to_local` has run."""
        return any("local" in node.meta for node in self.placeholders)
