"""`capture`: an unmodified module and a loss become one LogicalGraph."""

from __future__ import annotations

import inspect
import time

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpar.errors import (
    CaptureError,
    DynamicDimError,
    LazyParameterError,
    LossFunctionError,
    WrappedModelError,
    warn,
)
from fxpar.errors.base import one_line
from fxpar.errors.capture import in_words
from fxpar.ir.collector import collector_paused
from fxpar.ir.graph import TOKEN_NUMBERS, LogicalGraph
from fxpar.tracer.dynamic import Dynamic, resolve_dynamic, token_row
from fxpar.tracer.finish import canonical_graph
from fxpar.tracer.provenance import Provenance
from fxpar.tracer.rows import StepOfRows, tell_of_rows
from fxpar.tracer.signature import Batch, make_signature, make_world, model_device, named_batch
from fxpar.tracer.step import LossFunction

_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")  # modules of DataParallel, DDP and FSDP1


def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Batch,
    *,
    dynamic: Dynamic = "auto",
    name: str | None = None,
    tell_unused: bool = True,
    gradients: bool = True,
) -> LogicalGraph:
    """Trace forward, loss and backward of `model` once, on tensors without data; nothing is allocated.

    `loss_fn(model, batch)` returns a scalar: the sum of the losses of all valid tokens (see `fxpar.losses`). Exactly a
    mean is turned into the sum. The graph multiplies it by its input `scale`. `example_batch` is a dict of tensors, or
    a tuple or list of them (called "0", "1", ...); only shapes and dtypes are read.

    `dynamic` says which dims of the batch may change from call to call:

    - "auto": with token ids [B, T] or [T], every dim of length T is the dim "T", and dim 0 of document bounds (keys
      with "cu_seq") is "C". Without token ids dim 0 of all tensors is "B".
    - `{key: {dim: name}}`: these. Dims of one name have one size.
    - None: none.

    `tell_unused`: warn of parameters that the loss does not depend on. Without `gradients` the backward is not traced,
    and the graph ends in loss, metrics and buffers.

    The model is left as it was, also after an error, and may lie on the meta device. Raises a subclass of
    `fxpar.errors.CaptureError` for whatever one graph cannot hold for all batches.
    """
    with torch.inference_mode(False), collector_paused():
        name = name or type(model).__name__
        return _capture(model, loss_fn, example_batch, dynamic, name, tell_unused, gradients)


def _check_model(model: object) -> None:
    """Raise CaptureError for what is no module, WrappedModelError for one that another library has made parallel,
    LazyParameterError for one whose shapes are not known yet.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is {one_line(repr(model))}, not an nn.Module")
    for fqn, module in model.named_modules():
        if type(module).__module__.startswith(_WRAPPERS):
            raise WrappedModelError(type(module).__name__, fqn)
    for fqn, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise LazyParameterError(fqn)


def _check_loss_function(loss_fn: object) -> None:
    """Raise LossFunctionError for what cannot be called, and for torch's losses, which take logits and labels."""
    if not callable(loss_fn):
        raise LossFunctionError(repr(loss_fn))
    of_module = isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss"
    if of_module or getattr(loss_fn, "__module__", "") == "torch.nn.functional":
        raise LossFunctionError(f"{getattr(loss_fn, '__name__', type(loss_fn).__name__)!r} of torch")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError:
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__).rpartition(".")[2]
        raise LossFunctionError(f"{name}{inspect.signature(loss_fn)}") from None
    except ValueError:  # a builtin may have none
        return


def _capture(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Batch,
    dynamic: Dynamic,
    name: str,
    tell_unused: bool,
    gradients: bool,
) -> LogicalGraph:
    started = time.process_time()
    _check_model(model)
    _check_loss_function(loss_fn)
    device = model_device(model)
    batch = named_batch(example_batch)
    dims = resolve_dynamic(dynamic, batch)
    if empty := [dim.name for dim in dims.dims if dim.example == 0]:
        why = "the example batch has nothing in it. Give one with 1 or more, of which only shapes and dtypes are read"
        raise DynamicDimError(f"{in_words(empty[0])} is 0: {why}")
    ids = token_row(batch, dims)
    if ids is not None:
        batch, dims = batch | {TOKEN_NUMBERS: batch[ids].long()}, dims.with_like(TOKEN_NUMBERS, ids)
    world = make_world()
    signature = make_signature(model, batch, world, dims)
    step = StepOfRows(
        model=model,
        signature=signature,
        world=world,
        provenance=Provenance(model),
        device=device,
        loss_fn=loss_fn,
        batch=example_batch,
        with_gradients=gradients,
    )
    raw = step.trace()
    if gradients:
        tell_of_rows(step, batch, dims)
    if raw.unused and tell_unused:
        warn(f"the loss does not depend on {', '.join(raw.unused)}: no gradient, as in autograd")
    fields = canonical_graph(raw, world, dims, started)
    return LogicalGraph(**fields, name=name, averaged=step.averaged, own_backward=step.own_backward)
