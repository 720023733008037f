"""`with_precision`: a captured graph that computes in low precision, with casts as nodes.

    %add_1 : f32[1, T, D] = add(...)                     %add_1 : bf16[1, T, D] = add(...)
    %pow_0 : f32[1, T, D] = pow(%add_1, 2)   # norm      %up    : f32[1, T, D] = _to_copy(%add_1, dtype=f32)   # norm
    ...                                                  %pow_0 : f32[1, T, D] = pow(%up, 2)   # norm
    %mul_2 : f32[1, T, D] = mul(...)         # norm      ...
    %mm_0  : f32[T, F] = mm(%mul_2, %w)                  %mul_2 : f32[1, T, D] = mul(...)   # norm
                                                         %down  : bf16[1, T, D] = _to_copy(%mul_2, dtype=bf16)
                                                         %mm_0  : bf16[T, F] = mm(%down, %w)

Rounding to bf16 happens once per value. What only islands read is never rounded.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from fxpar.errors import PrecisionDtypeError
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.graph import LogicalGraph, Output
from fxpar.ir.node_meta import is_backward, tensor_metas, tensor_of
from fxpar.ops.traits import FACTORIES, is_elementwise
from fxpar.precision.dtypes import ResultDtypes
from fxpar.precision.islands import metas
from fxpar.precision.plan import LIKE, PrecisionPlan, is_cast, kept, make_plan
from fxpar.precision.precision import Precision
from fxpar.torch_api import kernels
from fxpar.torch_api.modules import lazy_module

G = TypeVar("G", bound=LogicalGraph)


def with_precision(logical: G, precision: Precision) -> G:
    """A copy of `logical` that computes as `precision` says; `logical` itself if that changes nothing.

    Parameters come in with `param_dtype`, but those that only islands read; a gradient has its parameter's dtype. The
    loss, values that the model returns, new buffers and gradients of inputs keep the captured dtype, and so do batch,
    buffers and scale. Raises PrecisionGlobError, PrecisionDtypeError.
    """
    floats = [i.meta.dtype for i in logical.params() if i.meta.dtype.is_floating_point]
    captured = max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
    low = precision.param_dtype or captured
    if low.itemsize > captured.itemsize:
        raise PrecisionDtypeError.wider(short_dtype(low), short_dtype(captured))
    plan = make_plan(logical, precision, captured, low)
    if low == captured:
        return logical
    graph = _Rewrite(plan, ResultDtypes(logical.example_dims())).run(logical)
    inputs = tuple(
        replace(info, meta=replace(info.meta, dtype=plan.params.get(node, info.meta.dtype)))
        for node, info in zip(logical.placeholders, logical.inputs, strict=True)
    )
    limit = torch.finfo(low).max
    constants = {name: _within(value, limit) for name, value in logical.constants.items()}
    return replace(logical, gm=lazy_module(logical.gm, graph), inputs=inputs, constants=constants)


def _within(constant: torch.Tensor, limit: float) -> torch.Tensor:
    """Finite values brought into the range of the low dtype, see `_Rewrite._arguments`."""
    if not constant.is_floating_point() or torch.finfo(constant.dtype).max <= limit:
        return constant
    return torch.where(constant.isinf(), constant, constant.clamp(-limit, limit))


@dataclass
class _Rewrite:
    """One walk over the graph; `new` has what became of each node."""

    plan: PrecisionPlan
    results: ResultDtypes
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    casts: dict[Any, fx.Node] = field(default_factory=dict)

    def run(self, logical: LogicalGraph) -> fx.Graph:
        for node in logical.gm.graph.nodes:
            if node.op == "output":
                params = {i.fqn: n for n, i in zip(logical.placeholders, logical.inputs, strict=True)}
                results = zip(logical.results, logical.outputs, strict=True)
                self.graph.output(tuple(self._result(n, out, params) for n, out in results))
            elif node in self.plan.computes:
                self.new[node] = self._call(node)
            else:
                self.new[node] = self._copy(node)
                if node in self.plan.params:
                    self._retype(self.new[node], self.plan.params[node])
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def _copy(self, node: fx.Node, operands: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        new = self.graph.node_copy(node, (self.new if operands is None else operands).__getitem__)
        new.meta = dict(node.meta)
        # A cast of the user's keeps its dtype, and so does what is copied.
        dtype = self.plan.computes.get(node)
        repeated = None if is_cast(node) else dtype
        new.args, new.kwargs = self._arguments(new.args, repeated), self._arguments(dict(new.kwargs), repeated)
        return new

    def _retype(self, node: fx.Node, dtype: torch.dtype) -> None:
        node.meta["tensor"] = replace(tensor_of(node), dtype=dtype)

    def _call(self, node: fx.Node) -> fx.Node:
        dtype = self.plan.computes[node]
        if is_cast(node) and self._is_done(node):
            return self.new[node.args[0]]  # type: ignore[index]
        if node.target is operator.getitem:
            new = self._copy(node)
            new.meta["tensor"] = tensor_metas(new.args[0])[new.args[1]]  # type: ignore[union-attr, index]
            return new
        like = {node.args[i]: node.args[j] for i, j in LIKE.get(node.target, {}).items()}
        as_is = kept(node)
        operands: dict[fx.Node, fx.Node] = {}
        for operand in node.all_input_nodes:
            value = self.new[operand]
            if operand in like:
                value = self._cast(value, tensor_of(self.new[like[operand]]).dtype, node)  # type: ignore[index]
            elif operand not in as_is and self._must_follow(operand, node):
                value = self._cast(value, dtype, node)
            operands[operand] = value
        new = self._copy(node, operands)
        new.meta["tensor"] = self.results.retyped(new)
        return new

    def _is_done(self, node: fx.Node) -> bool:
        """Whether the user's cast has nothing left to do."""
        value = self.new[node.args[0]]  # type: ignore[index]
        return node.kwargs.keys() == {"dtype"} and tensor_of(value).dtype == node.kwargs["dtype"]

    def _must_follow(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether an operand has to have the dtype that the node computes in: all that were of the captured dtype, or
        came to be so by promotion. A number without dims promotes nothing, and is left as exact as it is.
        """
        (meta,) = metas(operand) or (None,)
        if meta is None or not meta.dtype.is_floating_point:
            return False
        made = [m for m in metas(node) if m.dtype.is_floating_point]
        if meta.dtype != self.plan.captured and not any(m.dtype == self.plan.captured for m in made):
            return False
        return not (is_elementwise(node.target) and not meta.shape and all(m.shape for m in metas(node)))

    def _arguments(self, value: Any, dtype: torch.dtype | None) -> Any:
        """Arguments as they have to be: `dtype` for the captured one; for a number out of the range of the low dtype,
        the nearest one in it. Such a number hides something (masks are filled with the least fp32 number), and cast
        it would be infinite, so that a row in which everything is hidden would turn into NaN.
        """
        if isinstance(value, tuple | list):
            return type(value)(self._arguments(v, dtype) for v in value)
        if isinstance(value, dict):
            return {k: self._arguments(v, dtype) for k, v in value.items()}
        if isinstance(value, torch.dtype):
            return dtype if dtype is not None and value == self.plan.captured else value
        if isinstance(value, float) and math.isfinite(value):
            limit = torch.finfo(self.plan.low).max
            return min(max(value, -limit), limit)
        return value

    def _result(self, node: fx.Node, out: Output, params: Mapping[str, fx.Node]) -> fx.Node:
        if out.kind == "grad":
            dtype = tensor_of(self.new[params[out.fqn]]).dtype
        else:
            dtype = tensor_of(node).dtype
        return self._cast(self.new[node], dtype, node)

    def _cast(self, value: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        """`value` in `dtype`: the value itself, what it was widened from, or a cast.

        A cast that widens stands before its first reader, one that narrows right behind the value, so that the wide one
        can be freed.
        """
        while tensor_of(value).dtype != dtype and (origin := _widened_from(value)) is not None:
            value = origin
        meta = tensor_of(value)
        if meta.dtype == dtype:
            return value
        widens = dtype.itemsize > meta.dtype.itemsize
        backward = is_backward(reader)
        # The backward widens again: it then keeps the low value of the forward instead of the wide one.
        again = backward and widens and value.op != "placeholder" and not is_backward(value)
        key = (value, dtype, again)
        if key not in self.casts:
            self.casts[key] = self._new_cast(value, dtype, reader, like_reader=widens)
        return self.casts[key]

    def _new_cast(self, value: fx.Node, dtype: torch.dtype, reader: fx.Node, *, like_reader: bool) -> fx.Node:
        name = f"{value.name}_{short_dtype(dtype)}"
        target: Any = kernels.to_copy
        args: tuple[Any, ...] = (value,)
        kwargs: dict[str, Any] = {"dtype": dtype}
        if value.target in FACTORIES:
            target, args, kwargs = value.target, value.args, {**value.kwargs, "dtype": dtype}
        with self._place(value, at_reader=like_reader):
            new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        place = reader if like_reader else value
        new.meta = {key: place.meta.get(key) for key in ("fqn", "source", "backward")}
        new.meta["tensor"] = replace(tensor_of(value), dtype=dtype)
        return new

    def _place(self, value: fx.Node, *, at_reader: bool) -> Any:
        """Where a cast goes: before its reader, which is next; right behind the value; or on top, for an input."""
        if at_reader:
            return contextlib.nullcontext()
        if value.op != "placeholder":
            return self.graph.inserting_after(value)
        call = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        return contextlib.nullcontext() if call is None else self.graph.inserting_before(call)


def _widened_from(value: fx.Node) -> fx.Node | None:
    """The value that a cast has widened without loss."""
    if not is_cast(value) or value.kwargs.keys() != {"dtype"}:
        return None
    origin: Any = value.args[0]
    old, new = tensor_of(origin).dtype, tensor_of(value).dtype
    widens = old.is_floating_point and new.is_floating_point and old.itemsize < new.itemsize
    return origin if widens else None
