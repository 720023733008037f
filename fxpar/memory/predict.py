"""What a strategy takes on the fullest rank: state that stays, and the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy
from torch import fx

from fxpar.errors import DimNameError
from fxpar.exec_graph import ExecGraph
from fxpar.graph import AnnotatedGraph
from fxpar.memory.liveness import ONE_THREAD, Peak, body_peak
from fxpar.memory.workspace import Conditions
from fxpar.passes.accumulate_gradients import AccumulateGradients
from fxpar.store.home import home_layout
from fxpar.store.weights import param_specs
from fxpar.switch.layout import ParamLayout, layout_of

OPTIMIZER_BYTES = 8
"""AdamW: two fp32 moments per element of the masters."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes on the fullest rank.

    `master_bytes`: the home layout; `optimizer_bytes`: its two moments; `weight_bytes`: what the graph computes with;
    `home_gradient_bytes`: gradients as the optimizer sees them; `gradient_bytes`: what the graph accumulates in;
    `staging_bytes`: the bound of a switch's messages; `body`: the peak of one micro-batch above all that.
    """

    strategy: str
    sizes: Mapping[str, int]
    micro_batches: int
    master_bytes: int
    optimizer_bytes: int
    weight_bytes: int
    home_gradient_bytes: int
    gradient_bytes: int
    staging_bytes: int
    body: Peak

    @property
    def state_bytes(self) -> int:
        """What is there all the time."""
        return self.master_bytes + self.optimizer_bytes + self.weight_bytes + self.home_gradient_bytes

    @property
    def step_bytes(self) -> int:
        """The peak of micro-batches: their accumulators and the body."""
        return self.body.total_bytes + (self.gradient_bytes if self.micro_batches > 1 else 0)

    @property
    def switch_bytes(self) -> int:
        """The peak of what lies between: gradients on their way home, messages of a switch."""
        return self.gradient_bytes + self.staging_bytes

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + max(self.step_bytes, self.switch_bytes)

    def to_json(self) -> dict[str, Any]:
        """All numbers, sums included."""
        body = {**asdict(self.body), "total_bytes": self.body.total_bytes}
        sums = {name: getattr(self, name) for name in ("state_bytes", "step_bytes", "switch_bytes", "peak_bytes")}
        return {**asdict(self), "sizes": dict(self.sizes), "body": body, **sums}


def predict_memory(
    program: ExecGraph,
    sizes: Mapping[str, int] | None = None,
    *,
    micro_batches: int = 1,
    staging_bytes: int = 64 << 20,
    conditions: Conditions = ONE_THREAD,
) -> MemoryPrediction:
    """Predict from a program that was lowered for a store (`lower(..., for_store=True)`), optimizer AdamW.

    `sizes` are the dynamic dims of a replica's micro-batch by name (the captured example's where missing), rounded up
    as the runtime pads them. `micro_batches` of 2 or more: later ones add to what the first has left.

    Raises DimNameError for a name that is no dynamic dim.
    """
    whole = padded_sizes(program, sizes or {})
    dims = {dim.symbol: whole[dim.name] for dim in program.dims}
    specs, world = param_specs(program), program.strategy.world
    home, layout = home_layout(specs, world), layout_of(program)
    trained = {out.fqn for out in program.outputs if out.kind == "grad"}
    gradients = _only(home, trained)
    masters = sum(-(-_bytes(home, fqn) // p.dtype.itemsize) for fqn, p in gradients.params.items())
    grads = [s for o, s in zip(program.outputs, program.stored_outputs, strict=True) if o.kind == "grad"]
    return MemoryPrediction(
        strategy=str(program.strategy),
        sizes=whole,
        micro_batches=micro_batches,
        master_bytes=home.max_bytes(),
        optimizer_bytes=OPTIMIZER_BYTES * masters,
        weight_bytes=layout.max_bytes(),
        home_gradient_bytes=gradients.max_bytes(),
        gradient_bytes=sum(s.local.numel(dims) * s.local.dtype.itemsize for s in grads),
        staging_bytes=min(staging_bytes, 2 * layout.max_bytes()) if world > 1 else 0,
        body=program_peak(program, dims, micro_batches=micro_batches, conditions=conditions),
    )


def program_peak(
    program: ExecGraph,
    dims: Mapping[sympy.Symbol, int],
    *,
    micro_batches: int = 1,
    conditions: Conditions = ONE_THREAD,
) -> Peak:
    """The peak of the program's body on the fullest rank: of the first and the last place on each mesh axis."""
    graph = program.body.graph if micro_batches == 1 else _later_body(program)
    last = {axis: degree - 1 for axis, degree in program.strategy.axes}
    places = [{}, last] if program.strategy.world > 1 else [{}]
    return max((body_peak(graph, dims, at, conditions) for at in places), key=lambda peak: peak.total_bytes)


def padded_sizes(program: ExecGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Every dynamic dim by name. Raises DimNameError."""
    known = {dim.name: dim.example for dim in program.dims}
    for name in sizes:
        if name not in known:
            raise DimNameError(name, known)
    whole = {**known, **sizes}
    return {
        name: -(-size // program.divisors.get(name, 1)) * program.divisors.get(name, 1) for name, size in whole.items()
    }


def _later_body(program: ExecGraph) -> fx.Graph:
    """The body that adds to earlier results."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(program.body.graph, {}))
    graph = AnnotatedGraph(copy, (), (), (), program.strategy)
    keep = tuple(i for i, node in enumerate(program.body.results) if "buffer" in node.meta)
    AccumulateGradients(keep=keep)(graph)
    return graph.graph


def _only(layout: ParamLayout, names: set[str]) -> ParamLayout:
    return ParamLayout(layout.name, layout.world, {f: p for f, p in layout.params.items() if f in names})


def _bytes(layout: ParamLayout, fqn: str) -> int:
    return _only(layout, {fqn}).max_bytes()
