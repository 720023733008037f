"""Stages lowered for the sub-mesh of a strategy with the passes as they are: a stage is a forward with tangents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.exec_graph import PlainGraph, compile_graph, substitute_tokens
from fxpar.lowering import lower_forward
from fxpar.runtime.bound import token_axes
from fxpar.runtime.groups import ProcessGroups
from fxpar.stages import cut_stages
from fxpar.torch_api.threaded import run_threads
from tests.stages.models import Model, Tensors, loaded
from tests.stages.running import Step, whole


@dataclass
class Rank:
    """One rank of a stage's sub-mesh."""

    program: PlainGraph
    rank: int

    def __post_init__(self) -> None:
        program, mesh = self.program, self.program.strategy.mesh
        groups = ProcessGroups().names(mesh, program.axes())
        indices = {axis: mesh.index(self.rank, axis) for axis in token_axes(program)}  # type: ignore[arg-type]
        graphs = {name: substitute_tokens(part.graph, groups, indices) for name, part in program.parts.items()}
        self.run = {name: compile_graph(graph) for name, graph in graphs.items()}

    def forward(self, tables: dict[str, Tensors], received: Tensors) -> dict[tuple[str, str], Tensor]:
        self.inputs: list[Any] = []
        for info, stored in zip(self.program.inputs, self.program.stored_inputs, strict=True):
            value = None
            if info.kind != "tangent":
                value = received[info.fqn] if info.fqn in received else tables[info.kind][info.fqn]
                value = stored.dist.take(value, self.rank)
            self.inputs.append(value)
        self.kept = self._part("forward", {"input": self.inputs})
        kinds = [o for o in self.program.outputs if o.kind in ("value", "buffer")]
        return {(o.kind, o.fqn): v for o, v in zip(kinds, self.kept, strict=False)}

    def backward(self, tangents: Tensors) -> dict[tuple[str, str], Tensor]:
        inputs = [
            s.dist.take(tangents[i.fqn], self.rank) if i.kind == "tangent" else v
            for i, s, v in zip(self.program.inputs, self.program.stored_inputs, self.inputs, strict=True)
        ]
        late = [o for o in self.program.outputs if o.kind in ("grad", "input_grad")]
        found = self._part("backward", {"input": inputs, "forward": self.kept})
        return {(o.kind, o.fqn): v for o, v in zip(late, found, strict=True)}

    def _part(self, name: str, tables: dict[str, Sequence[Any]]) -> list[Any]:
        with torch.no_grad():
            return list(self.run[name](*(tables[source][i] for source, i in self.program.parts[name].sources)))


def on_rank(programs: list[PlainGraph], model: Model, rank: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """All stages in turn on the same ranks (each has its own sub-mesh in a real run): the loss and local gradients."""
    replica = programs[0].strategy.mesh.coordinate(rank).get("dp", 0)
    ranks = [Rank(program, rank) for program in programs]
    sent: dict[str, Tensor] = {}
    for stage in ranks:
        found = stage.forward(model.tables(replica), sent)
        sent = {fqn: v for (kind, fqn), v in found.items() if kind == "value"}
    loss = sent.pop("loss")
    grads: list[dict[str, Tensor]] = []
    for stage in reversed(ranks):
        back = stage.backward(sent)
        grads.insert(0, {fqn: v for (kind, fqn), v in back.items() if kind == "grad"})
        sent = {fqn: v for (kind, fqn), v in back.items() if kind == "input_grad"}
    return loss, grads


def gathered(program: PlainGraph, local: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole gradients of one stage from those of all ranks, sums taken over axes on which they are partial."""
    mesh, made = program.strategy.mesh, {}
    for info, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if info.kind == "grad":
            partial = {name for axis, _ in stored.dist.partial for name in axis.split(".")}
            sums: dict[Any, tuple[int, Tensor]] = {}
            for rank, grads in enumerate(local):
                key = tuple((axis, i) for axis, i in mesh.coordinate(rank).items() if axis not in partial)
                first, so_far = sums.get(key, (rank, torch.zeros(())))
                sums[key] = first, so_far + grads[info.fqn]
            made[info.fqn] = torch.zeros(stored.meta.shape, dtype=stored.meta.dtype)
            for rank, piece in sums.values():
                stored.dist.put(made[info.fqn], piece, rank)
    return made


@functools.cache
def truth(spec: str, replicas: int) -> Step:
    """One device on the micro-batches of all replicas."""
    model = small(spec)
    steps = [whole(model.graph, model.tables(i)) for i in range(replicas)]
    total = Step(sum(s.loss for s in steps))  # type: ignore[arg-type, misc]
    total.grads = {fqn: sum(s.grads[fqn] for s in steps) for fqn in steps[0].grads}  # type: ignore[misc]
    return total


@functools.cache
def small(spec: str) -> Model:
    """Micro-batches of lengths that divide by all degrees (the runtime pads them to that)."""
    model = loaded("llama", layers=3) if spec == "llama" else loaded("gpt", layers=3, dropout=0.25)
    lengths = [b["labels"].shape[1] // 4 * 4 for b in model.batches]
    batches = [{k: v[:, :T] for k, v in b.items()} for b, T in zip(model.batches, lengths, strict=True)]
    return replace(model, batches=tuple(batches))


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "tp2+sp", "cp2", "dp2.tp2"])
@pytest.mark.parametrize("spec", ["llama", "gpt"])
def test_stages_under_a_strategy(spec, strategy):
    """Values and gradients at the boundary are whole on every rank of a replica."""
    model = small(spec)
    staged = cut_stages(model.graph, 2)
    programs = [lower_forward(stage.as_forward(), strategy) for stage in staged.stages]
    mesh = programs[0].strategy.mesh
    found = run_threads(mesh.size, lambda rank: on_rank(programs, model, rank))
    expected = truth(spec, 2 if "dp" in mesh.names else 1)
    losses = {mesh.coordinate(rank).get("dp", 0): loss for rank, (loss, _) in enumerate(found)}
    torch.testing.assert_close(sum(losses.values()), expected.loss, rtol=1e-10, atol=0)
    grads: dict[str, Tensor] = {}
    for k, program in enumerate(programs):
        for fqn, value in gathered(program, [local[k] for _, local in found]).items():
            grads[fqn] = grads[fqn] + value if fqn in grads else value
    assert grads.keys() == expected.grads.keys()
    for fqn, value in grads.items():
        error = (value - expected.grads[fqn]).norm() / expected.grads[fqn].norm().clamp(min=1e-30)
        assert error <= 1e-10, (fqn, error)


def test_a_stage_has_its_share_of_the_collectives():
    """Megatron's two all-reduces per layer, forward and backward; cutting adds none."""
    graph = loaded("llama", layers=3).graph
    stages = [lower_forward(s.as_forward(), "tp2").collectives() for s in cut_stages(graph, 3).stages]
    assert stages[1] == {"all_reduce": 4}
