"""The placement problem of one mesh axis: op classes, their legal options, and who feeds whom.

Nodes that do the same thing in repeated layers form one *class* (same module FQN up to layer numbers, same position in
that module, same op and sizes). A class is solved once, so a model of 80 layers costs as much as one of 2.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
from torch import fx

from fxpar.ir.dist_config import OuterShard, Placement, Shard
from fxpar.ir.fqn import starred
from fxpar.ir.graph import Size
from fxpar.ir.node_meta import fqn_of, input_kind, is_backward, tensor_metas
from fxpar.rules.option import Cut, Option, OpView, Seed, divides
from fxpar.rules.table import options
from fxpar.rules.view import Sizes, is_op, made_shapes, make_view

# What another pipeline stage sends; it comes as `fxpar.annotate.policy.boundary_placement` says.
RECEIVED = ("received", "received_grad")


@dataclass
class OpClass:
    """Nodes that share one decision. `operands` lists, per tensor operand, the classes' results that feed it."""

    index: int
    view: OpView
    token: tuple[tuple[bool | None, ...], ...]  # per result and dim: token dim, static dim, or neither (None)
    nodes: list[fx.Node] = field(default_factory=list)
    operands: list[set[tuple[int, int]]] = field(default_factory=list)
    users: set[tuple[int, int]] = field(default_factory=set)  # (class, operand position) fed by any result
    options: list[Option] = field(default_factory=list)
    candidates: list[set[Cut]] = field(default_factory=list)  # per result
    weighted: bool = False  # computed from parameters (a rotary table is not)


class AxisPolicy(Protocol):
    """What one mesh axis is for."""

    def of(self, entry: OpClass) -> AxisPolicy:
        """What it is for in the module that a class belongs to."""
        ...

    def seeds(self, entry: OpClass, result: int) -> list[int]:
        """Dims of a result that the axis wants to cut for its own sake."""
        ...

    def sources(self, entry: OpClass) -> list[Option]:
        """Options of a placeholder."""
        ...

    def narrow(self, problem: AxisProblem) -> dict[int, int]:
        """See `AxisProblem`."""
        ...

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        """Options that no cut of an operand or result asks for."""
        ...

    def refusal(self, problem: AxisProblem, entry: OpClass, option: Option) -> str:
        """Why the axis may not use an option; "" if it may."""
        ...


@dataclass
class AxisProblem:
    """All classes of a graph for one mesh axis of `degree`.

    `narrow` are classes that cannot be cut in as many pieces, for lack of heads; to each the number of its heads.
    """

    degree: int
    sizes: Sizes
    classes: list[OpClass]
    class_of: dict[fx.Node, int]
    narrow: dict[int, int] = field(default_factory=dict)


def build(
    graph: fx.Graph,
    sizes: Sizes,
    degree: int,
    others: Sequence[tuple[Mapping[fx.Node, Option], int]],
    policy: AxisPolicy,
    token: sympy.Symbol | None,
) -> AxisProblem:
    """Group the graph's nodes into classes and enumerate each class's legal options on one axis.

    `others` are the options already chosen for other axes, with their degrees: sizes are local to them. `token` is the
    symbol of the token dim.
    """
    problem = AxisProblem(degree, sizes, [], {})
    keys: dict[Any, int] = {}
    counts: dict[tuple[str, bool], int] = defaultdict(int)
    for node in graph.nodes:
        if node.op == "placeholder":
            view, operands = OpView("input", (), (), (), made_shapes(node, sizes, others)), []
            key: Any = (node.meta.get("class", node.name), view)
        elif is_op(node):
            view, operands = make_view(node, sizes, others)
            place = (fqn_of(node), is_backward(node))
            key = (starred(place[0]), place[1], counts[place], view, node.meta.get("variant", ()))
            counts[place] += 1
        else:
            continue
        index = keys.get(key)
        if index is None:
            index = keys[key] = len(problem.classes)
            kinds = tuple(tuple(_kind(s, token) for s in m.shape) if m else () for m in tensor_metas(node))
            problem.classes.append(OpClass(index, view, kinds, operands=[set() for _ in operands]))
        entry = problem.classes[index]
        entry.nodes.append(node)
        entry.weighted |= input_kind(node) == "param"
        problem.class_of[node] = index
        for position, (source, result) in enumerate(operands):
            producer = problem.class_of[source]
            entry.operands[position].add((producer, result))
            entry.weighted |= problem.classes[producer].weighted
            problem.classes[producer].users.add((index, position))
    problem.narrow = policy.narrow(problem)
    _enumerate(problem, policy)
    return problem


def _kind(size: Size, token: sympy.Symbol | None) -> bool | None:
    if isinstance(size, int):
        return False
    return True if token in size.free_symbols else None


def _enumerate(problem: AxisProblem, policy: AxisPolicy) -> None:
    """Fill in options until no class learns of a new placement of its operands or results.

    Placements start where the axis has a reason to cut (`policy.seeds`: weights, tokens) or where `policy.extra`
    knows a way to run an op, and spread from there through the rules, to users and to operands.
    """
    for entry in problem.classes:
        entry.candidates = [
            {
                Shard(d)
                for d in policy.seeds(entry, result)
                if shape[d] > 1 and divides(shape[d], problem.degree, (), True)
            }
            for result, shape in enumerate(entry.view.outputs)
        ]
    queue = deque(range(len(problem.classes)))
    queued = set(queue)
    while queue:
        index = queue.popleft()
        queued.discard(index)
        entry = problem.classes[index]
        if entry.view.target == "input":
            continue
        seeds: list[tuple[Seed, Cut]] = []
        for position, producers in enumerate(entry.operands):
            shards = {s for producer, result in producers for s in problem.classes[producer].candidates[result]}
            seeds += [((False, position), s) for s in sorted(shards, key=str)]
        for result, shards in enumerate(entry.candidates):
            seeds += [((True, result), s) for s in sorted(shards, key=str)]
        found = options(entry.view, problem.degree, seeds)
        found += [o for o in policy.extra(problem, entry) if o not in found]
        entry.options = [o for o in found if not policy.refusal(problem, entry, o)]
        changed = set()
        for option in entry.options:
            for result, placement in enumerate(option.outputs):
                if _learn(entry, result, placement):
                    changed |= {index} | {user for user, _ in entry.users}
            for position, placement in enumerate(option.inputs):
                for producer, result in entry.operands[position]:
                    source = problem.classes[producer]
                    if _learn(source, result, placement):
                        changed |= {producer} | {user for user, _ in source.users}
        for other in changed - queued:
            queue.append(other)
            queued.add(other)
    for entry in problem.classes:
        if entry.view.target == "input":
            entry.options = policy.sources(entry)


def _learn(entry: OpClass, result: int, placement: Placement) -> bool:
    """Note a cut that somebody could use."""
    if not isinstance(placement, Shard | OuterShard):
        return False
    known = entry.candidates[result]
    if placement in known:
        return False
    known.add(placement)
    return True


__all__ = ["AxisProblem", "OpClass", "build"]
