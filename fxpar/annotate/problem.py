"""The placement problem of one mesh axis: op classes, their legal options, and who feeds whom.

Nodes that do the same thing in repeated layers form one *class* (same module FQN up to layer numbers, same position in
that module, same op and sizes). A class is solved once, so a model of 80 layers costs as much as one of 2.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy
from torch import fx
from torch.fx.node import map_arg

from fxpar.dist_config import Placement, R, Shard, chunk
from fxpar.graph import Size, TensorMeta
from fxpar.rules.option import Option, OpView, Seed, TensorRef, divides
from fxpar.rules.table import options

Value = tuple[fx.Node, int]  # result `int` of a node
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def normalize_fqn(fqn: str) -> str:
    """`model.layers.7.mlp` -> `model.layers.*.mlp`."""
    return _NUMBER.sub(".*", fqn)


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
    candidates: list[set[Shard]] = field(default_factory=list)  # per result
    weighted: bool = False  # computed from parameters (a rotary table is not)


class Sizes:
    """Sizes as integers, for matching shapes ("probe") and for counting bytes ("nominal").

    A dynamic dim is probed at a prime times the product of the degrees: it divides by every degree, as the runtime will
    see to by padding, and no other size is mistaken for it.
    """

    _PRIMES = (1009, 1013, 1019, 1021, 1031, 1033)
    NOMINAL = 2048  # tokens; placements must not depend on the example's length

    def __init__(self, symbols: list[sympy.Symbol], degree_product: int, token: sympy.Symbol | None = None) -> None:
        self._probe = {s: p * degree_product for s, p in zip(symbols, self._PRIMES, strict=False)}
        self._nominal = {s: self.NOMINAL if s == token or len(symbols) == 1 else 1 for s in symbols}
        self._cache: dict[Any, int] = {}
        self._shapes: dict[tuple, tuple[int, ...]] = {}
        self._bytes: dict[TensorMeta, int] = {}

    def probe(self, size: Size) -> int:
        """Integer that stands for a size (or for any integer expression of the dynamic dims)."""
        if isinstance(size, int):
            return size
        if size not in self._cache:
            self._cache[size] = int(size.subs(self._probe))  # type: ignore[arg-type]
        return self._cache[size]

    def shape(self, meta: TensorMeta) -> tuple[int, ...]:
        found = self._shapes.get(meta.shape)
        if found is None:
            found = self._shapes[meta.shape] = tuple(self.probe(s) for s in meta.shape)
        return found

    def nbytes(self, meta: TensorMeta) -> int:
        """Bytes of the whole tensor with nominal dynamic dims, every float counted as two bytes.

        Were real widths counted, an fp32 norm between bf16 layers would decide where sums are taken, and the
        placements of a model would depend on the dtype it is captured in.
        """
        found = self._bytes.get(meta)
        if found is None:
            width = 2 if meta.dtype.is_floating_point else meta.dtype.itemsize
            found = self._bytes[meta] = meta.numel(self._nominal) * width
        return found


def tensor_metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    """The node's results as a tuple."""
    meta = node.meta.get("tensor")
    if meta is None:
        return ()
    return meta if isinstance(meta, tuple) else (meta,)


def resolve(node: fx.Node) -> Value:
    """The (op node, result) behind a value; looks through getitem."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        return source, index  # type: ignore[return-value]
    return node, 0


def is_op(node: fx.Node) -> bool:
    """A call that makes tensors (no getitem, no integer arithmetic)."""
    return node.op == "call_function" and node.target is not operator.getitem and bool(tensor_metas(node))


def make_view(
    node: fx.Node, sizes: Sizes, inner: Mapping[fx.Node, Option] | None, degree: int
) -> tuple[OpView, list[Value]]:
    """`OpView` of a node, with sizes already cut by the options in `inner` (those of another axis, of `degree`)."""
    operands: list[Value] = []
    shapes: list[tuple[int, ...]] = []
    option = inner.get(node) if inner else None

    def convert(arg: fx.Node) -> Any:
        if "sym" in arg.meta:
            return sizes.probe(arg.meta["sym"])
        value = resolve(arg)
        shape = sizes.shape(tensor_metas(value[0])[value[1]])  # type: ignore[arg-type]
        position = len(operands)
        operands.append(value)
        shapes.append(localize(shape, option.inputs[position] if option else R, degree))
        return TensorRef(position)

    args = tuple(_freeze(map_arg(list(node.args), convert)))
    kwargs = tuple((k, _freeze(map_arg(v, convert))) for k, v in node.kwargs.items())
    outputs = tuple(
        localize(sizes.shape(m), option.outputs[j] if option else R, degree) if m is not None else ()
        for j, m in enumerate(tensor_metas(node))
    )
    return OpView(node.target, args, kwargs, tuple(shapes), outputs), operands


def localize(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """Local shape of a tensor on one axis."""
    if not isinstance(placement, Shard):
        return shape
    local = chunk(shape[placement.dim], degree, placement.sections)
    assert local is not None
    return (*shape[: placement.dim], local, *shape[placement.dim + 1 :])


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value


class AxisPolicy(Protocol):
    """What one mesh axis is for."""

    def seeds(self, entry: OpClass, result: int) -> list[int]:
        """Dims of a result that the axis wants to cut for its own sake."""
        ...

    def sources(self, entry: OpClass) -> list[Option]:
        """Options of a placeholder."""
        ...

    def extra(self, op: OpView) -> list[Option]:
        """Options that no cut of an operand or result asks for."""
        ...

    def refusal(self, problem: AxisProblem, entry: OpClass, option: Option) -> str:
        """Why the axis may not use an option; "" if it may."""
        ...


@dataclass
class AxisProblem:
    """All classes of a graph for one mesh axis of `degree`."""

    degree: int
    sizes: Sizes
    classes: list[OpClass]
    class_of: dict[fx.Node, int]


def build(
    graph: fx.Graph,
    sizes: Sizes,
    degree: int,
    inner: Mapping[fx.Node, Option] | None,
    inner_degree: int,
    policy: AxisPolicy,
    token: sympy.Symbol | None,
) -> AxisProblem:
    """Group the graph's nodes into classes and enumerate each class's legal options on one axis.

    `inner` are the options already chosen for another axis, of degree `inner_degree`: sizes are local to it. `token`
    is the symbol of the token dim.
    """
    problem = AxisProblem(degree, sizes, [], {})
    keys: dict[Any, int] = {}
    counts: dict[tuple[str, bool], int] = defaultdict(int)
    for node in graph.nodes:
        if node.op == "placeholder":
            meta = node.meta["tensor"]
            view, operands = OpView("input", (), (), (), (sizes.shape(meta),)), []
            key: Any = (node.meta.get("class", node.name), view)
        elif is_op(node):
            view, operands = make_view(node, sizes, inner, inner_degree)
            place = (node.meta.get("fqn", ""), bool(node.meta.get("backward")))
            key = (normalize_fqn(place[0]), place[1], counts[place], view, node.meta.get("variant", ()))
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
        entry.weighted |= node.meta.get("kind") == "param"
        problem.class_of[node] = index
        for position, (source, result) in enumerate(operands):
            producer = problem.class_of[source]
            entry.operands[position].add((producer, result))
            entry.weighted |= problem.classes[producer].weighted
            problem.classes[producer].users.add((index, position))
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
        seeds: list[tuple[Seed, Shard]] = []
        for position, producers in enumerate(entry.operands):
            shards = {s for producer, result in producers for s in problem.classes[producer].candidates[result]}
            seeds += [((False, position), s) for s in sorted(shards, key=str)]
        for result, shards in enumerate(entry.candidates):
            seeds += [((True, result), s) for s in sorted(shards, key=str)]
        found = options(entry.view, problem.degree, seeds)
        found += [o for o in policy.extra(entry.view) if o not in found]
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
    """Note a shard that somebody could use."""
    if not isinstance(placement, Shard):
        return False
    known = entry.candidates[result]
    if placement in known:
        return False
    known.add(placement)
    return True


__all__ = [
    "AxisProblem",
    "OpClass",
    "Sizes",
    "Value",
    "build",
    "is_op",
    "localize",
    "make_view",
    "normalize_fqn",
    "resolve",
    "tensor_metas",
]
