"""Deep models from shallow captures: layers that repeat are copied, not traced again.

A model of three periods of layers has a first, a middle and a last one. In a deeper model the middle one is there more
often: its nodes are one run in the forward and one in the backward, and what they read is their own, of a neighbour, or
outside of all layers. That it is so is looked at, node by node, and that the middle one left out gives the capture of
two periods; else the model is captured as deep as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import fx

from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.search.periods import FIRST, LAST, MIDDLE, PERIODS, Periods
from fxpar.search.price import Depth
from fxpar.torch_api.modules import lazy_module

Run = str  # of the nodes of a period: "inputs", "forward" or "backward"
Key = tuple[Run, int]  # a run, and a place in it
Captured = Callable[[int], LogicalGraph]  # of a model with so many layers
T = TypeVar("T")
_NAME = re.compile(r"_\d+$")


def repeating(captured: Captured, depth: Depth) -> Captured:
    """What captures a model with so many layers, each number once: three periods of them at most, if they repeat."""
    samples = depth.samples(1)

    @functools.cache
    def repeats() -> bool:
        few, more = samples
        shallow = deepened(captured(more), few, depth.period)
        return shallow is not None and is_same_graph(shallow, captured(few))

    @functools.cache
    def rows(layers: int) -> LogicalGraph:
        deep = len(samples) == 2 and layers > samples[1] and layers % depth.period == 0
        found = deepened(captured(samples[1]), layers, depth.period) if deep and repeats() else None
        return found or captured(layers)

    return rows


def deepened(graph: LogicalGraph, layers: int, period: int = 1) -> LogicalGraph | None:
    """The graph of a model with so many layers (two periods or more), from that of one with PERIODS periods; None where
    its layers do not repeat. Equal to its capture but for names of nodes.
    """
    found = _Periods.of(graph, period)
    return None if found is None else _Copy(found, layers // period).graph()


def is_same_graph(graph: LogicalGraph, other: LogicalGraph) -> bool:
    """Whether they do the same on the same inputs, names of nodes aside."""
    said = [(g.inputs, g.outputs, g.dims, g.packing, g.averaged, g.constants.keys()) for g in (graph, other)]
    return said[0] == said[1] and are_same_nodes(graph.gm.graph, other.gm.graph)


def are_same_nodes(graph: fx.Graph, other: fx.Graph) -> bool:
    """Whether they do the same in the same order, names of nodes aside."""
    mine, theirs = list(graph.nodes), list(other.nodes)
    if len(mine) != len(theirs):
        return False
    places = {node: i for nodes in (mine, theirs) for i, node in enumerate(nodes)}

    def reads(node: fx.Node) -> list[int]:
        return [places[read] for read in _reads(node)]

    pairs = list(zip(mine, theirs, strict=True))
    return all(_looks(a, fqn_of(a)) == _looks(b, fqn_of(b)) and reads(a) == reads(b) for a, b in pairs)


@dataclass
class _Periods:
    """A graph of PERIODS periods of layers, and where each node of one stands."""

    graph: LogicalGraph
    names: Periods
    place: dict[fx.Node, tuple[int, Key]] = field(default_factory=dict)
    nodes: dict[tuple[int, Key], fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: LogicalGraph, period: int) -> _Periods | None:
        names = Periods.of((info.fqn for info in graph.params()), period)
        found = None if names is None else cls(graph, names)
        return found if found and found._repeats() else None

    def _repeats(self) -> bool:
        inputs = dict(zip(self.graph.placeholders, self.graph.inputs, strict=True))
        counts: dict[tuple[int, Run], int] = {}
        order: dict[Run, list[int | None]] = {"inputs": [], "forward": [], "backward": []}
        for node in self.graph.gm.graph.nodes:
            run = "inputs" if node in inputs else "backward" if is_backward(node) else "forward"
            period = self.names.place(inputs[node].fqn if node in inputs else fqn_of(node))
            if node.op != "output":
                order[run].append(period)
            if period is not None:
                number = counts[period, run] = counts.get((period, run), 0) + 1
                self.place[node] = period, (run, number)
                self.nodes[self.place[node]] = node
            if node in inputs and period is not None:
                info = inputs[node]
                if info.kind not in ("param", "buffer") or info.aliases or node.name != info.fqn.replace(".", "_"):
                    return False
        one_run = all(_is_one_run(periods) for periods in order.values())
        # The last gradients of the first period may be called by what is in front of it.
        fewer = (FIRST, "backward")
        as_long = all(n == counts.get((MIDDLE, run)) or (one, run) == fewer for (one, run), n in counts.items())
        return one_run and as_long and all(map(self._reads_near, self.graph.gm.graph.nodes))

    def _reads_near(self, node: fx.Node) -> bool:
        """Whether a node reads what every period has; one of the middle period what its neighbours do, one further."""
        if node.op == "output":
            return True
        if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
            return False
        if node not in self.place:
            return all(self.place.get(read, (FIRST,))[0] != MIDDLE for read in node.all_input_nodes)
        period, key = self.place[node]
        if period != MIDDLE:
            return all(abs(self.place.get(read, (period,))[0] - period) < 2 for read in node.all_input_nodes)
        if (FIRST, key) not in self.nodes:  # then it is not seen what stands for something of the last one
            own = all(self.place.get(read, (MIDDLE,))[0] != LAST for read in node.all_input_nodes)
            return own and (LAST, key) in self.nodes and self._as_in(node, self.nodes[LAST, key], LAST)
        return all(self._as_in(node, self.nodes[one, key], one) for one in (FIRST, LAST) if (one, key) in self.nodes)

    def _as_in(self, node: fx.Node, other: fx.Node, period: int) -> bool:
        """Whether a node of the middle period is the one of another, but where that reads beyond the first or last."""
        if _looks(node, self.names.moved(fqn_of(node), period - MIDDLE)) != _looks(other, fqn_of(other)):
            return False
        for mine, theirs in zip(_reads(node), _reads(other), strict=True):
            if mine not in self.place:
                if theirs is not mine:
                    return False
                continue
            where, key = self.place[mine]
            there = where + period - MIDDLE
            if 0 <= there < PERIODS and theirs is not self.nodes.get((there, key)):
                return False
        return True


@dataclass
class _Copy:
    """The graph with `periods` periods."""

    source: _Periods
    periods: int
    made: fx.Graph = field(default_factory=fx.Graph)
    outside: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inside: dict[tuple[int, Key], fx.Node] = field(default_factory=dict)

    def graph(self) -> LogicalGraph:
        graph, between = self.source.graph, range(1, self.periods - 1)
        done: set[Run] = set()
        for node in graph.gm.graph.nodes:
            period, (run, _) = self.source.place.get(node, (None, ("", 0)))
            if node.op == "output":
                self._output(node)
            elif period == MIDDLE and run not in done:
                done.add(run)
                nodes = self.source.nodes.items()
                mine = [one for (where, key), one in nodes if where == MIDDLE and key[0] == run]
                for number in reversed(between) if run == "backward" else between:
                    for one in mine:
                        self._copy(one, number)
            elif period != MIDDLE:
                self._copy(node, FIRST if period == FIRST else self.periods - 1)
        inputs = self._repeated(graph.inputs, lambda one: one.fqn)
        outputs = self._repeated(graph.outputs, lambda one: one.fqn)
        return replace(graph, gm=lazy_module(graph.gm, self.made), inputs=inputs, outputs=outputs)

    def _repeated(self, found: Sequence[T], fqn_of_one: Callable[[T], str]) -> tuple[T, ...]:
        """Inputs or outputs, those of the middle period once for each that it stands for."""
        kept: list[T] = []
        middle = [one for one in found if self.source.names.place(fqn_of_one(one)) == MIDDLE]
        for one in found:
            period = self.source.names.place(fqn_of_one(one))
            if period == MIDDLE:
                if one is middle[0]:
                    kept += [self._named(each, n - MIDDLE) for n in range(1, self.periods - 1) for each in middle]
            else:
                kept.append(self._named(one, self.periods - PERIODS) if period == LAST else one)
        return tuple(kept)

    def _named(self, one: Any, periods: int) -> Any:
        return replace(one, fqn=self.source.names.moved(one.fqn, periods))

    def _copy(self, node: fx.Node, number: int) -> None:
        """As a node of period `number`, or outside of all."""
        period, key = self.source.place.get(node, (None, ("", 0)))
        meta, further = dict(node.meta), 0 if period is None else number - period
        if period is not None:
            meta["fqn"] = self.source.names.moved(fqn_of(node), further)
        if node.op == "placeholder":
            name = node.name
            if period is not None:
                name = self.source.names.moved(self._fqn(node), further).replace(".", "_")
            made = self.made.create_node(node.op, name, name=name, type_expr=node.type)
        else:
            args = fx.node.map_arg(node.args, lambda read: self._read(read, period, number))
            name = _NAME.sub("", node.name)
            made = self.made.create_node(node.op, node.target, args, node.kwargs, name=name, type_expr=node.type)
        made.meta = meta
        if period is None:
            self.outside[node] = made
        else:
            self.inside[number, key] = made

    def _fqn(self, node: fx.Node) -> str:
        graph = self.source.graph
        return next(info.fqn for one, info in zip(graph.placeholders, graph.inputs, strict=True) if one is node)

    def _read(self, node: fx.Node, period: int | None, number: int) -> fx.Node:
        if node in self.outside:
            return self.outside[node]
        where, key = self.source.place[node]
        if period is None:
            return self.inside[FIRST if where == FIRST else self.periods - 1, key]
        return self.inside[number + where - period, key]

    def _output(self, node: fx.Node) -> None:
        graph = self.source.graph
        of = {out: result for out, result in zip(graph.outputs, graph.results, strict=True)}
        results: list[fx.Node] = []
        middle = [out for out in graph.outputs if self.source.names.place(out.fqn) == MIDDLE]
        for out in graph.outputs:
            period = self.source.names.place(out.fqn)
            if out in middle[:1]:
                results += [self._read(of[each], MIDDLE, n) for n in range(1, self.periods - 1) for each in middle]
            elif period != MIDDLE:
                results.append(self._read(of[out], period, FIRST if period == FIRST else self.periods - 1))
        self.made.output(tuple(results))
        self.made.output_node().meta = dict(node.meta)


def _is_one_run(periods: Sequence[int | None]) -> bool:
    """Whether each period is one stretch without gaps."""
    starts = [one for one, before in zip(periods, [None, *periods], strict=False) if one is not None and one != before]
    return len(starts) == len(set(starts))


def _looks(node: fx.Node, fqn: str) -> Any:
    """What a node does, in the module `fqn`, but for what it reads."""
    meta = {**node.meta, "fqn": fqn, "source": None}
    if node.op == "placeholder":
        return node.op, meta
    literals = repr(fx.node.map_arg((node.args, node.kwargs), lambda _: None))  # NaN is not equal to itself
    return node.op, node.target, literals, meta


def _reads(node: fx.Node) -> list[fx.Node]:
    """What is read, in the order of the arguments."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda read: found.append(read))
    return found


__all__ = ["are_same_nodes", "deepened", "is_same_graph", "repeating"]
