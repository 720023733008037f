"""`capture_forward`: a module's forward becomes a graph whose loss is outside, with gradients through tangents."""

from __future__ import annotations

import inspect
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from fxpar.errors import UnsupportedOpError, a_type
from fxpar.ir.collector import collector_paused
from fxpar.ir.graph import CallStructure, ForwardGraph, Input, Output, Size, SizeRef, TensorMeta, ValueRef, dim_symbol
from fxpar.torch_api import tracing
from fxpar.torch_api.tree import flatten, flatten_call, unflatten
from fxpar.tracer.context import CaptureContext
from fxpar.tracer.dynamic import Dynamic, resolve_dynamic
from fxpar.tracer.finish import canonical_graph
from fxpar.tracer.provenance import Provenance, calls_user_code
from fxpar.tracer.signature import autocast_dtype, make_signature, make_world, model_device, named_batch
from fxpar.tracer.step import RawTrace, Traced

_PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class ForwardCall:
    """The arguments of a forward: its tensors by name, the other leaves, and how they were put together."""

    tensors: dict[str, Tensor]
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    structure: Any

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with other tensors."""
        rest = iter(self.constants)
        return unflatten([next(rest) if name is None else tensors[name] for name in self.names], self.structure)


def take_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardCall:
    """A call by name: a tensor argument has the name of its parameter in `model.forward`, one inside a container that
    name and its position.
    """
    leaves, structure = flatten_call(args, kwargs)
    names = [
        f"{name}.{i}" if nested else name
        for name, value in (*zip(_positional(model, len(args)), args, strict=True), *sorted(kwargs.items()))
        for parts, nested in (_leaves(value),)
        for i in range(parts)
    ]
    keys = [name if isinstance(leaf, Tensor) else None for name, leaf in zip(names, leaves, strict=True)]
    tensors = {key: leaf for key, leaf in zip(keys, leaves, strict=True) if key is not None}
    constants = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
    return ForwardCall(tensors, tuple(keys), constants, structure)


def _leaves(value: Any) -> tuple[int, bool]:
    found, _ = flatten(value)
    return len(found), not (len(found) == 1 and found[0] is value)


def _positional(model: nn.Module, count: int) -> list[str]:
    """Names of the first `count` positional parameters of the forward."""
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [*names, *(f"argument.{i}" for i in range(len(names), count))][:count]


def call_key(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    captured: Mapping[str, tuple[Size, ...]] | None = None,
) -> Hashable:
    """What a captured forward depends on besides the model and `gradients`: equal keys, one graph. `captured` as in
    `capture_forward`.

    Structure, dtypes, static sizes and names of dynamic dims, who requires a gradient (arguments and parameters), what
    is no tensor, modes of the modules, autocast.
    """
    call = take_call(model, args, kwargs or {})
    dims = resolve_dynamic("auto", call.tensors, captured)
    tensors = tuple(
        (key, t.dtype, t.requires_grad, tuple(map(str, dims.expressions(key, t)))) for key, t in call.tensors.items()
    )
    constants = tuple((type(c).__qualname__, repr(c)) for c in call.constants)
    autocast = autocast_dtype(model_device(model))
    modes = tuple(module.training for module in model.modules())
    trained = tuple(p.requires_grad for p in model.parameters())
    return str(call.structure), call.names, tensors, constants, autocast, modes, trained


def capture_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic = "auto",
    captured: Mapping[str, tuple[Size, ...]] | None = None,
    training: bool | None = None,
    gradients: bool = True,
    name: str | None = None,
) -> ForwardGraph:
    """Trace `model(*args, **kwargs)` once, on tensors without data; nothing is allocated.

    The tensors that the forward returns, in any nesting, become results of the graph. With `gradients` each of them
    that depends on a trainable parameter (or on an argument that requires a gradient) gets an input of its shape, its
    tangent, and the gradients are those of sum(value * tangent). A parameter on which nothing depends has none.

    `dynamic` is as in `capture`, by the names of the forward's parameters; shapes that were `captured` of a batch, by
    its keys, tell what "auto" cannot: which of several dims of a tensor of that name are tokens. `training` sets the
    mode of every module for the trace; by default each is in the mode that it is in. Arguments that are no tensors are
    part of the graph.

    Raises a subclass of CaptureError, as `capture` does, and UnsupportedOpError for a forward that returns objects.
    """
    started = time.process_time()
    call = take_call(model, args, kwargs or {})
    batch = named_batch(call.tensors)
    dims = resolve_dynamic(dynamic, batch, captured)
    with torch.inference_mode(False), collector_paused():
        world = make_world()
        signature = make_signature(
            model, batch, world, dims, scale=False, gradients=gradients, batch_gradients=gradients
        )
        forward = Forward(
            model=model,
            signature=signature,
            world=world,
            provenance=Provenance(model),
            device=model_device(model),
            arguments=call,
            training=training,
            differentiate=gradients and any(i.requires_grad for i in signature.inputs),
        )
        raw = forward.trace()
        tracing.inputs_first(raw.gm)
        fields = canonical_graph(raw, world, dims, started)
        fields |= {"own_backward": forward.own_backward, "structure": forward.structure()}
        return ForwardGraph(**fields, name=name or type(model).__name__)


@calls_user_code
def _call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


@dataclass(kw_only=True)
class Forward(Traced):
    """Forward, and gradients through tangents."""

    arguments: ForwardCall
    training: bool | None
    differentiate: bool
    returned: Any = None
    restarting: tuple[str, ...] = ()
    leaves: list[Any] = field(default_factory=list)

    def call(self, context: CaptureContext) -> Any:
        """What the forward returns."""
        args, kwargs = self.arguments.rebuilt(context.batch)
        return _call_model(self.model, args, kwargs)

    def results(self, context: CaptureContext, values: Sequence[Tensor]) -> list[Tensor]:
        """The returned tensors, then the gradients."""
        leaves, self.returned = flatten(self.called(context))
        self.restarting = tuple(sorted(context.restarting))
        tensors = self._values(leaves)
        if self.differentiate:
            self.look_for_own_backward(context, tensors)
        grads = self._gradients(tensors, values) if self.differentiate else []
        return [*(t.detach() for t in tensors), *grads]

    def structure(self) -> CallStructure:
        """How the graph is called and what it returns."""
        call = self.arguments
        return CallStructure(
            call.structure, call.names, call.constants, self.returned, tuple(self.leaves), self.restarting
        )

    def trace(self) -> RawTrace:
        """As `Traced.trace`, in the mode that is asked for; sizes that the forward returns are then expressions in the
        dynamic dims.
        """
        modes = {module: module.training for module in self.model.modules()}
        try:
            for module in modes:
                module.training = module.training if self.training is None else self.training
            raw = super().trace()
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.leaves = [self._size(leaf) if isinstance(leaf, torch.SymInt) else leaf for leaf in self.leaves]
        return raw

    def _values(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors among the leaves, each once; sets what every leaf is."""
        found: dict[int, tuple[str, Tensor]] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensor = leaf if tracing.node_of(leaf) is not None else leaf.clone()
                fqn, _ = found.setdefault(id(leaf), (str(len(found)), tensor))
                self.leaves.append(ValueRef(fqn))
            elif isinstance(leaf, (*_PLAIN, torch.SymInt)):
                self.leaves.append(leaf)
            else:
                what = f"a forward that returns {a_type(leaf)}"
                raise UnsupportedOpError(what, "Return tensors in tuples, lists, dicts or dataclasses.")
        self.outputs = [Output("value", fqn) for fqn, _ in found.values()]
        return [tensor for _, tensor in found.values()]

    def _gradients(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        wanted = self.trained(values)
        made, tangents = [], []
        for out, tensor in zip(list(self.outputs), tensors, strict=True):
            if tensor.requires_grad and tensor.is_floating_point():
                made.append(tensor)
                tangents.append(self._tangent(out.fqn, tensor))
        if not made:
            return []
        with torch.autocast("cpu", enabled=False):
            grads = torch.autograd.grad(made, [v for _, v in wanted], tangents, allow_unused=True)
        self.unused = tuple(i.fqn for (i, _), grad in zip(wanted, grads, strict=True) if grad is None)
        kinds = {"param": "grad", "batch": "input_grad"}
        found = [(i, grad) for (i, _), grad in zip(wanted, grads, strict=True) if grad is not None]
        self.outputs += [Output(kinds[i.kind], i.fqn) for i, _ in found]  # type: ignore[arg-type]
        return [grad for _, grad in found]

    def _tangent(self, fqn: str, value: Tensor) -> Tensor:
        tangent = tracing.new_input(value.shape, value.dtype, "tangent", f"tangent_{fqn}")
        shape = tuple(self._expression(size) for size in value.shape)
        found = Input("tangent", fqn, TensorMeta(shape, value.dtype))
        self.signature = self.signature.and_input(found, tangent)
        return tangent

    def _expression(self, size: Any) -> Any:
        symbols = {symbol: dim_symbol(name) for symbol, name in self.world.names().items()}
        found = self.world.expression(size)
        return found.xreplace(symbols) if isinstance(found, sympy.Basic) else found

    def _size(self, size: torch.SymInt) -> Any:
        found = self._expression(size)
        return SizeRef(found) if getattr(found, "free_symbols", None) else int(found)


__all__ = ["ForwardCall", "call_key", "capture_forward", "take_call"]
