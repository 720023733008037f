"""Run a captured graph on real tensors and compare it with eager autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fxpar.ir.graph import LogicalGraph
from fxpar.tracer import capture

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def run(
    graph: LogicalGraph, model: nn.Module, batch: Mapping[str, Tensor], scale: float = 1.0, seed: int = 0
) -> dict[tuple[str, str], Tensor]:
    """(kind, fqn) -> result of the graph on the model's own tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    values = []
    for found in graph.inputs:
        if found.kind == "scale":
            values.append(torch.tensor(scale, dtype=found.meta.dtype))
        elif found.kind == "seed":
            values.append(torch.tensor(seed))
        else:
            values.append(batch[found.fqn] if found.kind == "batch" else tensors[found.fqn])
    before = [value.detach().clone() for value in values]
    with torch.no_grad():
        results = graph.gm(*values)
    for old, value, found in zip(before, values, graph.inputs, strict=True):
        assert torch.equal(old, value), f"the graph wrote into {found.fqn}"
    return {(out.kind, out.fqn): result for out, result in zip(graph.outputs, results, strict=True)}


def eager(model: nn.Module, loss_fn: Loss, batch: Mapping[str, Tensor], scale: float = 1.0) -> dict:
    """What eager autograd gives: loss and gradients (zeros where there is none)."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = loss_fn(model, dict(batch)) * scale
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    results = {("loss", "loss"): loss.detach()}
    for name, grad in zip(named, grads, strict=True):
        if grad is not None:
            results["grad", name] = grad
    return results


def difference(results: Mapping, expected: Mapping) -> float:
    """Largest error over all tensors, relative to the tensor (to 1e-3 of the largest one for small tensors)."""
    largest = max(float(t.abs().max()) for key, t in expected.items() if key[0] == "grad")
    worst = 0.0
    for key, want in expected.items():
        got = results[key]
        assert got.shape == want.shape, (key, got.shape, want.shape)
        assert got.dtype == want.dtype, (key, got.dtype, want.dtype)
        size = max(float(want.abs().max()), 1e-3 * largest)
        worst = max(worst, float((got - want).abs().max()) / size)
    return worst


def check(
    model: nn.Module,
    loss_fn: Loss,
    batches: list[dict[str, Tensor]],
    tolerance: float = 1e-12,
    expected: Loss | None = None,
    **options: object,
) -> LogicalGraph:
    """Capture with the first batch; compare with eager (of `expected`, if given) on all of them."""
    graph = capture(model, loss_fn, batches[0], **options)
    for batch in batches:
        found = difference(run(graph, model, batch, 0.25), eager(model, expected or loss_fn, batch, 0.25))
        assert found <= tolerance, f"{found:.1e} > {tolerance:.1e} at {[tuple(t.shape) for t in batch.values()]}"
    return graph


def ops(graph: LogicalGraph) -> list[str]:
    """Names of the ops of a graph, such as "aten.mm" or "fxpar.attention", in order."""
    names = [str(n.target) for n in graph.gm.graph.nodes if n.op == "call_function"]
    return [name.removesuffix(".default") for name in names]
