"""Forward and backward of a stage as graphs of their own, and the backward in two halves.

Works on a stage's logical graph and on the lowered one alike, as the split is by dependence: the forward is what
values, loss and new buffers need; the input part is what the gradients of received activations need of the rest; the
weight part is what is then left.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from fxpar.errors import VerifyError
from fxpar.exec_graph import Part
from fxpar.graph import AnnotatedGraph, LogicalGraph
from fxpar.stages.nodes import ancestors

_EARLY = ("value", "loss", "buffer")
Slots = Mapping[str, Mapping[fx.Node, int]]


@dataclass
class StageParts:
    """The parts of a stage's graph. A source (part, i) of a part is result i of that part, ("input", i) input i.

    Results of `forward`: values, loss and new buffers in the order of the graph's outputs, then what the backward needs
    of it. Results of `backward`: all gradients in the order of the outputs. `input_part` and `weight_part` together are
    the same as `backward`: results of the first are the gradients of what was received, then what the second needs of
    it; results of the second the gradients of parameters.
    """

    forward: Part
    backward: Part
    input_part: Part
    weight_part: Part


def split_parts(graph: LogicalGraph | AnnotatedGraph) -> StageParts:
    """Split a stage. Raises VerifyError if what leaves in the forward depends on a received gradient."""
    whole = graph.graph if isinstance(graph, AnnotatedGraph) else graph.gm.graph
    finals = list(zip(graph.results, graph.outputs, strict=True))
    values = [node for node, out in finals if out.kind in _EARLY]
    input_grads = [node for node, out in finals if out.kind == "input_grad"]
    grads = [node for node, out in finals if out.kind == "grad"]
    places = graph.placeholders
    calls = [n for n in whole.nodes if n.op == "call_function"]
    early = _with_siblings(ancestors(values), calls)
    tangents = {n for n, i in zip(places, graph.inputs, strict=True) if i.kind == "tangent"}
    if early & tangents:
        raise VerifyError(f"{graph.name}: a value of the forward depends on {min(early & tangents).name!r}")
    needed = _with_siblings(ancestors(input_grads), calls)
    first = [n for n in calls if n in early]
    late = [n for n in calls if n not in early]
    for_inputs = [n for n in late if n in needed]
    for_weights = [n for n in late if n not in needed]
    saved = _crossing(late, [*input_grads, *grads], early, values)
    position = {node: i for i, node in enumerate(places)}
    slots: dict[str, dict[fx.Node, int]] = {"forward": _slots([*values, *saved])}
    handed = _crossing(for_weights, grads, set(for_inputs), input_grads)
    slots["input_part"] = _slots([*input_grads, *handed])
    in_order = [node for node, out in finals if out.kind not in _EARLY]
    return StageParts(
        _part(first, [*values, *saved], position, {}),
        _part(late, in_order, position, {"forward": slots["forward"]}),
        _part(for_inputs, [*input_grads, *handed], position, {"forward": slots["forward"]}),
        _part(for_weights, grads, position, slots),
    )


def _with_siblings(found: set[fx.Node], calls: list[fx.Node]) -> set[fx.Node]:
    """With all results of ops of which one result is there, and integers that are nothing but made from these."""
    for node in calls:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _crossing(
    users: list[fx.Node], results: list[fx.Node], made: set[fx.Node], known: Iterable[fx.Node]
) -> list[fx.Node]:
    """Calls among `made` that `users` read or that are results, less those that are `known` results already."""
    found = dict.fromkeys(o for n in users for o in n.all_input_nodes if o in made and o.op == "call_function")
    found |= dict.fromkeys(r for r in results if r in made and r.op == "call_function")
    have = set(known)
    return [n for n in found if n not in have]


def _slots(results: list[fx.Node]) -> dict[fx.Node, int]:
    return {node: i for i, node in reversed(list(enumerate(results)))}


def _part(members: list[fx.Node], results: list[fx.Node], position: Mapping[fx.Node, int], slots: Slots) -> Part:
    """A graph of the member nodes; operands from elsewhere become placeholders, in the order of first use."""
    inside = set(members)
    outside = dict.fromkeys(o for n in members for o in n.all_input_nodes if o not in inside)
    outside |= dict.fromkeys(r for r in results if r not in inside)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    sources: list[tuple[str, int]] = []
    for node in outside:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
        if node in position:
            sources.append(("input", position[node]))
        else:
            part = next(p for p in slots if node in slots[p])
            sources.append((part, slots[part][node]))
    for node in members:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[r] for r in results))
    return Part(graph, tuple(sources))  # type: ignore[arg-type]
