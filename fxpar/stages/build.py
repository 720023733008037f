"""The graph of one stage, copied out of the graph of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import NotAChainError
from fxpar.ir.copies import copy_node
from fxpar.ir.graph import Input, Output, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_size, size_of, source_of, tensor_of, whole_meta
from fxpar.stages.nodes import Nodes
from fxpar.stages.staged import Crossing, StageGraph
from fxpar.torch_api.modules import lazy_module

aten = torch.ops.aten
Result = tuple[Output, tuple[fx.Node, ...]]  # a result, and the values whose sum it is

# Order of a stage's placeholders.
_ORDER = ("param", "buffer", "constant", "batch", "received", "scale", "seed", "received_grad")


@dataclass
class Boundaries:
    """Which values cross each boundary: `forward[k]` from stage k - 1 to stage k, `backward[k]` from k to k - 1."""

    forward: list[list[fx.Node]]
    backward: list[list[fx.Node]]


def crossings(
    nodes: Nodes, stage_of: Mapping[fx.Node, int], results: Mapping[int, list[Result]], stages: int
) -> Boundaries:
    """All values that a stage reads (or gives as a result) of another one, passed along over the stages in between.

    Raises NotAChainError for a value that would have to go the other way.
    """
    forward: list[list[fx.Node]] = [[] for _ in range(stages + 1)]
    backward: list[list[fx.Node]] = [[] for _ in range(stages + 1)]
    given: dict[fx.Node, list[int]] = defaultdict(list)
    for stage, found in results.items():
        for _, values in found:
            for value in values:
                given[value].append(stage)
    for value, made in stage_of.items():
        read = [stage_of[user] for user in value.users if user in stage_of]
        read += given[value]
        is_forward = value in nodes.forward
        wrong = [stage for stage in read if (stage < made if is_forward else stage > made)]
        if wrong:
            raise NotAChainError(
                nodes.logical.name,
                f"%{value.name} {value.meta['tensor']} (in {value.meta.get('fqn') or 'the root'}) is made on stage "
                f"{made} and read on stage {wrong[0]}",
                "Cut elsewhere, or use dp, cp or tp instead of pp",
            )
        for boundary in range(made + 1, max(read, default=made) + 1):
            forward[boundary].append(value)
        for boundary in range(min(read, default=made) + 1, made + 1):
            backward[boundary].append(value)
    return Boundaries(forward, backward)


@dataclass
class StageBuilder:
    """Copies one stage. `results` are the model's results that are made here, `homes` says which stage each node
    that is not free belongs to, `unread` are parameters that this stage keeps although nothing reads them.
    """

    nodes: Nodes
    homes: Mapping[fx.Node, int]
    boundaries: Boundaries
    index: int
    results: list[Result]
    unread: frozenset[str] = frozenset()
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)
    graph: fx.Graph = field(default_factory=fx.Graph)

    def build(self) -> StageGraph:
        """The stage as a graph of its own."""
        k, logical = self.index, self.nodes.logical
        received, sent = self.boundaries.forward[k], self.boundaries.forward[k + 1]
        tangents, gradients = self.boundaries.backward[k + 1], self.boundaries.backward[k]
        members = self._members([*sent, *gradients, *(n for _, values in self.results for n in values)])
        inputs = self._inputs(members, received, tangents)
        arrived = {*received, *tangents}
        for node in members:
            if node not in arrived and not is_size(node):
                self._copy(node)
        results: list[Result] = [r for r in self.results if r[0].kind == "loss"]
        results += [(Output("sent", n.name), (n,)) for n in sent]
        results += [r for r in self.results if r[0].kind == "grad"]
        results += [(Output("sent_grad", n.name), (n,)) for n in gradients]
        results += [r for r in self.results if r[0].kind == "buffer"]
        self.graph.output(tuple(self._sum(values) for _, values in results))
        self.graph.lint()
        return StageGraph(
            lazy_module(torch.nn.Module(), self.graph),
            inputs,
            tuple(out for out, _ in results),
            logical.dims,
            f"{logical.name}.stage{k}",
            {i.fqn: logical.constants[i.fqn] for i in inputs if i.kind == "constant"},
            index=k,
            received=_named(received),
            sent=_named(sent),
            gradients_received=_named(tangents),
        )

    def _members(self, results: Iterable[fx.Node]) -> list[fx.Node]:
        """What runs here: the stage's own nodes and the free ones that they need, in order."""
        arrived = {*self.boundaries.forward[self.index], *self.boundaries.backward[self.index + 1]}
        todo = [n for n, home in self.homes.items() if home == self.index]
        todo += [n for n in results if n not in arrived]
        found = set(todo)
        while todo:
            for operand in todo.pop().all_input_nodes:
                if operand.op == "call_function" and operand not in found and operand not in arrived:
                    found.add(operand)
                    todo.append(operand)
        strangers = [n for n in found if self.homes.get(n, self.index) != self.index]
        assert not strangers, strangers
        return sorted(found & self.nodes.position.keys(), key=self.nodes.position.__getitem__)

    def _inputs(self, members: list[fx.Node], received: list[fx.Node], tangents: list[fx.Node]) -> tuple[Input, ...]:
        """Make the placeholders; those of sizes are read from what is there."""
        read = {o for n in members if not is_size(n) for o in n.all_input_nodes if o.op == "placeholder"}
        read |= {n for _, values in self.results for n in values if n.op == "placeholder"}
        given = {out.fqn for out, _ in self.results if out.kind == "grad"} | self.unread
        read |= {n for n, i in self.nodes.inputs.items() if i.kind == "param" and i.fqn in given}
        sizes = [n for n in members if n.target is aten.sym_size.int]
        for size in sizes:
            if size.args[0] not in read and _place_of(size_of(size), received) is None:
                read.add(size.args[0])  # type: ignore[arg-type]
        found: list[tuple[Input, fx.Node]] = [(i, n) for n, i in self.nodes.inputs.items() if n in read]
        for kind, values in (("received", received), ("received_grad", tangents)):
            for value in values:
                meta = tensor_of(value)
                wanted = kind == "received" and meta.dtype.is_floating_point
                found.append((Input(kind, value.name, meta, requires_grad=wanted), value))  # type: ignore[arg-type]
        found.sort(key=lambda pair: _ORDER.index(pair[0].kind))
        for info, node in found:
            new = self.graph.placeholder(node.name)
            new.meta.update(tensor=info.meta, fqn=fqn_of(node), source=source_of(node), backward=False)
            self.copied[node] = new
        for node in (n for n in members if is_size(n)):
            self._copy_size(node, received)
        return tuple(info for info, _ in found)

    def _copy_size(self, node: fx.Node, arrived: list[fx.Node]) -> None:
        if node.target is aten.sym_size.int and node.args[0] not in self.copied:
            place = _place_of(size_of(node), arrived)
            assert place is not None
            new = self.graph.create_node(
                "call_function", node.target, (self.copied[place[0]], place[1]), name=node.name
            )
            new.meta = dict(node.meta)
            self.copied[node] = new
        else:
            self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        self.copied[node] = copy_node(self.graph, node, self.copied.__getitem__)

    def _sum(self, values: tuple[fx.Node, ...]) -> fx.Node:
        def add(left: fx.Node, right: fx.Node) -> fx.Node:
            total = self.graph.call_function(aten.add.Tensor, (left, right))
            total.meta = dict(right.meta)
            return total

        return reduce(add, [self.copied[v] for v in values])


def _place_of(size: Any, values: list[fx.Node]) -> tuple[fx.Node, int] | None:
    """A value and its dim that has just this size."""
    for value in values:
        shape: tuple[Any, ...] = tensor_of(value).shape
        if isinstance(size, sympy.Symbol) and size in shape:
            return value, shape.index(size)
    return None


def _named(values: list[fx.Node]) -> tuple[Crossing, ...]:
    for value in values:
        assert isinstance(whole_meta(value), TensorMeta), value  # results of one op are not taken apart
    return tuple(Crossing(value.name, tensor_of(value)) for value in values)
