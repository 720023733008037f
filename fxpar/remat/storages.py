"""Which memory the values of a graph live in: the graph is run on the meta device, where tensors have sizes, strides
and storages but no data. Views share a storage as they do on a real device, and a reshape copies where it must.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import input_kind, is_backward, is_on_host, is_size, local_meta, size_of
from fxpar.ops import copies, layout
from fxpar.remat.meta_values import META, MetaValues, is_same_call, meta_tensors

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Storages:
    """`of[node]`: numbers of the storages of the node's tensors (none for an integer). `nbytes[i]`: size of storage i.

    `borrowed` are storages of placeholders: the caller keeps them. `weights` hold what is made of parameters alone,
    such as one that ZeRO-3 has gathered. `makers[i]`: the node that made storage i, and for which of its results.
    """

    of: Mapping[fx.Node, tuple[int, ...]]
    nbytes: tuple[int, ...]
    borrowed: frozenset[int]
    weights: frozenset[int] = frozenset()
    makers: tuple[tuple[fx.Node, int], ...] = ()


def trace_storages(
    graph: fx.Graph, dims: Mapping[sympy.Symbol, int], coordinates: Mapping[str, int] | None = None
) -> Storages:
    """Run a lowered graph on the meta device, with the dynamic dims of the whole micro-batch at `dims`.

    `coordinates` is the rank's place on each mesh axis (0 where it is not given). Dims that a placement cuts must
    divide.
    """
    return trace_and_compare(graph.nodes, dims, coordinates or {}, ())[0]


def trace_and_compare(
    nodes: Iterable[fx.Node],
    dims: Mapping[sympy.Symbol, int],
    at: Mapping[str, int],
    others: Sequence[Mapping[str, int]],
    same: Mapping[fx.Node, fx.Node] | None = None,
) -> tuple[Storages, list[Mapping[str, int]]]:
    """Storages at one place, and those of `others` where they differ: where no call that depends on the place makes
    something else, no later one does. Nodes may be of several graphs, one behind the other: `same` are placeholders,
    each with the earlier node whose value it has.
    """
    values: dict[fx.Node, Any] = {}
    found = MetaValues()
    differ: list[Mapping[str, int]] = []
    of: dict[fx.Node, tuple[int, ...]] = {}
    borrowed: set[int] = set()
    makers: list[tuple[fx.Node, int]] = []
    of_weights: dict[fx.Node, bool] = {}
    same = same or {}
    for node in nodes:
        if node.op == "output":
            continue
        if node in same:
            earlier = same[node]
            values[node], of[node], of_weights[node] = values[earlier], of[earlier], of_weights[earlier]
            continue
        if node.op == "placeholder":
            size = _size(node, dims)
            values[node] = size if isinstance(size, int) else found.placed(*size)
        else:
            has_place = _has_place(node)
            target, args, kwargs = _given(node, values, at if has_place else None, dims)
            values[node] = found.call(target, args, kwargs)
            for place in others if has_place else ():
                there = _given(node, values, place, dims)[1]
                if place not in differ and there != args and not is_same_call(target, args, there):
                    differ.append(place)
        numbers = [one.storage for one in meta_tensors(values[node])]
        of[node] = tuple(dict.fromkeys(numbers))
        for place, storage in enumerate(numbers):
            if storage == len(makers):
                makers.append((node, place))
        of_weights[node] = _is_weight(node, of_weights)
        if node.op == "placeholder":
            borrowed.update(of[node])
    no_weights = {s for node, is_weight in of_weights.items() if not is_weight for s in of[node]}
    weights = frozenset(range(len(found.nbytes))) - no_weights
    return Storages(of, tuple(found.nbytes), frozenset(borrowed), weights, tuple(makers)), differ


def run_on_meta(
    graph: fx.Graph, dims: Mapping[sympy.Symbol, int], numbers: Mapping[fx.Node, int] | None = None
) -> Iterator[tuple[fx.Node, Any]]:
    """Each node of a graph in turn with its value: tensors on the meta device, and integers. As `trace_storages`.

    `numbers` are placeholders that another part has computed: of a size, that is what a rank has of it.
    """
    values: dict[fx.Node, Any] = dict(numbers or {})
    for node in graph.nodes:
        if node.op != "output":
            with torch.no_grad():
                if node not in values:
                    values[node] = _place(node, dims) if node.op == "placeholder" else _call(node, values, dims)
            yield node, values[node]


def saved_bytes(graph: fx.Graph, storages: Storages) -> int:
    """Bytes of forward values that the backward reads: the activations that live from the forward to the backward."""
    return sum(storages.nbytes[s] for s in saved_storages(graph, storages))


def saved_storages(graph: fx.Graph, storages: Storages) -> frozenset[int]:
    """Storages of forward values that the backward reads; parameters, what is made of them, results, and what lies on
    the host left out.
    """
    (output,) = graph.find_nodes(op="output")
    returned = {s for node in output.all_input_nodes for s in storages.of[node]}
    saved: set[int] = set()
    for node in graph.nodes:
        if is_backward(node) and node.op == "call_function":
            for operand in node.all_input_nodes:
                if not is_backward(operand) and not is_on_host(operand):
                    saved.update(storages.of[operand])
    return frozenset(saved - storages.borrowed - storages.weights - returned)


def tensors_of(value: Any) -> Iterable[Tensor]:
    """The tensors of a node's value."""
    if isinstance(value, Tensor):
        return (value,)
    return (v for v in value if isinstance(v, Tensor)) if isinstance(value, tuple | list) else ()


def _is_weight(node: fx.Node, known: Mapping[fx.Node, bool]) -> bool:
    if node.op == "placeholder":
        return input_kind(node) == "param"
    found = False
    for operand in node.all_input_nodes:
        if not is_size(operand):
            if not known[operand]:
                return False
            found = True
    return found


def _size(node: fx.Node, dims: Mapping[sympy.Symbol, int]) -> int | tuple[tuple[int, ...], torch.dtype]:
    """An integer placeholder's value, or shape and dtype of a tensor."""
    meta = local_meta(node)
    if meta is None:
        return int(size_of(node).subs(dims))
    assert isinstance(meta, TensorMeta)
    return tuple(meta.sizes(dims)), meta.dtype


def _place(node: fx.Node, dims: Mapping[sympy.Symbol, int]) -> Any:
    size = _size(node, dims)
    return size if isinstance(size, int) else torch.empty(size[0], dtype=size[1], device=META)


def _call(node: fx.Node, values: dict[fx.Node, Any], dims: Mapping[sympy.Symbol, int]) -> Any:
    target, args, kwargs = _given(node, values, {} if _has_place(node) else None, dims)
    return target(*args, **kwargs)


def _given(
    node: fx.Node, values: Mapping[fx.Node, Any], places: Mapping[str, int] | None, dims: Mapping[sympy.Symbol, int]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What stands for the node's call on the meta device, and its operands; `places` of one that `_has_place`."""
    target: Any = node.target
    counted, collective, takes_device = _way(target)
    if counted:
        metas: Any = local_meta(node)
        return _made, tuple((one.sizes(dims), one.dtype) for one in metas), {}
    given: Any = fx.node.map_arg(node.args, values.__getitem__)
    if collective is not None:
        return collective, given, {}
    kwargs = dict(fx.node.map_arg(node.kwargs, values.__getitem__)) if node.kwargs else {}
    args: Any = given
    if places is not None:
        args = tuple(places.get(a[1:], 0) if isinstance(a, str) and a[:1] == "#" else a for a in given)
    if target is torch.ops.aten.convolution_backward.default:  # kernels know the bias' size; the meta one believes this
        args = (*args[:3], [args[0].shape[1]], *args[4:])
    if takes_device:
        makes = not any(map(_is_tensor, args))
        if makes or kwargs.get("device") is not None:
            kwargs["device"] = META
    return target, args, kwargs


@functools.lru_cache(maxsize=4096)
def _way(target: Callable[..., Any]) -> tuple[bool, Callable[..., Any] | None, bool]:
    """Whether it is one of `_COUNTED`, what stands for a collective, and whether it is told of a device."""
    schema = getattr(target, "_schema", None)
    takes_device = schema is not None and any(a.name == "device" for a in schema.arguments)
    return target in _COUNTED, _COLLECTIVES.get(target), takes_device


def _has_place(node: fx.Node) -> bool:
    """Whether the rank's place on an axis is an operand, as "#tp"."""
    return any([type(arg) is str and arg[:1] == "#" for arg in node.args])


def _is_tensor(value: Any) -> bool:
    """Whether it is one, or has one in it."""
    return any(True for _ in tensors_of(value)) or any(True for _ in meta_tensors(value))


def _made(*metas: tuple[Sequence[int], torch.dtype]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=META) for shape, dtype in metas)


def _rows(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


# Of these a size is known at run time alone: it is here what it is in the mean (`fxpar.ir.counts`).
_COUNTED = {copies.copies, copies.own_rows}
# Shapes alone: on the meta device torch would look up the process group, and a program knows tokens only.
_COLLECTIVES: dict[Any, Callable[..., Any]] = {
    c10d.all_reduce.default: lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    c10d.all_reduce_.default: lambda x, *_: x,
    c10d.all_gather_into_tensor.default: lambda x, degree, _: _rows(x, x.shape[0] * degree),
    c10d.reduce_scatter_tensor.default: lambda x, _op, degree, _: _rows(x, x.shape[0] // degree),
    c10d.all_to_all_single.default: lambda x, got, _sent, _: _rows(x, sum(got)),
    c10d.wait_tensor.default: lambda x: x,
    layout.shift: lambda x, *_: torch.empty_like(x),
    copies.exchange: lambda x, *_: torch.empty_like(x),
    copies.sum_copies: lambda x, _to, _sent, ids: _rows(x, ids.shape[0]),
}
