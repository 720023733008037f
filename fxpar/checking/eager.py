"""Compare a captured graph with the model that it was captured from, run by plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpar.checking.batches import check_length
from fxpar.errors import ExampleRunError, FxparError
from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.losses import LossFunction, with_metrics
from fxpar.tracer.provenance import line_of_error

NOISE = 1e-3  # gradients smaller than this share of the largest are compared with that share


@dataclass(frozen=True)
class EagerComparison:
    """Relative errors (max |graph - eager| / max |eager|) of loss and gradients, and the worst parameter.

    `factor`: what the loss of the graph is times that of the model, as a mean over so many tokens became a sum.
    """

    loss_rel_err: float
    grad_max_rel_err: float
    worst_param: str
    factor: float = 1.0


class WithoutFloat32(TorchFunctionMode):
    """Inside, what code asks for in float32, or in no dtype, is float64, so that a model in float64 rounds nowhere."""

    def __enter__(self) -> Any:
        self._dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        torch.set_default_dtype(self._dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func, args = Tensor.double, args[:1]
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def compare_with_eager(
    logical: LogicalGraph,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Mapping[str, Tensor],
) -> EagerComparison | None:
    """Run both on `batch`. None if the graph drops out: the model draws its masks from torch's generator.

    `loss_fn` must return the sum over tokens; a mean that capture rewrote to a sum differs by the number of tokens,
    which is divided out. The model's parameters and buffers are left as they are.

    Raises ExampleRunError if the model does not run on the batch, CheckedLengthError for a length that only the model
    takes.
    """
    if logical.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default):
        return None
    params = {i.fqn: dict(model.named_parameters())[i.fqn] for i in logical.params()}
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    wanted = {fqn: p for fqn, p in params.items() if p.requires_grad}
    try:
        loss, _ = with_metrics(loss_fn(model, batch))
    except FxparError:
        raise
    except Exception as error:  # of the user's code
        raise ExampleRunError(error, line_of_error(error)) from error
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])  # batch norms count their steps
        try:
            results = compile_graph(logical.gm.graph)(*_arguments(logical, params, buffers, batch))
        except RuntimeError as error:
            check_length(logical, batch, error)
            raise
    graph_grads = {o.fqn: r for o, r in zip(logical.outputs, results, strict=True) if o.kind == "grad"}
    ratio = float(results[0] / loss.detach()) if float(loss) else 1.0
    # A mean over n tokens became a sum: the graph's loss is n times the model's, and n is a whole number.
    factor = float(round(ratio)) if ratio > 1.5 and abs(ratio / round(ratio) - 1) < 1e-4 else 1.0
    eager = {fqn: g * factor for fqn, g in zip(wanted, grads, strict=True) if g is not None}
    floor = NOISE * max((float(g.abs().max()) for g in eager.values() if g.numel()), default=0.0)
    errors = {fqn: relative_error(graph_grads[fqn], g, floor=floor) for fqn, g in eager.items() if fqn in graph_grads}
    errors |= dict.fromkeys(eager.keys() ^ graph_grads.keys(), float("inf"))  # a gradient that only one of them has
    worst = max(errors, key=errors.__getitem__, default="")
    return EagerComparison(relative_error(results[0], loss.detach() * factor), errors.get(worst, 0.0), worst, factor)


def _arguments(logical: LogicalGraph, params: Mapping, buffers: Mapping, batch: Mapping) -> list[Tensor]:
    arguments = []
    for info in logical.inputs:
        if info.kind == "scale":
            arguments.append(torch.ones((), dtype=info.meta.dtype))
        elif info.kind == "seed":
            arguments.append(torch.tensor(0))
        else:
            source = {"param": params, "buffer": buffers, "batch": batch, "constant": logical.constants}[info.kind]
            arguments.append(source[info.fqn].detach())
    return arguments


def relative_error(value: Tensor, truth: Tensor, whole: Tensor | None = None, floor: float = 0.0) -> float:
    """max |value - truth| / max(max |whole|, floor); inf for a wrong shape or NaN."""
    if value.shape != truth.shape:
        return float("inf")
    if not truth.numel():
        return 0.0
    size = max(float((truth if whole is None else whole).abs().max()), floor)
    gap = float((value - truth).abs().max())
    if gap != gap:
        return float("inf")
    return gap / size if size else gap
