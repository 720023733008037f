"""Run an op under every option that its rule offers and compare with the whole op.

For an author of a rule: `validate_op(aten.roll.default, (x, [1], [0]), degree=2)` cuts the operands as each option says,
makes size arguments local with the real pass `global_to_local`, runs the op once per rank in this process, puts the
results together by the option's result placements and compares. A rule that is silent passes, so look at `trials` too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.dist_config import DistConfig, Partial, Placement, Shard, chunk, normalize_sections
from fxpar.graph import AnnotatedGraph, TensorMeta
from fxpar.pass_registry import get
from fxpar.rules.option import OpView, Option, Seed, TensorRef, divides, replicated
from fxpar.rules.table import options
from fxpar.strategy import Strategy

AXIS = "tp"
# Ratios in which a dim is tried as a concatenation of parts; those that do not divide are left out.
SECTIONS: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 2), (2, 1), (2, 1, 1), (1, 1, 2))
# Results of these are not defined, only their shapes.
_UNINITIALISED = ("aten.empty", "aten.new_empty")


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
    """Trials whose result is wrong. Tensors in `args` should be float64; `tolerance` is relative to the largest element."""
    return [t for t in trials(target, args, kwargs, degree, sections=sections, tolerance=tolerance) if t.error]


def trials(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    degree: int = 2,
    *,
    sections: Sequence[tuple[int, ...]] = SECTIONS,
    tolerance: float = 1e-12,
) -> list[Trial]:
    """Every option but the replicated one that the rule offers for any cut of any operand or result, tried out."""
    call = _Call(target, tuple(args), dict(kwargs or {}), degree)
    found = options(call.view, degree, _seeds(call.view, degree, sections))
    return [Trial(o, degree, call.difference(o, tolerance)) for o in found if o != replicated(call.view)]


def _seeds(op: OpView, degree: int, sections: Sequence[tuple[int, ...]]) -> list[tuple[Seed, Shard]]:
    seeds: list[tuple[Seed, Shard]] = []
    for is_result, shapes in ((False, op.inputs), (True, op.outputs)):
        for index, shape in enumerate(shapes):
            for d, size in enumerate(shape):
                cuts = [(), *(normalize_sections(s) for s in sections)]
                legal = [s for s in cuts if (divides(size, degree, (), True) if not s else chunk(size, degree, s))]
                seeds += [((is_result, index), Shard(d, s)) for s in dict.fromkeys(legal)]
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

    def difference(self, option: Option, tolerance: float) -> str:
        """How the results under an option differ from the whole ones; "" if they do not."""
        try:
            pieces = self._run(option)
        except Exception as error:  # whatever the op raises is what the rule's author has to see
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        uninitialised = str(self.target).startswith(_UNINITIALISED)
        for index, (whole, placement) in enumerate(zip(self.results, option.outputs, strict=True)):
            if whole is None:
                continue
            local = [ranks[index] for ranks in pieces]
            problem = self._compare(whole, local, placement, tolerance, uninitialised)
            if problem:
                return f"result {index}: {problem}"
        return ""

    def _run(self, option: Option) -> list[list[Tensor | None]]:
        """Results by rank and position."""
        graph, call = self._local_graph(option)
        module = fx.GraphModule(torch.nn.Module(), graph)
        aware = not any(isinstance(p, Partial) for p in option.outputs)
        operands = [
            _split(x, self._config(x, p), self.degree, garbage=aware)
            for x, p in zip(self.operands, option.inputs, strict=True)
        ]
        found = []
        for rank in range(self.degree):
            result = module(*(pieces[rank] for pieces in operands))
            results = [result] if self.single else list(result)
            for got, meta in zip(results, _tuple(call.meta["local"]), strict=True):
                if got is not None and tuple(got.shape) != meta.shape:
                    raise ValueError(f"global_to_local says {meta}, the op made {tuple(got.shape)}")
            found.append(results)
        return found

    def _local_graph(self, option: Option) -> tuple[fx.Graph, fx.Node]:
        """A graph of this one call after `global_to_local`."""
        graph = fx.Graph()
        places = [graph.placeholder(f"x{i}") for i in range(len(self.operands))]
        for place, x, placement in zip(places, self.operands, option.inputs, strict=True):
            place.meta.update(tensor=_meta(x), dist=self._config(x, placement))
        supply = iter(places)

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(supply)
            if isinstance(value, list | tuple):
                return type(value)(swap(v) for v in value)
            return value

        args = swap(self.args)
        call = graph.call_function(self.target, args, {k: swap(v) for k, v in self.kwargs.items()})
        metas = tuple(_meta(r) if r is not None else None for r in self.results)
        dists = tuple(
            self._config(r, p) if r is not None else None for r, p in zip(self.results, option.outputs, strict=True)
        )
        call.meta.update(tensor=metas[0] if self.single else metas, dist=dists[0] if self.single else dists)
        graph.output((call,))
        get("global_to_local")()(AnnotatedGraph(graph, (), (), (), self.strategy))
        (output,) = graph.find_nodes(op="output")
        output.args = (call,)
        return graph, call

    def _config(self, x: Tensor, placement: Placement) -> DistConfig:
        return DistConfig.replicated(self.strategy.mesh, x.dim(), x.dtype).with_placement(AXIS, placement)

    def _compare(
        self, whole: Tensor, local: list[Any], placement: Placement, tolerance: float, shape_only: bool
    ) -> str:
        config = self._config(whole, placement)
        if shape_only:
            wanted = config.local_shape(whole.shape)
            return "" if all(tuple(x.shape) == wanted for x in local) else f"local shapes are not {wanted}"
        if isinstance(placement, Shard):
            joined = torch.zeros_like(whole)
            for rank, piece in enumerate(local):
                config.put(joined, piece, rank)
            return _gap(joined, whole, tolerance)
        if isinstance(placement, Partial):
            return _gap(_reduce(torch.stack(local), placement.op), whole, tolerance)
        return next((gap for piece in local if (gap := _gap(piece, whole, tolerance))), "")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _meta(x: Tensor) -> TensorMeta:
    return TensorMeta(tuple(x.shape), x.dtype)


def _split(x: Tensor, config: DistConfig, degree: int, *, garbage: bool) -> list[Tensor]:
    """The pieces of one operand by rank: a cut, terms of a sum, or copies.

    With `garbage`, padding of floating-point pieces is NaN: only an op that contracts the dim gets it zeroed by
    `mask_padding`, any other must not let it leak.
    """
    if config.partial:
        terms = [torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, -9, 9) for _ in range(degree - 1)]
        return [*terms, x - sum(terms, torch.zeros_like(x))]
    pieces = [config.take(x, rank) for rank in range(degree)]
    if garbage and x.is_floating_point():
        real = torch.ones_like(x, dtype=torch.bool)
        pieces = [p.masked_fill(~config.take(real, rank), torch.nan) for rank, p in enumerate(pieces)]
    return pieces


def _reduce(stack: Tensor, op: str) -> Tensor:
    if op == "max":
        return stack.amax(0)
    if op == "logsumexp":
        return stack.logsumexp(0)
    return stack.mean(0) if op == "avg" else stack.sum(0)


def _gap(value: Tensor, whole: Tensor, tolerance: float) -> str:
    """"" if equal up to `tolerance` of the largest element; NaN and infinities must stand in the same places."""
    if value.shape != whole.shape:
        return f"shape {tuple(value.shape)} instead of {tuple(whole.shape)}"
    if not whole.is_floating_point():
        return "" if torch.equal(value.to(whole.dtype), whole) else "other integers"
    odd = ~torch.isfinite(whole)
    if not torch.equal(torch.nan_to_num(value[odd], 2.0), torch.nan_to_num(whole[odd], 2.0)):
        return "NaN or infinity at other places"
    value, whole = value[~odd], whole[~odd]
    if not whole.numel():
        return ""
    gap = float((value - whole).abs().max())
    size = max(float(whole.abs().max()), 1e-300)
    return "" if gap <= tolerance * size else f"off by {gap / size:.1e} of the largest element"


def all_trials(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, degrees: Sequence[int] = (2, 3)
) -> list[Trial]:
    """`trials` on several degrees."""
    return list(itertools.chain.from_iterable(trials(target, args, kwargs, degree) for degree in degrees))


__all__ = ["SECTIONS", "Trial", "all_trials", "trials", "validate_op"]
