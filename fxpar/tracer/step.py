"""One training step as a function of tensors, and the trace of it."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.errors import (
    CaptureError,
    DataDependentError,
    DeviceError,
    FixedLengthError,
    ForwardArgumentsError,
    LossCallError,
    LossError,
    MissingInputError,
    MixedDtypesError,
    SymbolicSizeError,
    UnsupportedOpError,
    warn,
)
from fxpar.errors.capture import in_words
from fxpar.ir.graph import TOKEN_NUMBERS, Averaged, Input, Output
from fxpar.ir.node_meta import fqn_of, source_of
from fxpar.losses import LossFunction, with_metrics
from fxpar.torch_api import tracing
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.computed import Computed
from fxpar.tracer.context import CaptureContext, running
from fxpar.tracer.decompositions import DECOMPOSITIONS
from fxpar.tracer.hosts import host_models
from fxpar.tracer.loss import as_sum
from fxpar.tracer.metrics import as_results
from fxpar.tracer.provenance import Provenance, calls_user_code, failed_on_size, line_of_error
from fxpar.tracer.redirect import Redirect
from fxpar.tracer.repeats import gradients
from fxpar.tracer.signature import Batch, Signature
from fxpar.tracer.state import State, unchanged

_ACCELERATORS = ("cuda", "xpu", "mps")
_INSTEAD_OF_FLEX = (
    "Call torch.nn.functional.scaled_dot_product_attention or varlen_attn; documents can be given with "
    "fxpar.tracer.documents.packed."
)
_OF_NUMPY = ".numpy() is not supported"  # what torch says of a tensor without values
_UNHASHABLE = "unhashable type: non-nested SymInt"  # what torch says of a size that is to be a key
_INSTEAD_OF_KEY = "make once what holds for the longest length, and take a part of it, such as table[:T]"


@dataclass
class RawTrace:
    """What tracing found: the nodes as ATen made them, their results in order (reassigned buffers last), parameters
    that nothing depends on, and what inputs the signature lacked.
    """

    gm: fx.GraphModule
    outputs: tuple[Output, ...]
    unused: tuple[str, ...]
    signature: Signature


aten = torch.ops.aten
_PRODUCTS = {  # of one dtype
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.convolution.default,
}


@calls_user_code
def _call_loss(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Any:
    try:
        return loss_fn(model, batch)
    except KeyError as error:  # of any other error `TracedStep` makes one of its own
        if not _inside(error, inspect.unwrap(model.forward)):
            keys = f"; the keys of the batch are {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
            error.add_note(f"fxpar calls the loss function with the model and the batch, loss(model, batch){keys}")
        raise


def _inside(error: BaseException, function: Callable[..., object]) -> bool:
    """Whether `function` was at work when the error came up."""
    code = getattr(function, "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(kw_only=True)
class Traced(ABC):
    """Runs something of the model on the values of `signature.inputs`: what, a subclass says in `results`."""

    model: nn.Module
    signature: Signature
    world: FakeWorld
    provenance: Provenance
    device: torch.device
    outputs: list[Output] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    differentiate: bool = True
    own_backward: str | None = None
    functions: tuple[Any, ...] = ()  # the user's, beside the model
    state: State | None = None
    computed: Computed | None = None

    @abstractmethod
    def call(self, context: CaptureContext) -> Any:
        """Run the user's code: what is traced, before anything is made of it."""

    def called(self, context: CaptureContext) -> Any:
        """What `call` returns. What it has computed is kept if it has changed something that code keeps."""
        found = self.call(context)
        seed = node_of(context.seed)
        if self.state is not None and seed is not None and self.state.changed():
            self.computed = Computed.now(seed.graph, self.state.tensors())
        return found

    @abstractmethod
    def results(self, context: CaptureContext, values: Sequence[Tensor]) -> list[Tensor]:
        """The results of the graph; also sets `outputs`, and `signature` where the graph has further inputs."""

    def trace(self) -> RawTrace:
        """Trace it. Raises the errors of `fxpar.capture`; the model is left as it was."""
        signature = self.signature  # it gets further inputs
        try:
            with (
                tracing.autocast_on_cpu(_ACCELERATORS),
                host_models(self.model),  # which sets options of theirs
                unchanged(self.model, self.functions) as state,
            ):
                self.state = state
                gm = tracing.trace(self.world, self._run, self.signature.fakes, DECOMPOSITIONS)
                self._check_products(gm)
                again = replace(self, signature=signature, provenance=Provenance(self.model), computed=None)
                state.tell(self.computed, again._call_again, self.world.in_names)
                self._tell_of_texts()
        except CaptureError as error:
            error.args = tuple(self.world.in_names(str(arg)) for arg in error.args)
            raise
        except Exception as error:
            error.args = tuple(self.world.in_names(arg) if isinstance(arg, str) else arg for arg in error.args)
            translated = self._translate(error)
            if translated is None:
                fqn, line = self.provenance.fqn, line_of_error(error)
                where = (f"module {fqn!r}" if fqn else "the model") + (f", at {line}" if line else "")
                error.add_note(f"raised while fxpar captured {where}, on tensors without data")
                raise
            raise translated from error
        return RawTrace(gm, tuple(self.outputs), self.unused, self.signature)

    def _check_products(self, gm: fx.GraphModule) -> None:
        """Raise MixedDtypesError for a product of two dtypes: it would fail in the first step, not on fake tensors."""
        for node in gm.graph.nodes:
            if node.target not in _PRODUCTS:
                continue
            dtypes = {str(value.dtype) for n in node.all_input_nodes if isinstance(value := n.meta.get("val"), Tensor)}
            if len(dtypes) > 1:
                given = [info for info in self.signature.inputs if info.kind == "batch"]
                batch = {info.fqn: str(info.meta.dtype) for info in given if info.meta.dtype.is_floating_point}
                raise MixedDtypesError(dtypes, batch, fqn_of(node), source_of(node))

    def _tell_of_texts(self) -> None:
        for place in self.world.texts:
            warn(
                f"{place} makes a text of {' or '.join(map(in_words, sorted(self.world.symbols)))} at capture a name "
                "and no number: what the model decides by it holds for all lengths. Compare the number"
            )

    def _call_again(self) -> Computed | None:
        """Run the user's code once more with what it has kept, for what it does to that alone; no guard stays.

        Where it fails, what it has changed by then counts. Returns what it has computed, if it came so far.
        """
        with self.world.without_guards(), contextlib.suppress(Exception):
            tracing.trace(self.world, self._only_call, self.signature.fakes, DECOMPOSITIONS)
        return self.computed

    def _only_call(self, *values: Tensor) -> tuple[Tensor, ...]:
        with self._as_traced(values) as context:
            self.called(context)
        return ()

    def _run(self, *values: Tensor) -> tuple[Tensor, ...]:
        inputs = self.signature.inputs
        with self._as_traced(values) as context:
            found = self.results(context, values)
            self._check_parameters(values)
            buffers = self._reassigned(inputs, values)
        return (*found, *buffers)

    @contextlib.contextmanager
    def _as_traced(self, values: Sequence[Tensor]) -> Iterator[CaptureContext]:
        """With the model's tensors and modes as in the trace."""
        named = {i.fqn: v for i, v in zip(self.signature.inputs, values, strict=True) if i.kind == "batch"}
        numbers = named.pop(TOKEN_NUMBERS, None)
        for found, value in zip(self.signature.inputs, values, strict=True):
            node = tracing.node_of(value)
            assert node is not None
            node.meta["kind"] = found.kind
        seed = next(v for i, v in zip(self.signature.inputs, values, strict=True) if i.kind == "seed")
        context = CaptureContext(self.world, self.provenance, named, seed, self.device, numbers)
        with (
            tracing.swapped_tensors(self.model, self.signature.model_tensors(values)),
            running(context),
            torch.device("cpu"),  # where tensors are made that name no device
            self.provenance.follow(),
            tracing.told_to_be_on(self.device),
            torch.set_grad_enabled(self.differentiate),
            Redirect(context),  # in the backward too: a checkpoint runs user code there
        ):
            yield context

    def look_for_own_backward(self, context: CaptureContext, results: Sequence[Tensor]) -> None:
        """Whether gradients of `results` go through code of the model's own, of which no flow is known."""
        function = tracing.own_backward(results)
        if function is not None:
            self.own_backward = f"the backward of {function.__name__}, an autograd.Function,"
        elif context.gradient_hooks:
            self.own_backward = f"a hook on a gradient, at {context.gradient_hooks[0]},"

    def trained(self, values: Sequence[Tensor]) -> list[tuple[Input, Tensor]]:
        """The inputs that want a gradient."""
        return [(i, v) for i, v in zip(self.signature.inputs, values, strict=True) if i.requires_grad]

    def _check_parameters(self, values: Sequence[Tensor]) -> None:
        """Raise UnsupportedOpError for a parameter that the forward has made: it would be a constant of the graph."""
        known = {id(value) for value in values}
        for fqn, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in known:
                raise UnsupportedOpError(
                    f"parameter {fqn!r}, which the forward makes,",
                    "Make it in __init__, or call the model once before it is captured.",
                )

    def _reassigned(self, inputs: Sequence[Input], values: Sequence[Tensor]) -> list[Tensor]:
        """New values of buffers that the forward has set to another tensor (in-place updates are found later)."""
        now = dict(self.model.named_buffers(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for entry, value in zip(inputs, values, strict=True):
            if entry.kind == "buffer" and now.get(entry.fqn) is not None and now[entry.fqn] is not value:
                if now[entry.fqn].shape != value.shape or tracing.node_of(now[entry.fqn]) is None:
                    raise UnsupportedOpError(
                        f"buffer {entry.fqn!r} set to a tensor of another shape", "Keep the shapes of buffers fixed."
                    )
                found[entry.fqn] = now[entry.fqn].to(value.dtype).detach()
        self.outputs += [Output("buffer", fqn) for fqn in found]
        return list(found.values())

    def _translate(self, error: Exception) -> CaptureError | None:
        """The error that users see for one that torch raised while tracing."""
        fqn, line = self.provenance.fqn, line_of_error(error)
        if isinstance(error, tracing.DATA_DEPENDENT_ERRORS):
            return DataDependentError(_operation(error), fqn, line)
        if _OF_NUMPY in str(error):
            return DataDependentError("its values go to NumPy (.numpy())", fqn, line)
        if isinstance(error, tracing.DeviceMismatchError):
            return DeviceError(f"{error} (in module {fqn!r}, at {line})")
        if isinstance(error, TypeError) and _UNHASHABLE in str(error):
            dims = " and ".join(sorted(self.world.symbols))
            return FixedLengthError("the key of a dict or of a cached function", dims, _INSTEAD_OF_KEY, line)
        if self.world.symbols and failed_on_size(error):
            return SymbolicSizeError(error, " and ".join(sorted(self.world.symbols)), fqn, line)
        if "INTERNAL ASSERT" in str(error):
            return UnsupportedOpError("a call in which torch itself fails", "Write it with other ops.", fqn, line)
        if "FlexAttention" in str(error):
            return UnsupportedOpError("flex_attention", _INSTEAD_OF_FLEX, fqn, line)
        return None


@dataclass(kw_only=True)
class TracedStep(Traced):
    """Forward, loss and (`with_gradients`) backward."""

    loss_fn: LossFunction
    batch: Batch
    with_gradients: bool = True
    averaged: Averaged | None = None

    def _translate(self, error: Exception) -> CaptureError | None:
        return (
            super()._translate(error)
            or self._wrong_call(error)
            or self._missing_input(error)
            or self._wrong_loss(error)
        )

    def _missing_input(self, error: Exception) -> CaptureError | None:
        """For a key that was looked up in the batch, or in a dict made of it, and is not there. What is raised where no
        such dict is at hand is about a dict of the user's own.
        """
        if not isinstance(error, KeyError) or not isinstance(self.batch, Mapping):
            return None
        key, keys = error.args[0], self.batch.keys()
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        read = any(isinstance(value, dict) and value.keys() & keys for value in frame.f_locals.values())
        return MissingInputError(key, keys) if read and isinstance(key, str) and key not in keys else None

    def _wrong_loss(self, error: Exception) -> CaptureError | None:
        """For code of the loss function, outside of the model, that takes what it is given for something else."""
        in_loss = _inside(error, _call_loss) and not _inside(error, inspect.unwrap(self.model.forward))
        if not (in_loss and isinstance(error, AttributeError | TypeError)):
            return None
        given = f"a {type(self.batch).__name__}"
        if isinstance(self.batch, Mapping):
            given = f"a dict with {', '.join(map(repr, self.batch))}"
        return LossCallError(f"{type(error).__name__}: {error}", given, line_of_error(error))

    def _wrong_call(self, error: Exception) -> CaptureError | None:
        """For a call of the model's forward with other arguments than it takes; Python names the function first."""
        function = inspect.unwrap(self.model.forward).__qualname__
        if not (isinstance(error, TypeError) and str(error).startswith(f"{function}() ")):
            return None
        parameters = inspect.signature(self.model.forward).parameters.values()
        names = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        keys = [i.fqn for i in self.signature.inputs if i.kind == "batch" and i.fqn != TOKEN_NUMBERS]
        return ForwardArgumentsError(str(error), names, keys)

    def __post_init__(self) -> None:
        self.functions = (self.loss_fn,)

    def call(self, context: CaptureContext) -> Any:
        """What the loss function returns."""
        return _call_loss(self.loss_fn, self.model, self._container(context.batch))

    def results(self, context: CaptureContext, values: Sequence[Tensor]) -> list[Tensor]:
        """The scaled loss, metrics, and the gradients of all trainable parameters that the loss depends on."""
        loss, metrics = with_metrics(self.called(context))
        loss, self.averaged = as_sum(loss, context)
        scale = next(v for i, v in zip(self.signature.inputs, values, strict=True) if i.kind == "scale")
        self.signature = self.signature.with_scale(loss.dtype)
        scale = tracing.retyped_input(scale, loss.dtype)
        measured = as_results(metrics, scale, context)
        loss = loss * scale
        self.look_for_own_backward(context, [loss])
        grads = self._gradients(loss, self.trained(values), context) if self.with_gradients else {}
        self.outputs = [
            *(Output("loss", name) for name in ("loss", *measured)),
            *(Output("grad", fqn) for fqn in grads),
        ]
        return [loss.detach(), *measured.values(), *grads.values()]

    def _container(self, named: Mapping[str, Tensor]) -> Any:
        """The traced batch in the container that the user passed."""
        if isinstance(self.batch, Mapping):
            return dict(named)
        make: Any = getattr(type(self.batch), "_make", type(self.batch))  # named tuples take one argument per field
        return make(named.values())

    def _gradients(
        self, loss: Tensor, trained: Sequence[tuple[Input, Tensor]], context: CaptureContext
    ) -> dict[str, Tensor]:
        """By FQN. A parameter without a path to the loss has none, as in autograd: an optimizer must pass over it."""
        if not trained:
            raise LossError("a loss, but the model has no parameter that requires a gradient")
        with torch.autocast("cpu", enabled=False):
            grads = gradients(loss, [v for _, v in trained], self._ends(loss, context), self.provenance.newest)
        if all(grad is None for grad in grads):
            raise LossError("a tensor that does not depend on any trainable parameter")
        self.unused = tuple(i.fqn for (i, _), grad in zip(trained, grads, strict=True) if grad is None)
        return {i.fqn: grad for (i, _), grad in zip(trained, grads, strict=True) if grad is not None}

    def _ends(self, loss: Tensor, context: CaptureContext) -> list[Tensor]:
        """The results of blocks whose backward is all autograd's: no code of the model's runs in it."""
        of_the_model = self.own_backward is not None or context.gradient_hooks or self.provenance.recomputes
        of_the_model = of_the_model or tracing.own_formula([loss])
        return [] if of_the_model else self.provenance.ends


def _operation(error: Exception) -> str:
    name = str(getattr(error, "func", "")) or type(error).__name__
    words = {"aten._local_scalar_dense.default": "a value is read (.item(), or a tensor used as a condition)"}
    return words.get(name, name)
