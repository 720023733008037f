"""`StagedGraph`: the stages of a model and what goes from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.ir.graph import LogicalGraph, TensorMeta


@dataclass(frozen=True)
class Crossing:
    """A value that one stage sends to its neighbour, by its name in the graph that was cut (whole, one replica's)."""

    name: str
    meta: TensorMeta

    def __str__(self) -> str:
        return f"%{self.name} {self.meta}"


@dataclass
class StageGraph(LogicalGraph):
    """Forward and backward of one stage as one graph.

    Inputs are of kind "received" and "received_grad" too, results of kind "sent" and "sent_grad", each by the name of
    its `Crossing`. The same value may be received and sent: it is passed along. Only what the stage needs is among its
    inputs; a size that no batch tensor of the stage has is read from an activation. The loss is on the last stage.
    """

    index: int = field(kw_only=True)
    received: tuple[Crossing, ...] = field(kw_only=True)
    sent: tuple[Crossing, ...] = field(kw_only=True)
    gradients_received: tuple[Crossing, ...] = field(kw_only=True)


@dataclass(frozen=True)
class SharedParam:
    """A parameter on several stages, such as a tied embedding.

    Its gradient is the sum of one term each of the stages `terms`. Added up in this order it has the bits of the graph
    that was cut, unless a stage other than the first of `terms` reads the parameter more than once.
    """

    fqn: str
    stages: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass
class StagedGraph:
    """The stages in order; stage i + 1 begins with module `cuts[i]`. `flops` are what each stage's forward costs."""

    stages: tuple[StageGraph, ...]
    cuts: tuple[str, ...]
    shared: tuple[SharedParam, ...]
    flops: tuple[int, ...]
    name: str = "model"
    timings: dict[str, float] = field(default_factory=dict)

    def params(self, stage: int) -> tuple[str, ...]:
        """FQNs of the parameters of a stage."""
        return tuple(info.fqn for info in self.stages[stage].params())

    def __str__(self) -> str:
        lines = [f"{self.name} in {len(self.stages)} stages"]
        total = sum(self.flops) or 1
        for stage, flops in zip(self.stages, self.flops, strict=True):
            start = f" from {self.cuts[stage.index - 1]}" if stage.index else ""
            params = len(self.params(stage.index))
            lines.append(f"  stage {stage.index}{start}: {params} parameters, {flops / total:.0%} of the FLOPs")
            if stage.sent:
                lines.append(f"    -> {', '.join(map(str, stage.sent))}")
                lines.append(f"    <- {', '.join(map(str, stage.gradients_received)) or 'nothing'}")
        lines += [f"  {p.fqn} is on stages {', '.join(map(str, p.stages))}" for p in self.shared]
        return "\n".join(lines)
