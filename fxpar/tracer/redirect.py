"""Calls of torch functions that become fxpar ops, sums or errors while a model is captured.

A TorchFunctionMode sees every call before autograd and before ATen picks a kernel for the device, so the graph does not
depend on the device. A handler runs with the mode off; functions of `torch.nn.functional` that call others are run
through `unwrapped`, so that the inner calls are seen too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpar.errors import DeviceError, FixedLengthError
from fxpar.torch_api.tracing import OpOverload, OpOverloadPacket, copied_to_cpu
from fxpar.torch_api.tree import mapped
from fxpar.torch_api.varlen import varlen_attention
from fxpar.tracer import documents, dropout, embedding, loss_functions, varlen
from fxpar.tracer.context import CaptureContext
from fxpar.tracer.provenance import user_line

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of `torch.nn.functional` that skips its own check for modes, not that of what it calls."""
    names = {**function.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: documents.packed_attention,
    F.dropout: dropout.functional_dropout,
    torch.dropout: lambda input, p, train: dropout.functional_dropout(input, p, train),
    F.dropout1d: dropout.channel_dropout(3),
    F.dropout2d: dropout.channel_dropout(0),
    F.dropout3d: dropout.channel_dropout(5),
    F.embedding: embedding.functional_embedding,
    varlen_attention: varlen.varlen_attention,
    **loss_functions.HANDLERS,
}
_RANDOM = {F.alpha_dropout, F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d}
_COMPOSITE = {F.multi_head_attention_forward, torch.autograd.grad}
# What a forward is told of the device that it will run on; of `x.device` see `tracing.told_to_be_on`.
_IS: dict[Any, str] = {getattr(Tensor, f"is_{kind}").__get__: kind for kind in ("cpu", "cuda", "xpu", "mps")}
_GRAD_FN = cast("Any", Tensor).grad_fn.__get__


class Redirect(TorchFunctionMode):
    """Send calls to the handlers above, and keep tensors on the one traced device, without telling the forward."""

    def __init__(self, context: CaptureContext) -> None:
        super().__init__()
        self.context = context
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of constants of the model, with what they are copies of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.context.device.type != "cpu":
            device = self.context.device
            if func in _IS and args[0].device.type == "cpu":
                return device.type == _IS[func]
            if func is Tensor.get_device:
                return -1 if device.index is None else device.index
            args, kwargs = mapped(self._traced, Tensor, (args, kwargs))
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _COMPOSITE:
            with self:
                return unwrapped(func)(*args, **kwargs)
        if func in _RANDOM and kwargs.get("training", True):
            raise self.context.unsupported(
                f"the random function {func.__name__}",
                "Use dropout, or draw the noise outside and pass it in the batch.",
            )
        if func is Tensor.__len__:
            self._check_free("len() of a tensor", args[0], 0, "write x.shape[0]")
        if func in (Tensor.unbind, torch.unbind):  # what a loop over a tensor calls
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            self._check_free(
                "the number of turns of a loop over a tensor", args[0], dim, "compute on all of it at once"
            )
        if func is Tensor.register_hook or (func == _GRAD_FN and user_line()):  # which takes hooks too
            self.context.gradient_hooks.append(user_line() or "an unknown line")
        if func is Tensor.cuda:
            self._check_device("cuda")
            return args[0]
        if func is Tensor.to:
            args = tuple(self._on_traced_device(a) for a in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._on_traced_device(kwargs["device"])}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if isinstance(func, OpOverload | OpOverloadPacket):  # such as one of the user's own
                error.add_note(f"raised by the op {func}")
            raise

    def _check_free(self, what: str, tensor: Tensor, dim: int, instead: str) -> None:
        """Raise FixedLengthError for a size that is symbolic: the trace would hold for this length alone."""
        names = sorted(self.context.world.named(tensor.shape[dim])) if tensor.dim() else ()
        if names:
            raise FixedLengthError(what, " and ".join(names), instead, user_line())

    def _traced(self, tensor: Tensor) -> Tensor:
        """A tensor of the model that is neither parameter nor buffer comes to the CPU, always as the same one."""
        if id(tensor) not in self._copies:
            copy = copied_to_cpu(tensor)
            if copy is tensor:
                return tensor
            self._copies[id(tensor)] = tensor, copy
        return self._copies[id(tensor)][1]

    def _on_traced_device(self, value: Any) -> Any:
        """A device of the model -> the CPU, where it is traced; anything else unchanged."""
        if isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        if not isinstance(value, (str, torch.device)):
            return value
        device = torch.device(value)
        if device.type in ("cpu", "meta"):
            return value
        self._check_device(device.type)
        return torch.device("cpu")

    def _check_device(self, device_type: str) -> None:
        if device_type != self.context.device.type:
            raise DeviceError(
                f"module {self.context.provenance.fqn!r} asks for device {device_type!r}, but the model is on "
                f"{self.context.device.type!r}. Create tensors on the device of an input, such as x.device"
            )
