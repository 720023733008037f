"""Run a captured forward on all ranks as threads, with the loss outside, and put the gradients together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.ir.exec_graph import PlainGraph
from fxpar.ir.graph import ForwardGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower_forward
from fxpar.models import load
from fxpar.runtime.plain import PlainRunner
from fxpar.torch_api.threaded import run_threads
from fxpar.tracer import capture_forward
from fxpar.transport.groups import ProcessGroups

Tensors = Mapping[str, Tensor]
Loss = Callable[[Any, Tensors], Tensor]
STRATEGIES = ("dp2", "tp2", "tp2+sp", "cp2", "dp2.tp2")


@dataclass
class Outcome:
    """What one rank found."""

    values: Any = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def token_mean(output: Any, batch: Tensors) -> Tensor:
    """Mean cross entropy, as users write it."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def local_params(program: PlainGraph, params: Tensors, rank: int) -> dict[str, Tensor]:
    return {
        info.fqn: stored.dist.take(params[info.fqn], rank)
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }


def on_ranks(program: PlainGraph, work: Callable[[PlainRunner, int, int], Any]) -> list[Any]:
    """`work(runner, rank, replica)` on every rank."""
    mesh = program.strategy.mesh

    def main(rank: int) -> Any:
        runner = PlainRunner(program, rank, ProcessGroups().names(mesh, program.axes()))
        return work(runner, rank, mesh.coordinate(rank).get("dp", 0))

    return run_threads(mesh.size, main)


def run(
    program: PlainGraph,
    params: Tensors,
    buffers: Tensors,
    batches: Sequence[Tensors],
    loss: Loss,
    keys: Sequence[str],
    seed: int = 0,
) -> list[Outcome]:
    """One forward and backward on every rank; replica r gets `batches[r]`, whose `keys` are the model's arguments."""

    def work(runner: PlainRunner, rank: int, replica: int) -> Outcome:
        batch = batches[replica]
        done = Outcome()
        done.values = runner(
            local_params(program, params, rank),
            buffers,
            (),
            {key: batch[key] for key in keys},
            seed=seed,
            on_gradients=done.grads.update,
            on_buffers=done.buffers.update,
        )
        loss(done.values, batch).backward()
        return done

    return on_ranks(program, work)


def gathered(program: PlainGraph, outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """Whole gradients, summed over replicas."""
    mesh = program.strategy.mesh
    whole: dict[str, Tensor] = {}
    for info, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if info.kind != "grad":
            continue
        partial = {name for axis, _ in stored.dist.partial for name in axis.split(".")}
        sums: dict[Any, tuple[int, Tensor]] = {}
        for rank, outcome in enumerate(outcomes):
            key = tuple((axis, i) for axis, i in mesh.coordinate(rank).items() if axis not in partial)
            first, so_far = sums.get(key, (rank, torch.zeros(())))
            sums[key] = first, so_far + outcome.grads[info.fqn]
        whole[info.fqn] = torch.zeros(stored.meta.shape, dtype=stored.meta.dtype)
        for rank, piece in sums.values():
            stored.dist.put(whole[info.fqn], piece, rank)
    return whole


def eager(model: nn.Module, batches: Sequence[Tensors], loss: Loss, keys: Sequence[str]) -> tuple[list[Any], Tensors]:
    """The model itself: outputs per batch, gradients summed."""
    model.zero_grad()
    outputs = []
    for batch in batches:
        outputs.append(model(**{key: batch[key] for key in keys}))
        loss(outputs[-1], batch).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(found: Tensors, truth: Tensors) -> float:
    """Largest relative error of a tensor, by its largest element (at least a thousandth of the largest of all)."""
    assert found.keys() == truth.keys()
    floor = 1e-3 * max(float(t.detach().abs().max()) for t in truth.values())
    return max(
        float((found[k] - t).detach().abs().max()) / max(float(t.detach().abs().max()), floor) for k, t in truth.items()
    )


def check(
    logical: ForwardGraph,
    strategy: str,
    params: Tensors,
    buffers: Tensors,
    batches: Sequence[Tensors],
    truth: tuple[Sequence[Tensor], Tensors],
    keys: Sequence[str],
    loss: Loss = token_mean,
) -> None:
    """Compare values and gradients of every rank with the truth, to 1e-10."""
    program = lower_forward(logical, strategy)
    replicas = Strategy.parse(strategy).degree("dp")
    outcomes = run(program, params, buffers, batches, loss, keys)
    for rank, outcome in enumerate(outcomes):
        replica = program.strategy.mesh.coordinate(rank).get("dp", 0)
        value = outcome.values if isinstance(outcome.values, Tensor) else outcome.values.logits
        assert error({"": value}, {"": truth[0][replica]}) <= 1e-10
    assert replicas == len(truth[0])
    assert error(gathered(program, outcomes), truth[1]) <= 1e-10


KEYS = {"vit": ("pixel_values",), "mlp": ("x",)}


@dataclass(frozen=True)
class Case:
    """A model in float64, its forward, two batches of different lengths."""

    model: nn.Module
    graph: ForwardGraph
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batches: tuple[dict[str, Tensor], ...]
    keys: tuple[str, ...]


@functools.cache
def case(spec: str, **options: str) -> Case:
    sizes = (6, 4) if spec in KEYS else (13, 22)
    loaded = load(spec, dtype=torch.float64, tokens=sizes, options=options)
    keys = KEYS.get(spec, ("input_ids",) if spec.startswith("hf:") else ("input_ids", "position_ids"))
    batches = tuple(dict(b) for b in loaded.batches[:2])
    graph = capture_forward(loaded.model, (), {key: batches[0][key] for key in keys})
    return Case(loaded.model, graph, loaded.params(), loaded.buffers(), batches, keys)


@functools.cache
def truth(spec: str, count: int, **options: str) -> Any:
    one = case(spec, **options)
    return eager(one.model, one.batches[:count], token_mean, one.keys)


class Several(nn.Module):
    """Returns tensors in a dict with a size, a flag, a tensor without gradient, the input, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.unused = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, mode: str = "all", extra: list[Tensor] | None = None) -> dict[str, Any]:
        h = torch.tanh(self.into(x if extra is None else x + extra[0]))
        y = self.out(h)
        return {"y": y, "pair": (h, y), "best": y.argmax(-1), "rows": x.shape[0], "mode": mode, "same": x, "none": None}
