"""Lowered models of two periods of layers from those of three: the middle one is left out, nothing is lowered again.

What a deep model takes follows from two and from three periods. Passes treat layers one by one, so the ends of both
are the same, node for node: only what they read of the middle one they read of each other. What lets transfers begin a
layer ahead runs behind that, on each of both. Where lowering two periods gives another program (their values may be
placed otherwise, where the degree of an axis does not divide heads), that is no sample of a deep model: with more
layers in between the ends are those of three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxpar.ir.copies import copy_node
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import fqn_of, is_again, is_backward, local_meta
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import LowerAlike
from fxpar.search.deepened import are_same_nodes
from fxpar.search.periods import FIRST, LAST, MIDDLE, Periods

_NAMING = ("fqn", "reader", "buffer")  # what of a node's metadata names a module


@dataclass
class LowerShort:
    """`more()(strategy)` for a model of three periods of layers, and what is left of it without the middle one. For
    strategies that treat all layers alike, without stages; `few()(strategy)` for two, where they cannot be told apart.
    """

    few: Callable[[], LowerAlike]
    more: Callable[[], LowerAlike]
    period: int
    _next: dict[Strategy, TrainGraph] = field(default_factory=dict)

    def __call__(self, strategy: Strategy, whole: bool) -> TrainGraph:
        """The one with three periods if `whole`. It is made with the other, and kept until that is asked for. Raises as
        `lower` does.
        """
        if whole:
            return self._next.pop(strategy, None) or self.more()(strategy)
        found, more = self.more().with_another(strategy, lambda graph: shortened(graph, self.period))
        self._next = {strategy: more}
        return found or self.few()(strategy)


def layers_alike(strategy: Strategy) -> bool:
    """Whether it has no stages or teams, and says nothing of some layers, or of bytes of all of them."""
    named = strategy.rules or strategy.overrides or strategy.by_stage or strategy.teams
    remat = strategy.remat is None or strategy.remat.mode in ("full", "selective")
    return not named and remat and strategy.pipeline_size == 1


def shortened(graph: AnnotatedGraph, period: int) -> AnnotatedGraph | None:
    """A lowered graph of three periods of layers without the middle one; None where what is left reads of that what no
    end has in its place.
    """
    names = Periods.of((info.fqn for info in graph.inputs if info.kind == "param"), period)
    return None if names is None else _Shortened.of(graph, names)


def is_same_program(one: TrainGraph, other: TrainGraph) -> bool:
    """Whether both run the same on values that lie alike, names of nodes aside."""
    if not (isinstance(one, ExecGraph) and isinstance(other, ExecGraph)):
        return False
    said = [
        (p.inputs, p.outputs, p.stored_inputs, p.stored_outputs, p.dims, p.divisors, p.padding_hazard, p.spread)
        for p in (one, other)
    ]
    if said[0] != said[1] or one.notes != other.notes:
        return False
    pairs = zip(one.parts.values(), other.parts.values(), strict=True)
    return all(a.sources == b.sources and are_same_nodes(a.graph, b.graph) for a, b in pairs)


@dataclass
class _Shortened:
    graph: AnnotatedGraph
    names: Periods
    places: dict[fx.Node, int | None]
    called: dict[tuple[int, Any], list[fx.Node]]  # of a period, calls by what they call

    @classmethod
    def of(cls, graph: AnnotatedGraph, names: Periods) -> AnnotatedGraph | None:
        places = {node: names.place(fqn_of(node)) for node in graph.graph.nodes}
        places |= {n: names.place(info.fqn) for n, info in zip(graph.placeholders, graph.inputs, strict=True)}
        called: dict[tuple[int, Any], list[fx.Node]] = defaultdict(list)
        for node, place in places.items():
            if place is not None and node.op == "call_function":
                called[place, node.target].append(node)
        return cls(graph, names, places, called)._made()

    def _looks(self, node: fx.Node) -> Any:
        """What nodes of other periods have in common with it."""
        module = self.names.moved(fqn_of(node), -(self.places[node] or 0))
        return node.target, module, is_backward(node), is_again(node), local_meta(node)

    def _alike(self, place: int, node: fx.Node, look: Any) -> list[fx.Node]:
        """Those of a period that look so, as `node` does."""
        return [one for one in self.called[place, node.target] if self._looks(one) == look]

    def _there(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """What is read in place of `node`: of the middle period what stands for it in the other end."""
        if self.places[node] != MIDDLE:
            return node
        of_reader = self.places[reader]
        if of_reader is None or node.op != "call_function":
            return None
        end = LAST if of_reader == FIRST else FIRST
        look = self._looks(node)
        mine, theirs = (self._alike(place, node, look) for place in (MIDDLE, end))
        return theirs[mine.index(node)] if len(mine) == len(theirs) else None

    def _made(self) -> AnnotatedGraph | None:
        graph, kept = self.graph, list(zip(self.graph.outputs, self.graph.results, strict=True))
        kept = [(out, node) for out, node in kept if self.names.place(out.fqn) != MIDDLE]
        made, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.graph.nodes:
            if node.op == "output":
                if any(result not in copied for _, result in kept):
                    return None
                made.output(tuple(copied[result] for _, result in kept))
                made.output_node().meta = self._of_results(node)
            elif self.places[node] != MIDDLE:
                # What stands further behind is not there yet.
                operands = {one: copied.get(self._there(one, node)) for one in node.all_input_nodes}  # type: ignore[arg-type]
                if None in operands.values():
                    return None
                copied[node] = copy_node(made, node, operands.__getitem__)  # type: ignore[arg-type]
                copied[node].meta.update(self._named(node))
        return replace(
            graph,
            graph=made,
            inputs=tuple(self._moved(info) for info in graph.inputs if self.names.place(info.fqn) != MIDDLE),
            outputs=tuple(self._moved(out) for out, _ in kept),
            deferred={self._new(fqn): dist for fqn, dist in graph.deferred.items() if self.names.place(fqn) != MIDDLE},
            divisors=dict(graph.divisors),
            notes=list(graph.notes),
            timings=dict(graph.timings),
            passes=list(graph.passes),
        )

    def _new(self, fqn: str, of_last: bool = True) -> str:
        """The name of what is called so; `of_last`: by the last period, whose neighbour is the first one now."""
        place = self.names.place(fqn)
        return self.names.moved(fqn, -1) if place == LAST or (of_last and place == MIDDLE) else fqn

    def _moved(self, one: Any) -> Any:
        return replace(one, fqn=self._new(one.fqn))

    def _named(self, node: fx.Node) -> dict[str, Any]:
        """The metadata of a node that is kept. What the first period says of the middle one holds of the last one,
        which gets its name.
        """
        meta, of_last = dict(node.meta), self.places[node] == LAST
        for key in _NAMING:
            if isinstance(meta.get(key), str):
                meta[key] = self._new(meta[key], of_last)
        if isinstance(meta.get("bucket"), str):
            meta["bucket"] = "/".join(self._new(name, of_last) for name in meta["bucket"].split("/"))
        return meta

    def _of_results(self, output: fx.Node) -> dict[str, Any]:
        meta = dict(output.meta)
        if "dist_in" in meta:
            pairs = zip(self.graph.outputs, meta["dist_in"], strict=True)
            meta["dist_in"] = tuple(dist for out, dist in pairs if self.names.place(out.fqn) != MIDDLE)
        return meta


__all__ = ["LowerShort", "is_same_program", "layers_alike", "shortened"]
