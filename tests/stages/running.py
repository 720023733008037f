"""Run the stages of a cut graph in order on one device, as a pipeline would, and the graph that was cut beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.exec_graph import Part, compile_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.stages import StagedGraph, StageGraph, split_parts

Tensors = Mapping[str, Tensor]


@dataclass
class Step:
    """Results of one micro-batch."""

    loss: Tensor | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def whole(graph: LogicalGraph, tables: Mapping[str, Tensors]) -> Step:
    """The graph that was cut; `tables` has inputs by kind and FQN."""
    with torch.no_grad():
        values = graph.gm(*(tables[i.kind][i.fqn] for i in graph.inputs))
    done = Step()
    for out, value in zip(graph.outputs, values, strict=True):
        put(done, out.kind, out.fqn, value)
    return done


def put(done: Step, kind: str, fqn: str, value: Tensor) -> None:
    if kind == "loss":
        done.loss = value
    else:
        (done.grads if kind == "grad" else done.buffers)[fqn] = value


class Runner:
    """One stage: `forward`, then `backward`, whole or in halves. Parts are compiled once."""

    def __init__(self, stage: StageGraph) -> None:
        self.stage, self.parts = stage, split_parts(stage)
        self._compiled: dict[str, fx.GraphModule] = {}

    def run(self, name: str, tables: Mapping[str, Sequence[Any]]) -> list[Any]:
        part: Part = getattr(self.parts, name)
        if name not in self._compiled:
            self._compiled[name] = compile_graph(part.graph)
        with torch.no_grad():
            return list(self._compiled[name](*(tables[source][i] for source, i in part.sources)))

    def forward(self, tables: Mapping[str, Tensors], received: Tensors) -> dict[tuple[str, str], Tensor]:
        self.inputs = [
            None if i.kind == "received_grad" else received[i.fqn] if i.fqn in received else tables[i.kind][i.fqn]
            for i in self.stage.inputs
        ]
        self.kept = self.run("forward", {"input": self.inputs})
        made = {"input": self.inputs, "forward": self.kept}
        found = dict(zip(self._names("sent"), self.kept, strict=False))
        return found | self._epilogue(("loss", "buffer"), made)

    def backward(self, tangents: Tensors, *, halves: bool) -> dict[tuple[str, str], Tensor]:
        inputs = [
            tangents[i.fqn] if i.kind == "received_grad" else v
            for i, v in zip(self.stage.inputs, self.inputs, strict=True)
        ]
        tables = {"input": inputs, "forward": self.kept}
        sent = self._names("sent_grad")
        if not halves:
            results = self.run("backward", tables)
        else:
            first = self.run("input_part", tables)
            results = [*first[: len(sent)], *self.run("weight_part", {**tables, "input_part": first})]
        found = dict(zip(sent, results, strict=False))
        return found | self._epilogue(("grad",), {**tables, "backward": results})

    def _names(self, kind: str) -> list[tuple[str, str]]:
        return [(o.kind, o.fqn) for o in self.stage.outputs if o.kind == kind]

    def _epilogue(self, kinds: tuple[str, ...], tables: Mapping[str, Sequence[Any]]) -> dict[tuple[str, str], Tensor]:
        """Results of these kinds: the epilogue of a stage that nobody has lowered hands them on."""
        places = self.parts.epilogue.graph.find_nodes(op="placeholder")
        source = dict(zip(places, self.parts.epilogue.sources, strict=True))
        outputs = [o for o in self.stage.outputs if o.kind in ("loss", "grad", "buffer")]
        found = {}
        for out, node in zip(outputs, self.parts.epilogue.results, strict=True):
            part, i = source[node]
            if out.kind in kinds:
                found[out.kind, out.fqn] = tables[part][i]
        return found


def runners_of(staged: StagedGraph) -> list[Runner]:
    return [Runner(stage) for stage in staged.stages]


def pipeline(
    staged: StagedGraph, runners: Sequence[Runner], tables: Mapping[str, Tensors], *, halves: bool = False
) -> Step:
    """All forwards, then all backwards; only what the stages say goes from one to the next."""
    done = Step()
    sent: dict[str, Tensor] = {}
    for runner in runners:
        assert set(sent) == {c.name for c in runner.stage.received}
        found = runner.forward(tables, sent)
        for (kind, fqn), value in found.items():
            if kind != "sent":
                put(done, kind, fqn, value)
        sent = {fqn: v for (kind, fqn), v in found.items() if kind == "sent"}
    assert not sent
    terms: dict[str, dict[int, Tensor]] = {}
    for runner in reversed(runners):
        assert set(sent) == {c.name for c in runner.stage.gradients_received}
        found = runner.backward(sent, halves=halves)
        for (kind, fqn), value in found.items():
            if kind == "grad":
                terms.setdefault(fqn, {})[runner.stage.index] = value
        sent = {fqn: v for (kind, fqn), v in found.items() if kind == "sent_grad"}
    assert not sent
    order = {param.fqn: param.terms for param in staged.shared}
    for fqn, by_stage in terms.items():
        first, *rest = (by_stage[s] for s in order.get(fqn, by_stage))
        for value in rest:
            first = first + value
        done.grads[fqn] = first
    return done


def same(a: Step, b: Step) -> list[str]:
    """Names of results that differ in a bit."""
    assert a.loss is not None
    assert b.loss is not None
    assert a.grads.keys() == b.grads.keys()
    assert a.buffers.keys() == b.buffers.keys()
    pairs = [("loss", a.loss, b.loss), *((k, a.grads[k], b.grads[k]) for k in a.grads)]
    pairs += [(k, a.buffers[k], b.buffers[k]) for k in a.buffers]
    return [name for name, x, y in pairs if not torch.equal(x, y)]
