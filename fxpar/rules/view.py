"""From a node of a graph to the `OpView` that rules speak of: sizes as integers, operands numbered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from fxpar.ir.axes import RING
from fxpar.ir.collectives import is_collective, reshard
from fxpar.ir.dist_config import OuterShard, Placement, Shard
from fxpar.ir.graph import Size, TensorMeta
from fxpar.ir.node_meta import is_size, size_of, tensor_metas, wanted_dists
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import ATTENTION, DOCUMENTS_AT, is_view
from fxpar.rules.option import Option, OpView, Shape, TensorRef, localize

aten = torch.ops.aten

Value = tuple[fx.Node, int]  # result `int` of a node
Metas = Callable[[fx.Node], tuple[TensorMeta | None, ...]]
_SLICES: dict[Any, tuple[int, bool]] = {aten.slice.Tensor: (1, False), aten.slice_backward.default: (2, True)}
"""Where the dim stands among the arguments, bounds behind it; whether the result is what they are bounds of."""


def documents_read(node: fx.Node) -> fx.Node | None:
    """The input from which a call of attention is told of documents, whatever collectives are between; None if there
    is none, or what the model computes.
    """
    first = DOCUMENTS_AT[node.target]
    source = node.args[first] if len(node.args) > first else None
    while isinstance(source, fx.Node) and source.op == "call_function":
        if not (is_view(source.target) or source.target is reshard or is_collective(source)):
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) else None


def ring_of(node: fx.Node, strategy: Strategy) -> str:
    """The axes, joined by '.', of the ring over which a call of attention has its tokens cut; "" if it has none."""
    wanted = wanted_dists(node) if node.target in ATTENTION else ()
    if not wanted:
        return ""
    queries = wanted[ATTENTION[node.target]]  # type: ignore[index]
    atoms = [atom for entry in queries.in_parts(strategy.atoms).dims[2] for atom in entry.axis.split(".")]
    rings = [strategy.axis_in(atom, node.meta.get("rule")) == RING for atom in atoms]
    return ".".join(entry.axis for entry in queries.dims[2]) if rings and all(rings) else ""


class Sizes:
    """Sizes as integers, for matching shapes ("probe") and for counting bytes ("nominal").

    A dynamic dim is probed at a prime times the product of the degrees: it divides by every degree, as the runtime will
    see to by padding, and no other size is mistaken for it.
    """

    _PRIMES = (1009, 1013, 1019, 1021, 1031, 1033)
    NOMINAL = 2048  # tokens; placements must not depend on the example's length

    def __init__(
        self,
        symbols: list[sympy.Symbol],
        degree_product: int,
        token: sympy.Symbol | None = None,
        *,
        others: int | None = None,
    ) -> None:
        """`others`: what dims other than `token` are probed at."""
        self._probe = {s: p * degree_product for s, p in zip(symbols, self._PRIMES, strict=False)}
        if others is not None:
            self._probe.update({s: others for s in symbols if s != token})
        self._nominal = {s: self.NOMINAL if s == token or len(symbols) == 1 else 1 for s in symbols}
        self._cache: dict[Any, int] = {}
        self._shapes: dict[tuple, tuple[int, ...]] = {}
        self._bytes: dict[TensorMeta, int] = {}

    def probe(self, size: Size) -> int:
        """Integer that stands for a size (or for any integer expression of the dynamic dims)."""
        if isinstance(size, int):
            return size
        if size not in self._cache:
            self._cache[size] = int(size.subs(self._probe))  # type: ignore[arg-type]
        return self._cache[size]

    def shape(self, meta: TensorMeta) -> tuple[int, ...]:
        found = self._shapes.get(meta.shape)
        if found is None:
            found = self._shapes[meta.shape] = tuple(self.probe(s) for s in meta.shape)
        return found

    def nbytes(self, meta: TensorMeta) -> int:
        """Bytes of the whole tensor with nominal dynamic dims, every float counted as two bytes.

        Were real widths counted, an fp32 norm between bf16 layers would decide where sums are taken, and the
        placements of a model would depend on the dtype it is captured in.
        """
        found = self._bytes.get(meta)
        if found is None:
            width = 2 if meta.dtype.is_floating_point else meta.dtype.itemsize
            found = self._bytes[meta] = meta.numel(self._nominal) * width
        return found


def resolve(node: fx.Node) -> Value:
    """The (op node, result) behind a value; looks through getitem."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        return source, index  # type: ignore[return-value]
    return node, 0


def is_op(node: fx.Node) -> bool:
    """A call that makes tensors (no getitem, no integer arithmetic)."""
    return node.op == "call_function" and node.target is not operator.getitem and bool(tensor_metas(node))


def make_view(
    node: fx.Node,
    sizes: Sizes,
    others: Sequence[tuple[Mapping[fx.Node, Option], int]] = (),
    metas: Metas = tensor_metas,
) -> tuple[OpView, list[Value]]:
    """`OpView` of a node, with sizes and bounds of slices already cut by the options of other axes: `others` are these
    with degrees. `metas` gives the shapes of a node's results.
    """
    operands: list[Value] = []
    shapes: list[tuple[int, ...]] = []
    dynamic: list[tuple[int, ...]] = []
    moving = False
    cuts = [(option, degree) for options, degree in others if (option := options.get(node))]

    def convert(arg: fx.Node) -> Any:
        nonlocal moving
        if is_size(arg):
            moving |= _is_dynamic(size_of(arg))
            return sizes.probe(size_of(arg))
        value = resolve(arg)
        meta = metas(value[0])[value[1]]
        assert meta is not None
        shape, position = sizes.shape(meta), len(operands)
        for option, degree in cuts:
            shape = localize(shape, option.inputs[position], degree)
        operands.append(value)
        dynamic.append(_dynamic_dims(meta))
        shapes.append(shape)
        return TensorRef(position)

    args = tuple(_freeze(map_arg(list(node.args), convert)))
    kwargs = tuple((k, _freeze(map_arg(v, convert))) for k, v in node.kwargs.items())
    if cuts and node.target in _SLICES:
        at, of_result = _SLICES[node.target]
        source, index = (node, 0) if of_result else operands[0]
        places = [((option.outputs if of_result else option.inputs)[0], degree) for option, degree in cuts]
        args = _local_bounds(args, at, sizes.shape(metas(source)[index]), places)  # type: ignore[arg-type]
    outputs = made_shapes(node, sizes, others, metas)
    dynamic += [_dynamic_dims(m) if m is not None else () for m in metas(node)]
    return OpView(node.target, args, kwargs, tuple(shapes), outputs, tuple(dynamic), moving), operands


def _local_bounds(
    args: tuple[Any, ...], at: int, whole: Shape, places: Sequence[tuple[Placement, int]]
) -> tuple[Any, ...]:
    """Arguments of a slice of a tensor of `whole` whose dim is cut already: bounds on it scale with it, as each of its
    sections is cut alike. The dim is argument `at`.
    """
    dim = (args[at] if len(args) > at else 0) % len(whole)
    cuts = ((p, degree) for p, degree in places if isinstance(p, Shard | OuterShard) and p.dim == dim)
    pieces = [p.degree if isinstance(p, OuterShard) else degree for p, degree in cuts]
    found = list(args)
    for position in (at + 1, at + 2):
        bound = args[position] if len(args) > position else None
        if bound is not None:
            bound = min(max(bound + whole[dim], 0) if bound < 0 else bound, whole[dim])
            for count in pieces:
                bound = -(-bound // count)
            found[position] = bound
    return tuple(found)


def made_shapes(
    node: fx.Node,
    sizes: Sizes,
    others: Sequence[tuple[Mapping[fx.Node, Option], int]] = (),
    metas: Metas = tensor_metas,
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the results of a node, cut as for `make_view`; () for one that is no tensor."""
    found = []
    for index, meta in enumerate(metas(node)):
        shape: tuple[int, ...] = sizes.shape(meta) if meta is not None else ()
        for options, degree in others:
            if meta is not None and (option := options.get(node)):
                shape = localize(shape, option.outputs[index], degree)
        found.append(shape)
    return tuple(found)


def call_key(node: fx.Node) -> tuple[Any, Any]:
    """Arguments of a call, with what is known of an operand in place of the operand: calls of one op with equal keys
    have equal views. Repeated layers have many.
    """

    def known(arg: fx.Node) -> Any:
        if is_size(arg):
            return size_of(arg)
        source, index = resolve(arg)
        return tensor_metas(source)[index]

    kwargs = tuple((name, _freeze(map_arg(value, known))) for name, value in node.kwargs.items())
    return _freeze(map_arg(list(node.args), known)), kwargs


def _is_dynamic(size: Size) -> bool:
    return not isinstance(size, int) and bool(size.free_symbols)


def _dynamic_dims(meta: TensorMeta) -> tuple[int, ...]:
    return tuple(d for d, size in enumerate(meta.shape) if _is_dynamic(size))


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value
