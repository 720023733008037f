"""Tracing: fake tensors with named symbolic sizes, `make_fx` with a hook on every node, and what surrounds them.

What these wrap (torch 2.13): FakeTensorMode and ShapeEnv guards, the proxy tracer behind `make_fx`, sequence numbers of
autograd nodes, parameter swapping, the frame of a non-reentrant checkpoint, the functions of symbolic integers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
)
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    statically_known_true,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

# What a forward raises under fake tensors when Python asks for a value that only the data has.
DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
DeviceMismatchError = FakeTensorDeviceMismatchError
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

Place = Callable[[], str | None]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SYMBOLIC = (os.path.join(_TORCH, "fx", "experimental", ""), torch.__file__)


# ------------------------------------------------------------------------------------------- symbolic sizes
@dataclass(frozen=True)
class Guard:
    """A condition on symbolic sizes that tracing took for granted, and where ("file:line") it did."""

    condition: sympy.Basic
    place: str | None
    by_user: bool  # decided in Python code of the model, not inside torch


# Functions that decide how a fake result lies in memory, which no captured value depends on.
_LAYOUT = {
    "is_contiguous",
    "is_contiguous_for_memory_format",
    "is_non_overlapping_and_dense_or_false",
    "compute_elementwise_output_logical_to_physical_perm",
    "compute_elementwise_output_strides",
    "_reshape_view_helper_core_alg",
}


def _asks_for_layout() -> bool:
    """Whether the condition that is being decided is about the memory layout of a fake tensor only."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_name in _LAYOUT:
            return True
        frame = frame.f_back
    return False


def _asked_by_user() -> bool:
    """Whether the condition being decided is one of Python code outside of torch (`if`, int(), range() ...)."""
    frame, converted = sys._getframe(2), False
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        # Python goes through SymBool.__bool__ and the like; C++ asks the symbolic node itself.
        converted = converted or frame.f_code.co_filename == torch.__file__
        frame = frame.f_back
    return converted and frame is not None and not frame.f_code.co_filename.startswith(_TORCH)


class _RecordingShapeEnv(ShapeEnv):
    """A ShapeEnv that asks `place` for the user's line whenever it adds a guard."""

    def __init__(self, place: Place) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.place = place
        self.recorded: list[Guard] = []

    def _log_guard(self, prefix: str, g: Any, forcing_spec: bool) -> None:
        if "suppressed" not in prefix and not _asks_for_layout():
            self.recorded.append(Guard(g, self.place(), _asked_by_user()))
        super()._log_guard(prefix, g, forcing_spec)


@dataclass
class FakeWorld:
    """One fake mode with named symbolic sizes. `place` gives the line of user code being traced."""

    place: Place
    symbols: dict[str, torch.SymInt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape_env = _RecordingShapeEnv(self.place)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.shape_env)

    def symbol(self, name: str, hint: int) -> torch.SymInt:
        """The symbolic size called `name`; `hint` (at least 2) is its value where tracing needs one."""
        if name not in self.symbols:
            source = ConstantSource(name)
            symbol = self.shape_env.create_symbol(
                hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self.shape_env.var_to_range[symbol] = ValueRanges(1, int_oo)
            self.symbols[name] = self.shape_env.create_symintnode(symbol, hint=hint, source=source)
        return self.symbols[name]

    def names(self) -> dict[sympy.Symbol, str]:
        """The symbol inside each symbolic size, and the size's name."""
        return {value.node._expr: name for name, value in self.symbols.items()}

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """A fake contiguous CPU tensor; the sizes are integers or symbolic sizes."""
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", requires_grad=requires_grad)

    @property
    def guards(self) -> list[Guard]:
        return self.shape_env.recorded

    def replacements(self) -> dict[sympy.Symbol, sympy.Expr]:
        """What guards have fixed a symbol to."""
        return dict(self.shape_env.replacements)

    def expression(self, value: Any) -> sympy.Expr | int | float | bool:
        """The expression of a symbolic number, or the number itself if it is none."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.expr
        return value


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the dynamic dims are; adds no guard."""
    return bool(statically_known_true(a == b))


def hint(size: int | torch.SymInt) -> int:
    """The value of a symbolic size in the example; adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


# --------------------------------------------------------------------------------------------------- tracing
def trace(
    world: FakeWorld,
    step: Callable[..., Any],
    inputs: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """`make_fx(step)(*inputs)` for a step that may run autograd; node metas carry `val`.

    `decompositions` replace ATen ops below autograd.
    """
    with (
        world.mode,
        tracing(TracingContext(world.mode)),
        torch.autograd.set_multithreading_enabled(False),
        torch.compiler._non_strict_tracing_context(),
        enable_python_dispatcher(),  # else some kernels would read symbolic sizes as integers
        torch.compiler.set_stance("force_eager"),  # compiled submodules run as they are
        _quiet(),
    ):
        tracer = proxy_tensor.make_fx(step, decompositions, _disable_torch_fn_metadata_mode=True)
        return tracer(*inputs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No layout metadata on nodes (asking for it puts guards on sizes), no log of errors that are raised anyway."""
    original, logger = proxy_tensor._extract_tensor_metadata, logging.getLogger(FakeTensorMode.__module__)
    proxy_tensor._extract_tensor_metadata = lambda *_, **__: None
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        proxy_tensor._extract_tensor_metadata = original
        logger.setLevel(level)


def evaluate(world: FakeWorld, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of one call on fake tensors, outside of any trace."""
    with world.mode, torch.no_grad():
        return target(*args, **kwargs)


@contextlib.contextmanager
def observe_nodes(on_node: Callable[[fx.Node], None]) -> Iterator[None]:
    """Inside a trace: call `on_node` with every new node."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "observe_nodes works inside a trace only"
    tracer = mode.tracer
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        on_node(node)
        return node

    tracer.create_node = create_node
    try:
        yield
    finally:
        del tracer.create_node


def node_of(value: Tensor) -> fx.Node | None:
    """Inside a trace: the node whose result `value` is; None for a tensor that the trace does not know."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "node_of works inside a trace only"
    found = proxy_tensor.get_proxy_slot(value, mode.tracer, None)
    return None if found is None else found.proxy.node


def retyped_input(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Inside a trace: give an input that nothing has read yet another dtype; returns what to use instead."""
    if value.dtype == dtype:
        return value
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(value)
    assert mode is not None
    assert node is not None
    with proxy_tensor.disable_proxy_modes_tracing():
        retyped = torch.empty(value.shape, dtype=dtype)
        proxy_tensor.track_tensor_tree(retyped, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
    return retyped


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def sequence_number() -> int:
    """Sequence number of the newest autograd node of this thread; -1 if there is none yet."""
    return torch.autograd._get_sequence_nr() - 1


def backward_sequence_number() -> int | None:
    """Sequence number of the autograd node that the engine is running; None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@contextlib.contextmanager
def swapped_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters and buffers of `model` replaced by `tensors` (name -> tensor) inside the block."""
    with _reparametrize_module(model, dict(tensors)):
        yield


@contextlib.contextmanager
def checkpoint_hook(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], reentrant: Callable[..., Any]
) -> Iterator[None]:
    """Inside the block, what a non-reentrant checkpoint runs again in the backward is `wrap(recompute)`.

    `wrap` is called in the forward, where the checkpointed region starts. `reentrant` is called in place of a reentrant
    checkpoint, which gives no gradients to `torch.autograd.grad`.
    """
    module = torch.utils.checkpoint
    module.CheckpointFunction.apply = staticmethod(reentrant)
    original = module._CheckpointFrame

    class Frame(original):
        def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(wrap(recompute_fn), *args, **kwargs)

    module._CheckpointFrame = Frame
    try:
        yield
    finally:
        module._CheckpointFrame = original
        del module.CheckpointFunction.apply  # uncovers the inherited one


@contextlib.contextmanager
def autocast_on_cpu(device_types: Sequence[str]) -> Iterator[None]:
    """Inside the block, `torch.autocast` for any of `device_types` acts on CPU tensors, with that device's dtype.

    The traced tensors are CPU ones whatever device the model will run on.
    """
    cls = torch.amp.autocast_mode.autocast
    original = cls.__init__

    def __init__(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type in device_types:
            dtype, device_type = dtype or torch.get_autocast_dtype(device_type), "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    with contextlib.ExitStack() as stack:
        for device_type in device_types:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast("cpu", torch.get_autocast_dtype(device_type)))
        cls.__init__ = __init__
        try:
            yield
        finally:
            cls.__init__ = original


# ------------------------------------------------------------------- symbolic integers as calls on Python numbers
def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(call: Callable[..., Any], *args: Any) -> Any:
        result = args[0]
        for arg in args[1:]:
            result = call(function, result, arg)
        return result

    return apply


def _single(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, *args: call(function, *args)


_f = sympy_functions
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: _fold(operator.add),
    sympy.Mul: _fold(operator.mul),
    sympy.Pow: _single(operator.pow),
    _f.PowByNatural: _single(operator.pow),
    _f.FloatPow: _single(operator.pow),
    _f.FloorDiv: _single(operator.floordiv),
    _f.CleanDiv: _single(operator.floordiv),
    _f.Mod: _single(operator.mod),
    _f.PythonMod: _single(operator.mod),
    _f.Max: _fold(torch.sym_max),
    _f.Min: _fold(torch.sym_min),
    sympy.Max: _fold(torch.sym_max),
    sympy.Min: _fold(torch.sym_min),
    _f.IntTrueDiv: _single(operator.truediv),
    _f.FloatTrueDiv: _single(operator.truediv),
    _f.ToFloat: _single(torch.sym_float),
    _f.TruncToInt: _single(math.trunc),
    _f.CeilToInt: _single(math.ceil),
    _f.FloorToInt: _single(math.floor),
    _f.OpaqueUnaryFn_sqrt: _single(torch.sym_sqrt),
}


def function_of(expression: sympy.Expr) -> Callable[..., Any] | None:
    """How to compute a sympy node from its arguments: `apply(call, *args)`; None if it is not known."""
    return _FUNCTIONS.get(expression.func)


def is_computed_from_inputs(value: Tensor) -> bool:
    """Inside a trace: whether the data of `value` depends on the data (not just the sizes) of any input."""
    node = node_of(value)
    return node is not None and any(found.op == "placeholder" for found in _ancestors(node))


def largest_without_inputs(value: Tensor) -> int | None:
    """Inside a trace: the largest value, at the example's sizes, of a tensor that no input's data enters; else None."""
    node = node_of(value)
    if node is None or is_computed_from_inputs(value):
        return None
    values: dict[fx.Node, Any] = {}

    def load(current: fx.Node) -> Any:
        meta = current.meta.get("val")
        if isinstance(meta, (torch.SymInt, torch.SymFloat)):
            return meta.node.hint
        return values[current]

    with _disable_current_modes(), torch.no_grad():
        for current in _ancestors(node):
            if isinstance(current.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                continue
            if current.op == "get_attr" or current.target is torch.ops.aten.lift_fresh_copy.default:
                return None
            args, kwargs = fx.map_arg((current.args, current.kwargs), load)
            values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        return int(values[node].max())


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from, sizes not followed, in graph order."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                if not isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                    todo.append(source)
    return [current for current in node.graph.nodes if current in found]
