"""Run an op under every option that its rule offers and compare with the whole op.

For the author of a rule. `validate_op(aten.roll.default, (x, [1], [0]), degree=2)` cuts the operands as each option
says, sends the call through the real passes `mask_padding` and `global_to_local`, runs it once per rank in this
process, puts the results together by the option's result placements and compares. A rule that offers nothing is never
wrong, so look at `trials` as well.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.axes import ROLE_AXES
from fxpar.ir.dist_config import DistConfig, OuterShard, P, Partial, Placement, R, Shard, chunk, normalize_sections
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.pass_registry import get
from fxpar.ir.strategy import Strategy
from fxpar.rules.option import Cut, Option, OpView, Seed, TensorRef, divides, replicated
from fxpar.rules.table import options, passing

AXIS, *_ = ROLE_AXES  # any of them: rules do not know what an axis is used for
# Ratios in which a dim is tried as a concatenation of parts; those that do not divide are left out.
SECTIONS: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 2), (2, 1), (2, 1, 1), (1, 1, 2))
_UNINITIALISED = ("aten.empty", "aten.new_empty")  # only the shapes of their results are defined


@dataclass(frozen=True)
class Trial:
    """One option, run on one set of tensors; `error` says how its result differs ("" if it does not)."""

    option: Option
    degree: int
    error: str = ""

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.option.inputs))
        outputs = ", ".join(map(str, self.option.outputs))
        return f"({inputs}) -> ({outputs}) on {self.degree} ranks: {self.error or 'equal'}"


def validate_op(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    degree: int = 2,
    *,
    sections: Sequence[tuple[int, ...]] = SECTIONS,
    tolerance: float = 1e-12,
) -> list[Trial]:
    """Trials whose result is wrong. Use float64 tensors; `tolerance` is relative to a result's largest element."""
    return [t for t in trials(target, args, kwargs, degree, sections=sections, tolerance=tolerance) if t.error]


def trials(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    degree: int = 2,
    *,
    sections: Sequence[tuple[int, ...]] = SECTIONS,
    tolerance: float = 1e-12,
    also: Sequence[Option] = (),
) -> list[Trial]:
    """Every option but the replicated one that the rule offers for any cut of any operand or result, tried out; and
    those of `also`.
    """
    call = _Call(target, tuple(args), dict(kwargs or {}), degree)
    found = [*options(call.view, degree, _seeds(call.view, degree, sections)), *passing(call.view), *also]
    found = list(dict.fromkeys(found))
    return [Trial(o, degree, call.error(o, tolerance)) for o in found if o != replicated(call.view) and call.can_try(o)]


def _seeds(op: OpView, degree: int, sections: Sequence[tuple[int, ...]]) -> list[tuple[Seed, Cut]]:
    seeds: list[tuple[Seed, Cut]] = []
    outers = [d for d in range(2, degree) if degree % d == 0]
    for is_result, shapes in ((False, op.inputs), (True, op.outputs)):
        for index, shape in enumerate(shapes):
            for d, size in enumerate(shape):
                cuts = [(), *(normalize_sections(s) for s in sections)]
                legal = [s for s in cuts if (chunk(size, degree, s) if s else divides(size, degree, (), True))]
                seeds += [((is_result, index), Shard(d, s)) for s in dict.fromkeys(legal)]
                outer = [OuterShard(d, o, inner) for o in outers if size % o == 0 for inner in (R, P)]
                seeds += [((is_result, index), cut) for cut in outer]
    return seeds


class _Call:
    """One call on concrete tensors, whole and in pieces."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], degree: int) -> None:
        self.target, self.args, self.kwargs, self.degree = target, args, kwargs, degree
        self.strategy = Strategy(((AXIS, degree),))
        self.operands: list[Tensor] = []

        def number(value: Any) -> Any:
            if isinstance(value, Tensor):
                self.operands.append(value)
                return TensorRef(len(self.operands) - 1)
            if isinstance(value, list | tuple):
                return tuple(number(v) for v in value)
            return value

        frozen = number(args)
        named = tuple((k, number(v)) for k, v in kwargs.items())
        result = target(*args, **kwargs)
        self.single = isinstance(result, Tensor)
        self.results: list[Tensor | None] = [result] if self.single else list(result)
        shapes = tuple(tuple(r.shape) if r is not None else () for r in self.results)
        self.view = OpView(target, frozen, named, tuple(tuple(x.shape) for x in self.operands), shapes)

    def can_try(self, option: Option) -> bool:
        """Whether the operands can be had as the option wants them: booleans are no sum of terms."""
        placed = zip(self.operands, option.inputs, strict=True)
        return not any(_has_terms(p) and x.dtype == torch.bool for x, p in placed)

    def error(self, option: Option, tolerance: float) -> str:
        """What is wrong with the results under an option; "" if nothing is."""
        tensors = zip((*self.operands, *self.results), (*option.inputs, *option.outputs), strict=True)
        padded = any(x is not None and self._config(x, p).padded_dims(x.shape) for x, p in tensors)
        for unknown in (False, True) if padded else (False,):
            try:
                ranks = self._run(option, unknown)
            except Exception as error:  # whatever the op raises is what the rule's author has to see
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            made = [(r, p) for r, p in zip(self.results, option.outputs, strict=True) if r is not None]
            for index, (whole, placement) in enumerate(made):
                problem = self._compare(whole, [results[index] for results in ranks], placement, tolerance)
                if problem:
                    return f"result {index}{' of operands with padding unknown' * unknown}: {problem}"
        return ""

    def _run(self, option: Option, unknown: bool) -> list[list[Tensor]]:
        """Results by rank; with `unknown`, floating-point padding is NaN and the passes do not take it for zero."""
        graph, call = self._local_graph(option, unknown)
        pieces = []
        for x, placement in zip(self.operands, option.inputs, strict=True):
            pieces.append(_split(x, self._config(x, placement), self.degree, padding=torch.nan if unknown else 0.0))
        found = []
        for rank in range(self.degree):
            results, shapes = _interpret(graph, rank, [p[rank] for p in pieces], call)
            wanted = [m.shape for m in _tuple(local_tensor(call)) if m is not None]
            if shapes != wanted:
                raise ValueError(f"global_to_local says {wanted}, the op made {shapes}")
            found.append(results)
        return found

    def _local_graph(self, option: Option, unknown: bool) -> tuple[fx.Graph, fx.Node]:
        """A graph of this one call after the passes, and the call."""
        graph = fx.Graph()
        places: list[fx.Node] = []
        for i, (x, placement) in enumerate(zip(self.operands, option.inputs, strict=True)):
            place = graph.placeholder(f"x{i}")
            place.meta.update(tensor=_meta(x), dist=self._config(x, placement))
            places.append(place)
        if unknown:  # nobody says that this op keeps zeros
            places = [_like(graph.call_function(torch.ops.aten.resolve_conj.default, (p,)), p) for p in places]
        supply = iter(places)

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(supply)
            if isinstance(value, list | tuple):
                return type(value)(swap(v) for v in value)
            return value

        call = graph.call_function(self.target, swap(self.args), {k: swap(v) for k, v in self.kwargs.items()})
        metas = [_meta(r) if r is not None else None for r in self.results]
        placed = zip(self.results, option.outputs, strict=True)
        dists = [self._config(r, p) if r is not None else None for r, p in placed]
        if self.single:
            call.meta.update(tensor=metas[0], dist=dists[0])
            results = [call]
        else:
            call.meta.update(tensor=tuple(metas), dist=tuple(dists))
            results = []
            for i, (meta, dist) in enumerate(zip(metas, dists, strict=True)):
                if meta is not None:
                    results.append(graph.call_function(operator.getitem, (call, i)))
                    results[-1].meta.update(tensor=meta, dist=dist)
        graph.output(tuple(results))
        annotated = AnnotatedGraph(graph, (), (), (), self.strategy)
        for step in _passes():
            step(annotated)
        return graph, call

    def _config(self, x: Tensor, placement: Placement) -> DistConfig:
        return DistConfig.replicated(self.strategy.mesh, x.dim(), x.dtype).with_placement(AXIS, placement)

    def _compare(self, whole: Tensor, local: list[Tensor], placement: Placement, tolerance: float) -> str:
        config = self._config(whole, placement)
        if str(self.target).startswith(_UNINITIALISED):
            return ""
        for axes, op in [((axis,), op) for axis, op in config.partial]:
            groups = [config.mesh.group_of(rank, axes) for rank in range(self.degree)]
            local = [_reduce(torch.stack([local[member] for member in group]), op) for group in groups]
        if isinstance(placement, Shard | OuterShard):
            joined, padded = torch.zeros_like(whole), bool(config.padded_dims(whole.shape))
            for rank, piece in enumerate(local):
                config.put(joined, piece, rank)
                if padded:
                    padding = config.take(torch.ones_like(whole, dtype=torch.bool), rank).logical_not()
                    if piece[padding].count_nonzero():
                        return "padding of a result of the graph is not zero"
            return _gap(joined, whole, tolerance)
        return next((gap for piece in local if (gap := _gap(piece, whole, tolerance))), "")


@functools.cache
def _passes() -> tuple[Any, ...]:
    """By name: a rule knows nothing of passes, and looking a name up reads every installed package's entry points."""
    return tuple(get(name)() for name in ("mask_padding", "global_to_local"))


def _interpret(graph: fx.Graph, rank: int, operands: list[Tensor], call: fx.Node) -> tuple[list[Tensor], list[tuple]]:
    """Results of the graph on one rank, and the shapes that `call` made; `#tp` tokens stand for the rank."""
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*(rank if a == f"#{AXIS}" else a for a in args), **kwargs)
    (output,) = graph.find_nodes(op="output")
    shapes = [tuple(r.shape) for r in _tuple(values[call]) if r is not None]
    return [values[node] for node in output.args[0]], shapes


def _tuple(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _meta(x: Tensor) -> TensorMeta:
    return TensorMeta(tuple(x.shape), x.dtype)


def _like(node: fx.Node, other: fx.Node) -> fx.Node:
    node.meta.update(other.meta)
    return node


def _split(x: Tensor, config: DistConfig, degree: int, *, padding: float) -> list[Tensor]:
    """The pieces of one operand by rank: a cut, terms of a sum, or copies. Padding of integers is always 0."""
    if config.partial:
        ((axis, _),), mesh = config.partial, config.mesh
        others = range(mesh.degree(axis) - 1)
        terms = [torch.randint_like(x, -9, 9) if _counts(x) else torch.randn_like(x) for _ in others]
        terms.append(x - sum(terms, torch.zeros_like(x)))
        return [config.take(terms[mesh.index(rank, axis)], rank) for rank in range(degree)]
    pieces = [config.take(x, rank) for rank in range(degree)]
    if x.is_floating_point() and config.padded_dims(x.shape):
        real = torch.ones_like(x, dtype=torch.bool)
        pieces = [p.masked_fill(~config.take(real, rank), padding) for rank, p in enumerate(pieces)]
    return pieces


def _reduce(stack: Tensor, op: str) -> Tensor:
    if op == "max":
        return stack.amax(0)
    if op == "logsumexp":
        return stack.logsumexp(0)
    return stack.mean(0) if op == "avg" else stack.sum(0)


def _has_terms(placement: Placement) -> bool:
    return isinstance(placement.inner if isinstance(placement, OuterShard) else placement, Partial)


def _counts(x: Tensor) -> bool:
    """Whether the elements are integers or booleans."""
    return not x.is_floating_point() and not x.is_complex()


def _gap(value: Tensor, whole: Tensor, tolerance: float) -> str:
    """ "" if equal up to `tolerance` of the largest element; NaN and infinities must stand in the same places."""
    if value.shape != whole.shape:
        return f"shape {tuple(value.shape)} instead of {tuple(whole.shape)}"
    if value.dtype == whole.dtype and torch.equal(value, whole):
        return ""  # most are, and to see that takes a tenth of what follows
    if whole.is_complex():
        value, whole = (torch.view_as_real(v.resolve_conj()) for v in (value, whole))
    if _counts(whole):
        return "" if torch.equal(value.to(whole.dtype), whole) else "other integers"
    odd = ~torch.isfinite(whole)
    if not torch.equal(torch.nan_to_num(value[odd], 2.0), torch.nan_to_num(whole[odd], 2.0)):
        return "NaN or infinity at other places"
    value, whole = value[~odd], whole[~odd]
    if not whole.numel():
        return ""
    gap, size = float((value - whole).abs().max()), float(whole.abs().max())
    return "" if gap <= tolerance * size else f"off by {gap:.1e}, largest element {size:.1e}"


__all__ = ["SECTIONS", "Trial", "trials", "validate_op"]
