"""The parts of a task's graph that become MetaOps: chains, and what runs before, between and behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter

from torch import fx

from fxpar.ir.node_meta import fqn_of
from fxpar.tasks.layers import SHARE, Forward, Layers, around, chains


@dataclass
class Part:
    """A MetaOp to be: the modules of its layers, and the calls that run with its first and last one. A part without a
    chain is one layer, its `before`.
    """

    layers: Layers
    calls: list[fx.Node]  # of the layers
    before: list[fx.Node] = field(default_factory=list)
    behind: list[fx.Node] = field(default_factory=list)

    @property
    def all_calls(self) -> list[fx.Node]:
        return [*self.before, *self.calls, *self.behind]


def parts_of(forward: Forward) -> tuple[list[Part], set[tuple[int, int]]]:
    """(parts in an order in which they may run, edges by place): every call of the forward is in one part.

    Calls outside of chains that have the same chains before them and the same behind them are one part. Where that is
    less than `SHARE` of the work, it joins the one part that it reads from, else the one that reads from it; what joins
    several stays a part of its own.
    """
    found = _acyclic(forward, chains(forward))
    owner = {node: i for i, part in enumerate(found) for node in part.calls}
    rest = [node for node in forward.calls if node not in owner]
    keys = _surroundings(forward, owner)
    groups: dict[tuple[int, int], Part] = {}
    for node in rest:
        groups.setdefault(keys[node], Part((), [])).before.append(node)
    return _joined(forward, [*found, *groups.values()])


def _acyclic(forward: Forward, found: Iterable[Layers]) -> list[Part]:
    """Parts of those chains that can run as a whole: if two need each other in turns, the smaller one is none."""
    parts = [Part(layers, _calls(forward, layers)) for layers in found]
    while True:
        owner: dict[fx.Node, int] = {node: i for i, part in enumerate(parts) for node in part.calls}
        reads: dict[int | fx.Node, set[int | fx.Node]] = {}
        for node in forward.calls:
            here = owner.get(node, node)
            reads.setdefault(here, set()).update(
                there for one in forward.reads[node] if (there := owner.get(one, one)) != here
            )
        try:
            TopologicalSorter(reads).prepare()
        except CycleError as error:
            cycle = {one for one in error.args[1] if isinstance(one, int)}
            del parts[min(cycle, key=lambda i: (_seconds(forward, parts[i].calls), i))]
        else:
            return parts


def _calls(forward: Forward, layers: Layers) -> list[fx.Node]:
    return [node for layer in layers for module in layer for node in forward.by_module[module]]


def _seconds(forward: Forward, calls: Iterable[fx.Node]) -> Fraction:
    return sum((forward.seconds[node] for node in calls), Fraction(0))


def _surroundings(forward: Forward, owner: dict[fx.Node, int]) -> dict[fx.Node, tuple[int, int]]:
    """By call outside of chains the sets of chains, as bits, that it needs and that need it."""
    members: dict[int | fx.Node, list[fx.Node]] = {}
    for node in forward.calls:
        members.setdefault(owner.get(node, node), []).append(node)
    reads = {
        here: {there for node in calls for one in forward.reads[node] if (there := owner.get(one, one)) != here}
        for here, calls in members.items()
    }
    order = list(TopologicalSorter(reads).static_order())

    def bit(one: int | fx.Node) -> int:
        return 1 << one if isinstance(one, int) else 0

    needs = dict.fromkeys(order, 0)
    needed = dict.fromkeys(order, 0)
    for here in order:
        for there in reads[here]:
            needs[here] |= needs[there] | bit(there)
    for here in reversed(order):
        for there in reads[here]:
            needed[there] |= needed[here] | bit(here)
    return {one: (needs[one], needed[one]) for one in order if isinstance(one, fx.Node)}


def _edges(forward: Forward, parts: Sequence[Part]) -> set[tuple[int, int]]:
    owner = {node: i for i, part in enumerate(parts) for node in part.all_calls}
    pairs = {(owner[one], owner[node]) for node in forward.calls for one in forward.reads[node]}
    return {(a, b) for a, b in pairs if a != b}


def _joined(forward: Forward, parts: list[Part]) -> tuple[list[Part], set[tuple[int, int]]]:
    """Where `a` is the only one that `b` reads from, or `b` the only one that reads from `a`, there is no other way
    from one to the other, so that the two as one need nobody in turns.
    """
    enough = SHARE * _seconds(forward, forward.calls)
    while True:
        edges = _edges(forward, parts)
        order = list(TopologicalSorter({i: [a for a, b in edges if b == i] for i in range(len(parts))}).static_order())
        for i in sorted(
            order, key=lambda i: all(b != i for _, b in edges)
        ):  # what reads from none waits for its reader
            part = parts[i]
            sources, readers = [a for a, b in edges if b == i], [b for a, b in edges if a == i]
            if part.layers or _seconds(forward, part.before) >= enough:
                continue
            if len(sources) == 1:
                into = parts[sources[0]]
                (into.behind if into.layers else into.before).extend(part.before)
            elif len(readers) == 1:
                parts[readers[0]].before[:0] = part.before
            else:
                continue
            del parts[i]
            break
        else:
            placed = {old: new for new, old in enumerate(order)}
            return [parts[i] for i in order], {(placed[a], placed[b]) for a, b in edges}


def modules_of(calls: Iterable[fx.Node], within: Layers) -> tuple[str, ...]:
    """The modules that calls are in, other than those of the layers; "" is code in none."""
    inside = {module for layer in within for module in layer}
    return tuple(dict.fromkeys(fqn for node in calls if not inside & {*around(fqn := fqn_of(node))}))
