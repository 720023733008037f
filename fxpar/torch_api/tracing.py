"""Tracing: `make_fx` with a hook on every node, and what surrounds it.

What these wrap (torch 2.13): the proxy tracer behind `make_fx`, graph modules that compile late, sequence numbers of
autograd nodes, parameter swapping, the frame of a non-reentrant checkpoint, autocast.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.autograd.function import BackwardCFunction
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from fxpar.torch_api.since_2_13 import FakeTensorDeviceMismatchError, non_strict_tracing_context
from fxpar.torch_api.symbolic import FakeWorld, hint

# What a forward raises under fake tensors when Python asks for a value that only the data has.
DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
DeviceMismatchError = FakeTensorDeviceMismatchError
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator


def trace(
    world: FakeWorld,
    step: Callable[..., Any],
    inputs: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """`make_fx(step)(*inputs)` for a step that may run autograd; node metas carry `val`. A lazy graph module.

    `decompositions` replace ATen ops below autograd.
    """
    from torch._dynamo import config as dynamo_config  # a second of imports, for captures alone

    with (
        world.mode,
        tracing(TracingContext(world.mode)),
        torch.autograd.set_multithreading_enabled(False),
        non_strict_tracing_context(),
        enable_python_dispatcher(),  # else some kernels would read symbolic sizes as integers
        torch.compiler.set_stance("force_eager"),  # compiled submodules run as they are
        dynamo_config.patch(error_on_nested_fx_trace=False),
        _use_lazy_graph_module(True),
        _quiet(),
    ):
        tracer = proxy_tensor.make_fx(step, decompositions, _disable_torch_fn_metadata_mode=True)
        return tracer(*inputs)


def _no_metadata(*_: Any, **__: Any) -> Any:
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No layout metadata on nodes (asking for it puts guards on sizes), no log of errors that are raised anyway."""
    original, logger = proxy_tensor._extract_tensor_metadata, logging.getLogger(FakeTensorMode.__module__)
    proxy_tensor._extract_tensor_metadata = _no_metadata
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


def constants_of_trace() -> dict[str, Tensor]:
    """Inside a trace: the tensors that its ops have taken and that neither it nor its inputs made, by the target of
    their `get_attr`.
    """
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "constants_of_trace works inside a trace only"
    root: Any = mode.tracer.root  # type: ignore[attr-defined]
    return {name: value for name, value in vars(root).items() if isinstance(value, Tensor)}


def is_fake(value: Tensor) -> bool:
    """Whether it has no data, as the values of a trace."""
    return isinstance(value, FakeTensor)


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


def new_input(shape: Sequence[Any], dtype: torch.dtype, kind: str, name: str) -> Tensor:
    """Inside a trace: one more input, of a shape that only the trace has found out.

    Its placeholder (of a `name` that no other has, with `meta["kind"]`) stands where the trace is now; see
    `inputs_first`.
    """
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "new_input works inside a trace only"
    with proxy_tensor.disable_proxy_modes_tracing():
        value = torch.empty(tuple(shape), dtype=dtype)
        proxy = mode.tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["kind"] = kind
        proxy_tensor.track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    return value


def inputs_first(gm: fx.GraphModule) -> None:
    """Move all placeholders to the top of the graph, in their order."""
    places = list(gm.graph.find_nodes(op="placeholder"))
    for before, node in itertools.pairwise(places):
        before.append(node)
    gm.recompile()


def sequence_number() -> int:
    """Sequence number of the newest autograd node of this thread; -1 if there is none yet."""
    return torch.autograd._get_sequence_nr() - 1


def has_hooks_on_saved() -> bool:
    """Whether what autograd saves now passes through `torch.autograd.graph.saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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


@contextlib.contextmanager
def told_to_be_on(device: torch.device) -> Iterator[None]:
    """Inside the block, code that asks a traced CPU tensor for its device is told this one: a model's forward, but
    neither torch nor fxpar. A fake tensor answers by a property of its class, which no TorchFunctionMode sees.
    """
    if device.type == "cpu":
        yield
        return
    known: Any = FakeTensor.device

    def told(self: FakeTensor) -> torch.device:
        found = known.fget(self)
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return found if found.type != "cpu" or asks in ("torch", "fxpar") else device

    FakeTensor.device = known.getter(told)
    try:
        yield
    finally:
        FakeTensor.device = known


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """Inside a trace: a copy that the trace does not see; of fake tensors and those without data the same one."""
    if isinstance(tensor, FakeTensor) or tensor.device.type in ("cpu", "meta"):
        return tensor
    with _disable_current_modes():
        return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


def own_backward(results: Sequence[Tensor]) -> type | None:
    """An `autograd.Function`, not of fxpar, that the gradients of `results` go through. Those of ops with a formula of
    their own do not count: what such an op does is asked of the op.
    """
    todo = [value.grad_fn for value in results if value.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith("GeneratedBackwardFor_"):
            function: Any = type(node)._forward_cls  # type: ignore[attr-defined]
            if function.__module__.partition(".")[0] != "fxpar":
                return function
        found = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(found)
        todo += found
    return None


def is_computed_from(value: Tensor, kind: str) -> bool:
    """Inside a trace: whether data (not just sizes) of an input whose meta says `kind` enters `value`."""
    node = node_of(value)
    return node is not None and any(found.meta.get("kind") == kind for found in _ancestors(node))


def first_of_range(value: Tensor) -> int | None:
    """Inside a trace: n, if no input's data enters a tensor and every row of it is n, n + 1, n + 2 ...; else None."""
    node = node_of(value)
    if node is None:
        return None
    sources = _ancestors(node)
    if any(found.op != "call_function" or _hinted_numel(found) > _SMALL for found in sources):
        return None
    values: dict[fx.Node, Any] = {}

    def load(current: fx.Node) -> Any:
        meta = current.meta.get("val")
        return meta.node.hint if isinstance(meta, _SYMBOLIC) else values[current]

    with _disable_current_modes(), torch.no_grad():
        for current in sources:
            if not isinstance(current.meta.get("val"), _SYMBOLIC):
                args, kwargs = fx.map_arg((current.args, current.kwargs), load)
                values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        rows = values[node]
        first = int(rows.flatten()[0])
        expected = torch.arange(first, first + rows.shape[-1])
        return first if bool((rows == expected).all()) else None


_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_SMALL = 1 << 22


def _hinted_numel(node: fx.Node) -> int:
    """Elements of a node's tensor result in the example; 0 for other results."""
    value = node.meta.get("val")
    return math.prod(hint(size) for size in value.shape) if isinstance(value, Tensor) else 0


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from, sizes not followed, in graph order."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                if not isinstance(source.meta.get("val"), _SYMBOLIC):
                    todo.append(source)
    return [current for current in node.graph.nodes if current in found]
