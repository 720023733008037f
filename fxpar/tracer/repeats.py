"""The backward of blocks that repeat is traced for the last of them, and copied for those before.

All of the forward is traced, so whatever code a block runs is seen. Its backward is made by autograd alone, from the
calls of the forward that it has recorded: where these are the same, call for call, so is the backward. A block that is
copied is one whose gradients pass through a single tensor in front and a single one behind, which has the same forward
and the same records as two blocks whose backwards were both traced, and came out the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.torch_api.backward import Links, as_result, links_behind, made_by
from fxpar.torch_api.tracing import node_of

FEWEST = 4
"""Of so many blocks with the same forward two are copied: fewer are not worth a look."""

Nodes = dict[fx.Node, fx.Node]


@dataclass(frozen=True)
class Border:
    """A tensor through which all gradients pass between what is before it and what is behind it."""

    value: Tensor
    node: fx.Node
    number: int
    result: int


@dataclass(frozen=True)
class Likeness:
    """One block as a copy of another: what stands for each node, and for each module's name."""

    nodes: Nodes
    names: dict[Any, Any]


@dataclass(frozen=True)
class Records:
    """What autograd has recorded of a block: the same calls have other gradients where some run under `no_grad`.

    Numbers are counted from the block's first. `newest`: at each call of the forward, that of the newest record; None
    for a call that a backward inside the forward has made.
    """

    newest: list[int | None]
    names: dict[int, str]
    operands: set[tuple[int, int, int, int]]
    leaves: dict[tuple[int, int], fx.Node]


@dataclass
class Block:
    """The calls between two borders, their parameters, and the backward once it is traced."""

    start: Border
    end: Border
    forward: list[fx.Node]
    records: Records
    wanted: dict[fx.Node, Tensor]
    given: fx.Node | None = None  # the gradient of its end
    backward: list[fx.Node] = field(default_factory=list)
    results: dict[fx.Node, Tensor | None] = field(default_factory=dict)  # gradients, by what they are of


def gradients(
    loss: Tensor, wanted: Sequence[Tensor], ends: Sequence[Tensor], newest: Mapping[fx.Node, int]
) -> list[Tensor | None]:
    """`torch.autograd.grad(loss, wanted, allow_unused=True)` inside a trace. `ends`: results of blocks that may repeat,
    in any order. `newest`: of each call of the forward, the number of autograd's newest record.
    """
    plan = _Plan.of(loss, wanted, ends, newest)
    if plan is None:
        return list(torch.autograd.grad(loss, wanted, allow_unused=True))
    return plan.run()


@dataclass
class _Plan:
    """The backward cut at borders. `kinds` says of each block between two of them which others have its forward."""

    loss: Tensor
    wanted: Sequence[Tensor]
    blocks: list[Block]
    kinds: list[int]
    before: dict[fx.Node, Tensor]  # parameters in front of the first border
    behind: dict[fx.Node, Tensor]  # and behind the last
    found: dict[fx.Node, Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(
        loss: Tensor, wanted: Sequence[Tensor], ends: Sequence[Tensor], newest: Mapping[fx.Node, int]
    ) -> _Plan | None:
        """None where too few blocks repeat."""
        if len(ends) < FEWEST or loss.grad_fn is None:
            return None
        links = links_behind(loss)
        borders = _borders(links, ends)
        if len(borders) <= FEWEST:
            return None
        numbers = [border.number for border in borders]
        parts: list[dict[fx.Node, Tensor]] = [{} for _ in range(len(borders) + 1)]
        asked = {id(value) for value in wanted}
        for number, _, leaf in links.leaves:
            if id(leaf) in asked:
                node = node_of(leaf)
                assert node is not None
                parts[bisect_left(numbers, number)][node] = leaf
        nodes = list(borders[0].node.graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        places = [place[border.node] for border in borders]
        if places != sorted(set(places)):
            return None
        blocks = []
        for i in range(1, len(borders)):
            forward = [n for n in nodes[places[i - 1] + 1 : places[i] + 1] if not _is_size(n)]
            records = _records(links, borders[i - 1].number, borders[i].number, [newest.get(n) for n in forward])
            blocks.append(Block(borders[i - 1], borders[i], forward, records, parts[i]))
        kinds = _kinds(blocks)
        if max(map(kinds.count, kinds)) < FEWEST:
            return None
        return _Plan(loss, wanted, blocks, kinds, parts[0], parts[-1])

    def run(self) -> list[Tensor | None]:
        first, last = self.blocks[0].start, self.blocks[-1].end
        gradient = self._part([self.loss], None, last, self.behind)
        traced: dict[int, list[Block]] = {}
        proved: dict[int, Block] = {}
        for block, kind in zip(reversed(self.blocks), reversed(self.kinds), strict=True):
            pattern = proved.get(kind)
            if pattern is not None and _like(gradient, pattern.given):
                gradient = self._copied(block, pattern, gradient)
                continue
            gradient = self._traced(block, gradient)
            known = traced.setdefault(kind, [])
            if known and _is_copy(block, known[-1]):
                proved[kind] = block
            known.append(block)
        self._part([first.value], gradient, None, self.before)
        nodes = [node_of(value) for value in self.wanted]
        return [None if node is None else self.found.get(node) for node in nodes]

    def _part(
        self, results: list[Tensor], gradient: Tensor | None, start: Border | None, wanted: Mapping[fx.Node, Tensor]
    ) -> Tensor:
        """Trace the backward from `results` to parameters and to the border in front; returns the border's gradient."""
        inputs = [*([start.value] if start else []), *wanted.values()]
        if not inputs:
            return results[0]
        given = None if gradient is None else [gradient]
        made = list(torch.autograd.grad(results, inputs, given, allow_unused=True))
        before = made.pop(0) if start else results[0]
        self.found.update(zip(wanted, made, strict=True))
        return before

    def _traced(self, block: Block, gradient: Tensor) -> Tensor:
        nodes = block.end.node.graph.nodes
        known = len(nodes)
        before = self._part([block.end.value], gradient, block.start, block.wanted)
        block.given = node_of(gradient)
        block.backward = [n for n in list(nodes)[known:] if not _is_size(n)]
        block.results = {block.start.node: before, **{node: self.found[node] for node in block.wanted}}
        return before

    def _copied(self, block: Block, pattern: Block, gradient: Tensor) -> Tensor:
        likeness = _likeness(pattern, block)
        given = node_of(gradient)
        assert likeness is not None  # they are of one kind
        assert pattern.given is not None
        assert given is not None
        nodes = {**likeness.nodes, pattern.given: given}
        for node in pattern.backward:
            new = given.graph.node_copy(node, lambda n: nodes.get(n, n))
            new.meta["fqn"] = likeness.names.get(node.meta.get("fqn"), node.meta.get("fqn"))
            nodes[node] = new
        made: dict[fx.Node, Tensor | None] = {}
        for of, value in pattern.results.items():
            node = None if value is None else node_of(value)
            made[likeness.nodes[of]] = None if value is None or node is None else as_result(nodes[node], value)
        before = made.pop(block.start.node)
        assert before is not None
        self.found.update(made)
        return before


def _records(links: Links, start: int, end: int, newest: Sequence[int | None]) -> Records:
    leaves = {(n - start, place): node_of(leaf) for n, place, leaf in links.leaves if start < n <= end}
    return Records(
        [None if n is None else n - start for n in newest],
        {n - start: name for n, name in links.names.items() if start < n <= end},
        {(n - start, place, made - start, result) for n, place, made, result in links.calls if start < n <= end},
        {where: node for where, node in leaves.items() if node is not None},
    )


def _borders(links: Links, ends: Sequence[Tensor]) -> list[Border]:
    """Those of `ends` that are borders, in the order in which they were made."""
    borders: dict[int, Border] = {}
    for value in ends:
        made, node = made_by(value), node_of(value)
        if made is not None and node is not None and value.requires_grad:
            borders[made[0]] = Border(value, node, *made)
    numbers = sorted(borders)
    reached = {operand for _, _, operand, _ in links.calls}
    crossed = {number for number in numbers if number not in reached}
    for call, _, operand, result in links.calls:
        for number in numbers[bisect_left(numbers, operand) : bisect_left(numbers, call)]:
            if number != operand or borders[number].result != result:
                crossed.add(number)
    users: dict[int, list[int]] = {}
    for call, _, leaf in links.leaves:
        users.setdefault(id(leaf), []).append(call)
    for calls in users.values():
        crossed.update(numbers[bisect_left(numbers, min(calls)) : bisect_left(numbers, max(calls))])
    return [borders[number] for number in numbers if number not in crossed]


def _kinds(blocks: Sequence[Block]) -> list[int]:
    """Of each block, the last one with the same forward."""
    kinds: list[int] = []
    patterns: list[int] = []
    for i in reversed(range(len(blocks))):
        kind = next((p for p in patterns if _likeness(blocks[p], blocks[i]) is not None), None)
        if kind is None:
            patterns.append(i)
        kinds.append(i if kind is None else kind)
    return kinds[::-1]


def _likeness(pattern: Block, block: Block) -> Likeness | None:
    """`block` as a copy of `pattern`, if its forward makes the same calls."""
    if pattern is block:
        return None
    comparison = _Comparison({pattern.start.node: block.start.node}, {})
    if not comparison.same_calls(pattern.forward, block.forward):
        return None
    nodes = comparison.nodes
    if nodes.get(pattern.end.node) is not block.end.node or {nodes.get(p) for p in pattern.wanted} != {*block.wanted}:
        return None
    mine, theirs = pattern.records, block.records
    if None in mine.newest or (mine.newest, mine.names, mine.operands) != (
        theirs.newest,
        theirs.names,
        theirs.operands,
    ):
        return None
    if {where: nodes.get(leaf) for where, leaf in mine.leaves.items()} != theirs.leaves:
        return None
    return Likeness(nodes, comparison.names)


def _is_copy(block: Block, pattern: Block) -> bool:
    """Whether the backward of `block`, which was traced too, is what a copy of that of `pattern` would be."""
    likeness = _likeness(pattern, block)
    assert likeness is not None
    assert pattern.given is not None
    assert block.given is not None
    comparison = _Comparison({**likeness.nodes, pattern.given: block.given}, likeness.names)
    if not comparison.same_calls(pattern.backward, block.backward):
        return False
    mine = {*block.backward}
    for of, value in pattern.results.items():
        other = block.results[likeness.nodes[of]]
        if value is None or other is None:
            if value is not other:
                return False
            continue
        node, made = node_of(value), node_of(other)
        if node is None or made not in mine or comparison.nodes.get(node) is not made:
            return False
    return True


class _Comparison:
    """Of calls in one place with those in another. `nodes` and `names` (of modules) are pairs that are known; what the
    calls add is added to them.
    """

    def __init__(self, nodes: Nodes, names: dict[Any, Any]) -> None:
        self.nodes, self.names = dict(nodes), dict(names)
        self._taken = set(self.nodes.values())

    def same_calls(self, ones: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
        return len(ones) == len(others) and all(map(self._same_call, ones, others))

    def _same_call(self, one: fx.Node, other: fx.Node) -> bool:
        if one.op != "call_function" or other.op != one.op or one.target is not other.target:
            return False
        if not (self._same(one.args, other.args) and self._same(one.kwargs, other.kwargs)):
            return False
        mine, theirs = one.meta, other.meta
        if mine.get("source") != theirs.get("source") or mine.get("backward") != theirs.get("backward"):
            return False
        name = theirs.get("fqn")
        if self.names.setdefault(mine.get("fqn"), name) != name or not _same_value(mine, theirs):
            return False
        self._pair(one, other)
        return True

    def _pair(self, one: fx.Node, other: fx.Node) -> bool:
        self.nodes[one] = other
        self._taken.add(other)
        return True

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node):
            return isinstance(other, fx.Node) and self._same_operand(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, Mapping):
            return one.keys() == other.keys() and all(self._same(one[key], other[key]) for key in one)
        return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)  # 0.0 and -0.0

    def _same_operand(self, one: fx.Node, other: fx.Node) -> bool:
        if _is_size(one):
            return _is_size(other) and _size(one) == _size(other)
        if one in self.nodes:
            return self.nodes[one] is other
        if other in self._taken:
            return False
        if one is not other:
            kinds = {node.meta["kind"] if node.op == "placeholder" else "" for node in (one, other)}
            if kinds not in ({"param"}, {"buffer"}) or not _same_value(one.meta, other.meta):
                return False
        return self._pair(one, other)


def _is_size(node: fx.Node) -> bool:
    """Whether it computes a size, which what is made of a trace computes anew."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _size(node: fx.Node) -> Any:
    return _expression(node.meta["val"])


def _expression(size: Any) -> Any:
    """Of a size, for a comparison that adds no guard."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _like(gradient: Tensor, given: fx.Node | None) -> bool:
    """Whether it lies in memory as the one that `given` makes: autograd asks for that."""
    node = node_of(gradient)
    return node is not None and given is not None and _same_value(node.meta, given.meta)


def _same_value(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether results have the same shapes, strides and dtypes."""
    return _form(one.get("val")) == _form(other.get("val"))


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, [*map(_expression, value.shape)], [*map(_expression, value.stride())]
    return [*map(_form, value)] if isinstance(value, list | tuple) else value
