"""A fake mode in which a call like an earlier one costs little: layers repeat, and so do their calls.

torch keeps results of calls by the metadata of their operands, and decides which calls may be kept. It takes it most of
a millisecond to make the key, an entry, and the result where sizes are symbolic: more than it saves where few layers
repeat. `RepeatingFakeMode` keeps what torch would keep, under a key that says the same and is made of what the tensors
hold, and makes the result from there.

What this wraps (torch 2.13): FakeTensorMode, its cache of calls, and its rule of what may be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxpar.torch_api.since_2_13 import make_fake

_NUMBERS = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Unknown(Exception):
    """An argument that has no key: torch decides about the call."""


@dataclass(frozen=True)
class _Result:
    """How to make one result of a call. `argument`: it is that one. `restrides`: it is that one in another shape, with
    other strides and another offset. `view_of`: it lies in the memory of that one in another way. `contiguous`: it lies
    as what `torch.empty` makes.
    """

    argument: int | None = None
    restrides: int | None = None
    view_of: int | None = None
    shape: tuple[Any, ...] = ()
    stride: tuple[Any, ...] = ()
    offset: Any = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    contiguous: bool = False


@dataclass(frozen=True)
class _Known:
    """A call that torch keeps: its op (which so lives as long as its key) and results; `single`: not in a tuple."""

    func: Any
    results: tuple[_Result | None, ...]
    single: bool


def _expression(size: Any) -> Any:
    """What a size is, for a comparison that asks nothing about symbols (`==` of two sizes adds a guard)."""
    return size if type(size) is int else size.node.expr


class RepeatingFakeMode(FakeTensorMode):
    """A FakeTensorMode with a memory of its own in the place of torch's; for one thread and one capture."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._calls: dict[Any, _Known] = {}
        self._repeats: dict[Any, bool] = {}  # what torch says of an op; what depends on data has raised before

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        key = self._key_of(func, args, kwargs)
        known = None if key is None else self._calls.get(key)
        if known is not None:
            made = tuple(None if result is None else self._make(result, args) for result in known.results)
            return made[0] if known.single else made
        output = self._dispatch_impl(func, types, args, kwargs)
        if key is not None and self._may_repeat(func, args, kwargs):
            self._remember(key, func, args, kwargs, output)
        return output

    def _may_repeat(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether torch would keep a call of this op."""
        if func not in self._repeats:
            try:
                self._validate_cache_key(func, args, kwargs)
                self._repeats[func] = True
            except _BypassDispatchCache:
                self._repeats[func] = False
        return self._repeats[func]

    # ------------------------------------------------------------------------------------------------------- keys
    def _key_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """All that the result of a call depends on; None if that is not known."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        env: Any = self.shape_env
        parts: list[Any] = [
            id(func),
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            get_proxy_mode() is not None,
            self.epoch,
            env._replacements_version_counter,
        ]
        try:
            self._add(parts, args)
            for name, value in kwargs.items():
                parts.append(name)
                self._add(parts, (value,))
        except _Unknown:
            return None
        return tuple(parts)

    def _add(self, parts: list[Any], values: Sequence[Any]) -> None:
        parts.append(len(values))
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                self._add_tensor(parts, value)
            elif kind is torch.SymInt:
                parts.append(torch.SymInt)
                parts.append(value.node._expr)
            elif kind is list or kind is tuple or kind is torch.Size:
                parts.append(list if kind is list else tuple)
                self._add(parts, value)
            elif kind in _NUMBERS:
                parts.append(kind)
                parts.append(value)
            else:
                raise _Unknown

    def _add_tensor(self, parts: list[Any], value: Any) -> None:
        if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
            raise _Unknown
        if value.is_quantized:
            raise _Unknown
        parts.append(FakeTensor)
        parts.append(value.dtype)
        parts.append(value.fake_device)
        for size in value.shape:
            parts.append(size if type(size) is int else size.node._expr)
        for step in value.stride():
            parts.append(step if type(step) is int else step.node._expr)
        offset, space = value.storage_offset(), value.untyped_storage().nbytes()
        parts.append(offset if type(offset) is int else offset.node._expr)
        parts.append(space if type(space) is int else space.node._expr)
        parts += (value.dim(), value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())

    # ---------------------------------------------------------------------------------------------------- results
    def _remember(self, key: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep a call, if all of its results can be made again."""
        outputs = output if isinstance(output, tuple) else (output,)
        results: list[_Result | None] = []
        for found in outputs:
            result = None
            if found is not None:
                given = type(found) is not FakeTensor or any(value is found for value in kwargs.values())
                result = None if given else self._result(func, args, found)
                if result is None or not self._is_made_alike(result, args, found):
                    return
            results.append(result)
        self._calls[key] = _Known(func, tuple(results), not isinstance(output, tuple))

    def _is_made_alike(self, result: _Result, args: Sequence[Any], found: Any) -> bool:
        """Whether calls of what is made go where those of the result go, such as to the kernels of views."""
        made = self._make(result, args)
        return torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(found)

    def _result(self, func: Any, args: Sequence[Any], found: Any) -> _Result | None:
        """How to make a result again; None for one that is not plain."""
        for at, value in enumerate(args):
            if value is found:
                return _Result(argument=at)
        if found.is_conj() or found.is_neg() or found.layout is not torch.strided or found.constant is not None:
            return None
        restrides, view_of = None, None
        if func.is_view:
            (view_of,) = (at for at, value in enumerate(args) if isinstance(value, Tensor))
            shown = args[view_of]
            if shown.dtype == found.dtype and not (shown.is_conj() or shown.is_neg()):
                restrides, view_of = view_of, None
        elif type(found.storage_offset()) is not int or found.storage_offset() != 0:
            return None
        return _Result(
            restrides=restrides,
            view_of=view_of,
            shape=tuple(map(self._size, found.shape)),
            stride=tuple(map(self._size, found.stride())),
            offset=self._size(found.storage_offset()),
            dtype=found.dtype,
            device=found.fake_device,
            requires_grad=found.requires_grad,
            contiguous=not func.is_view and self._lies_as_empty(found),
        )

    def _size(self, size: Any) -> Any:
        """A size as the object that the ShapeEnv has for its expression."""
        env: Any = self.shape_env
        return size if type(size) is int else env.create_symintnode(size.node.expr, hint=size.node.hint)

    def _lies_as_empty(self, found: Any) -> bool:
        """Whether the strides are, expression for expression, those that `torch.empty` gives."""
        env: Any = self.shape_env
        with in_kernel_invocation_manager(self), env.suppress_guards():
            empty = torch.empty(found.shape, dtype=found.dtype, device="meta")
        return [_expression(step) for step in empty.stride()] == [_expression(step) for step in found.stride()]

    def _make(self, result: _Result, args: Sequence[Any]) -> Tensor:
        """The result of a call; no TorchFunctionMode is asked about what is called here."""
        if result.argument is not None:
            return args[result.argument]
        env: Any = self.shape_env
        with torch._C.DisableTorchFunction():
            with in_kernel_invocation_manager(self), env.suppress_guards():
                made = self._laid_out(result, args)
            return make_fake(self, made, result.device, requires_grad=result.requires_grad)

    def _laid_out(self, result: _Result, args: Sequence[Any]) -> Tensor:
        """On the meta device. Checks of symbolic sizes are what costs: `set_` has most, `as_strided` hardly any."""
        if result.restrides is not None:
            return torch.as_strided(args[result.restrides], result.shape, result.stride, result.offset)
        if result.contiguous:
            return torch.empty(result.shape, dtype=result.dtype, device="meta")
        made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        if result.view_of is not None:
            made.set_(args[result.view_of].untyped_storage(), result.offset, result.shape, result.stride)
        return made
