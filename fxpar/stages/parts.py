"""A stage's graph taken apart: what runs once, forward and backward of a micro-batch, the backward in two halves.

Works on a stage's logical graph and on the lowered one alike, as the split is by dependence: the forward is what sent
activations, loss and new buffers need; the input part is what sent gradients need of the rest; the weight part is what
is then left. Prologue and epilogue are what the passes have put there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxpar.errors import VerifyError
from fxpar.ir.exec_graph import Part, cut_part
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.node_meta import is_backward, phase_of
from fxpar.ir.pass_base import ancestors, whole_forward

Slots = dict[str, dict[fx.Node, int]]

# Inputs that are others for each micro-batch.
_PER_MICRO_BATCH = ("batch", "received", "received_grad", "scale", "seed")


@dataclass
class StageParts:
    """The parts of a stage. A source (part, i) is result i of that part, ("input", i) input i of the graph.

    prologue      once per mini-batch
    forward       results: what is sent, then what the epilogue reads of it, then what the backward needs of it
    backward      results: gradients that are sent, then what the epilogue reads of it
    input_part, weight_part   together the same as `backward`. Results of the first: gradients that are sent, then what
                  the second needs of it; of the second: what the epilogue reads
    epilogue      once per group; results: loss, gradients of parameters, new buffers in the order of the outputs
    """

    prologue: Part
    forward: Part
    backward: Part
    input_part: Part
    weight_part: Part
    epilogue: Part


def split_parts(graph: LogicalGraph | AnnotatedGraph) -> StageParts:
    """Split a stage. Raises VerifyError if what leaves in the forward depends on a received gradient."""
    return _Splitter(graph).split()


class _Splitter:
    def __init__(self, graph: LogicalGraph | AnnotatedGraph) -> None:
        self.graph = graph
        whole = graph.graph if isinstance(graph, AnnotatedGraph) else graph.gm.graph
        self.calls = [n for n in whole.nodes if n.op == "call_function"]
        self.phase = {n: phase_of(n) for n in self.calls}
        self.position = {node: i for i, node in enumerate(graph.placeholders)}
        self.kind = {node: info.kind for node, info in zip(graph.placeholders, graph.inputs, strict=True)}
        self.finals = list(zip(graph.results, graph.outputs, strict=True))

    def split(self) -> StageParts:
        sent = [node for node, out in self.finals if out.kind == "sent"]
        sent_grads = [node for node, out in self.finals if out.kind == "sent_grad"]
        # The epilogue may reduce the loss and gradients in one collective: these belong to the backward all the same.
        ends = [n for n in self._ends("loss", "buffer") if not is_backward(n)]
        late_ends = [n for n in self._ends("loss", "grad", "buffer") if n not in set(ends)]
        body = [n for n in self.calls if self.phase[n] == "body"]
        early = _with_siblings(whole_forward(ancestors([*sent, *ends]), body), body)
        self._check(early)
        needed = _with_siblings(ancestors(sent_grads), body)
        first = [n for n in body if n in early]
        late = [n for n in body if n not in early]
        for_inputs = [n for n in late if n in needed]
        for_weights = [n for n in late if n not in needed]
        inside = {n for n in early if self.phase.get(n) == "body"}
        saved = _crossing(late, [*sent_grads, *late_ends], inside, [*sent, *ends])
        handed = _crossing(for_weights, late_ends, set(for_inputs), sent_grads)
        before = [n for n in self.calls if self.phase[n] == "prologue"]
        after = [n for n in self.calls if self.phase[n] == "epilogue"]
        prepared = _crossing([*body, *after], [node for node, _ in self.finals], set(before), [])
        results = [node for node, out in self.finals if out.kind in ("loss", "grad", "buffer")]
        slots: Slots = {"prologue": _slots(prepared), "forward": _slots([*sent, *ends, *saved])}
        halves = {**slots, "input_part": _slots([*sent_grads, *handed])}
        # The epilogue reads sums over micro-batches, so never a result by its place among those that are sent.
        sums: Slots = {
            "prologue": slots["prologue"],
            "forward": _slots(ends, len(sent)),
            "backward": _slots(late_ends, len(sent_grads)),
        }
        return StageParts(
            prologue=self._part(before, prepared, {}),
            forward=self._part(first, [*sent, *ends, *saved], {"prologue": slots["prologue"]}),
            backward=self._part(late, [*sent_grads, *late_ends], slots),
            input_part=self._part(for_inputs, [*sent_grads, *handed], slots),
            weight_part=self._part(for_weights, late_ends, halves),
            epilogue=self._part(after, results, sums),
        )

    def _ends(self, *kinds: str) -> list[fx.Node]:
        """Values of each micro-batch that the results of these kinds are made of: of the body, or what it is given (a
        gradient that comes from the next stage ready made).
        """
        found: dict[fx.Node, None] = {}
        todo = [node for node, out in reversed(self.finals) if out.kind in kinds]
        while todo:
            node = todo.pop()
            if self.phase.get(node) == "epilogue":
                todo += reversed(node.all_input_nodes)
            elif self.phase.get(node) == "body" or self.kind.get(node) in _PER_MICRO_BATCH:
                found[node] = None
        return list(found)

    def _check(self, early: set[fx.Node]) -> None:
        wrong = {n for n in early if self.kind.get(n) == "received_grad"}
        if wrong:
            raise VerifyError(f"{self.graph.name}: what the forward gives depends on {min(wrong).name!r}")

    def _part(self, members: list[fx.Node], results: list[fx.Node], slots: Slots) -> Part:
        return cut_part(members, results, self.position, slots)


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


def _slots(results: list[fx.Node], first: int = 0) -> dict[fx.Node, int]:
    return {node: i for i, node in reversed(list(enumerate(results, first)))}
