"""What each mesh axis inside of a replica is for: the tensor axis cuts weights, the context axis cuts tokens."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import sympy

from fxpar.annotate.bins import reads_bins
from fxpar.annotate.cost import LAUNCH_BYTES, reshard_bytes
from fxpar.annotate.narrow import narrow_classes
from fxpar.annotate.problem import RECEIVED, AxisProblem, OpClass
from fxpar.annotate.solve import is_weight
from fxpar.errors import OverrideError
from fxpar.errors.base import nearest_name
from fxpar.ir.dist_config import OuterShard, Partial, Placement, R, Replicate, Shard
from fxpar.ir.graph import AnnotatedGraph, Input, LogicalGraph, TensorMeta
from fxpar.ir.node_meta import input_kind, is_backward, tensor_metas, tensor_of
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import parse_override
from fxpar.ops.traits import ATTENTION, is_product, is_view
from fxpar.rules.option import Option
from fxpar.rules.own_ops import attention_by_tokens, attention_in_ring, attention_options, narrow_attention
from fxpar.rules.table import own, passing

# A product or a weight that is not cut costs this many times its bytes: cutting the work is what the axis is for, so it
# outweighs communication unless the cut is absurd.
WHOLE_WORK = 64
# Under sequence parallelism an activation that every rank keeps whole costs memory.
WHOLE_ACTIVATION = 0.5
CARRIED_TERM = 1e-3  # breaks ties, as a term that is carried on sends nothing by itself

_CUTS = (Shard, OuterShard)


def cut_kinds(problem: AxisProblem, entry: OpClass, option: Option) -> list[bool | None]:
    """Kind (token, static, neither) of every dim that an option cuts."""
    kinds = []
    for result, placement in enumerate(option.outputs):
        if isinstance(placement, _CUTS):
            kinds.append(entry.token[result][placement.dim])
    for producers, placement in zip(entry.operands, option.inputs, strict=True):
        if isinstance(placement, _CUTS):
            producer, result = min(producers)
            kinds.append(problem.classes[producer].token[result][placement.dim])
    return kinds


# Inputs that come in whole on every rank of a replica: any piece of them costs nothing.
_WHOLE_INPUTS = ("batch", "tangent")


def boundary_placement(meta: TensorMeta, token: sympy.Symbol | None, cut: bool) -> Placement:
    """How a value lies on an axis between two pipeline stages, for sender and receiver alike: its first token dim is
    cut if the axis cuts tokens, else it is whole.
    """
    if cut and token is not None:
        for dim, size in enumerate(meta.shape):
            if not isinstance(size, int) and token in size.free_symbols:
                return Shard(dim)
    return R


def _token_dims(entry: OpClass, result: int) -> list[int]:
    """Token dims of the inputs of a micro-batch; whatever follows from them is found through the rules."""
    if input_kind(entry.nodes[0]) not in (*_WHOLE_INPUTS, *RECEIVED):
        return []
    return [d for d, token in enumerate(entry.token[result]) if token]


def _work_bytes(problem: AxisProblem, entry: OpClass) -> float:
    """Bytes that a product or attention touches; 0 for other ops."""
    if entry.view.target not in ATTENTION and not is_product(entry.view.target):
        return 0.0
    return float(sum(problem.sizes.nbytes(m) for m in tensor_metas(entry.nodes[0]) if m))


def _carried_bytes(problem: AxisProblem, entry: OpClass, option: Option) -> float:
    """Of a forward op that hands terms of a sum on: whoever needs the sum for the backward keeps it beside the term, so
    of two placements that move as much the one that adds up first is better. A residual stream is summed that way.
    """
    terms_in = any(isinstance(p, Partial) for p in option.inputs)
    if not terms_in or is_view(entry.view.target) or is_backward(entry.nodes[0]):
        return 0.0
    metas = tensor_metas(entry.nodes[0])
    terms = [meta for p, meta in zip(option.outputs, metas, strict=True) if isinstance(p, Partial) and meta]
    return CARRIED_TERM * sum(problem.sizes.nbytes(meta) for meta in terms)


def _weight_bytes(problem: AxisProblem, entry: OpClass) -> float:
    """Bytes of a weight and of the activations that it makes, so that neither small widths nor long batches tip it."""
    meta = tensor_of(entry.nodes[0])
    return problem.sizes.nbytes(meta) + problem.sizes.NOMINAL * max(entry.view.outputs[0]) * meta.dtype.itemsize


def _is_table(problem: AxisProblem, reader: OpClass) -> bool:
    """Whether a weight that `reader` reads is a table of what the batch names. Biases of experts, looked up by what a
    router chose, are none: they lie as the products that they are added to.
    """
    chosen = reader.view.target is own.embedding.default and reader.operands[1]
    return bool(chosen) and not any(problem.classes[index].weighted for index, _ in chosen)


def _is_cut(option: Option) -> bool:
    return any(isinstance(p, _CUTS) for p in (*option.inputs, *option.outputs))


def _is_term(placement: Placement) -> bool:
    """Whether an input cannot lie so: nobody hands out terms of a sum."""
    return isinstance(placement, OuterShard) and placement.inner != R


@dataclass(frozen=True)
class ModelAxis:
    """An axis of `degree`; `cuts_tokens` says whether it cuts the token dim, of symbol `token`, between modules."""

    degree: int
    cuts_tokens: bool
    overrides: Mapping[str, Placement]  # of parameters, by placeholder name
    token: sympy.Symbol | None

    def of(self, entry: OpClass) -> Self:
        """What the axis is for in the module that a class belongs to: this, wherever that is."""
        return self


@dataclass(frozen=True)
class TensorAxis(ModelAxis):
    """tp: weights are cut; activations follow. Under `+sp`, tokens may be cut where weights are not involved."""

    def seeds(self, entry: OpClass, result: int) -> list[int]:
        if input_kind(entry.nodes[0]) == "param":
            return list(range(len(entry.view.outputs[0])))
        return _token_dims(entry, result) if self.cuts_tokens else []

    def sources(self, entry: OpClass) -> list[Option]:
        node = entry.nodes[0]
        if input_kind(node) in RECEIVED:
            return [Option((), (boundary_placement(tensor_of(node), self.token, self.cuts_tokens),))]
        shards = sorted((s for s in entry.candidates[0] if not _is_term(s)), key=str)
        if input_kind(node) == "tangent":
            return [Option((), (R,)), *(Option((), (s,)) for s in shards)]
        if input_kind(node) != "param":
            return [Option((), (R,))]
        override = self.overrides.get(node.name)
        if isinstance(override, Replicate):
            return [Option((), (R,))]
        if isinstance(override, Shard):
            same_dim = [s for s in shards if isinstance(s, Shard) and s.dim == override.dim] or [override]
            return [Option((), (s,)) for s in same_dim]
        return [Option((), (R,)), *(Option((), (s,)) for s in shards)]

    def narrow(self, problem: AxisProblem) -> dict[int, int]:
        return narrow_classes(problem)

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        if entry.view.target in ATTENTION:
            narrow = narrow_attention(entry.view, self.degree)
            return [*attention_options(entry.view, self.degree), *([narrow] if narrow else [])]
        # One head lies whole on all ranks, a term of its gradient on each.
        return passing(entry.view) if problem.narrow.get(entry.index) == 1 else []

    def refusal(self, problem: AxisProblem, entry: OpClass, option: Option) -> str:
        outer = any(isinstance(p, OuterShard) for p in (*option.inputs, *option.outputs))
        if outer and entry.index not in problem.narrow and entry.view.target not in ATTENTION:
            return "it makes fewer shards than there are ranks, which tp does only for few key-value heads"
        kinds = cut_kinds(problem, entry, option)
        if None in kinds:
            return "it shards a dynamic dim other than the tokens"
        return "it shards tokens, which tp does only with +sp" if True in kinds and not self.cuts_tokens else ""

    def node_cost(self, problem: AxisProblem, entry: OpClass, option: Option) -> float:
        one_head = problem.narrow.get(entry.index) == 1
        if entry.view.target == "input":
            if not is_weight(entry):
                return 0.0
            table = any(_is_table(problem, problem.classes[user]) for user, _ in entry.users)
            by_width = isinstance(option.outputs[0], Shard) and option.outputs[0].dim > 0
            if table and by_width and entry.nodes[0].name not in self.overrides:
                return 2 * WHOLE_WORK * _weight_bytes(problem, entry)  # tables are cut by rows, as a tied head needs
            whole = not _is_cut(option) and not one_head
            return WHOLE_WORK * _weight_bytes(problem, entry) if whole else 0.0
        cost = _carried_bytes(problem, entry, option)
        if not _is_cut(option) and not one_head:
            cost += WHOLE_WORK * _work_bytes(problem, entry)
        if self.cuts_tokens and entry.weighted and not is_view(entry.view.target) and not one_head:
            for placement, kinds, meta in zip(option.outputs, entry.token, tensor_metas(entry.nodes[0]), strict=True):
                if meta is not None and any(kinds) and placement == R:
                    cost += WHOLE_ACTIVATION * problem.sizes.nbytes(meta)
        return cost


@dataclass(frozen=True)
class ContextAxis(ModelAxis):
    """cp: tokens are cut everywhere but in attention, which swaps them for heads (Ulysses) where heads divide."""

    def seeds(self, entry: OpClass, result: int) -> list[int]:
        return _token_dims(entry, result)

    def sources(self, entry: OpClass) -> list[Option]:
        node = entry.nodes[0]
        if input_kind(node) in RECEIVED:
            return [Option((), (boundary_placement(tensor_of(node), self.token, self.cuts_tokens),))]
        if input_kind(node) not in _WHOLE_INPUTS:
            return [Option((), (R,))]
        return [Option((), (R,)), *(Option((), (s,)) for s in sorted(entry.candidates[0], key=str))]

    def narrow(self, problem: AxisProblem) -> dict[int, int]:
        return {}

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        return attention_options(entry.view, self.degree) if entry.view.target in ATTENTION else []

    def refusal(self, problem: AxisProblem, entry: OpClass, option: Option) -> str:
        if entry.view.target in ATTENTION or all(kind is True for kind in cut_kinds(problem, entry, option)):
            return ""
        return "it cuts another dim than the tokens, which cp does in attention only"

    def node_cost(self, problem: AxisProblem, entry: OpClass, option: Option) -> float:
        return 0.0 if _is_cut(option) else WHOLE_WORK * _work_bytes(problem, entry)


@dataclass(frozen=True)
class RowsAxis(ContextAxis):
    """rows: as cp, but tokens are cut between documents, so attention keeps them cut and sends nothing."""

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        by_tokens = attention_by_tokens(entry.view) if entry.view.target in ATTENTION else None
        if by_tokens is not None and all(map(reads_bins, entry.nodes)):
            return [by_tokens]
        return super().extra(problem, entry)


@dataclass(frozen=True)
class RingAxis(ContextAxis):
    """ring: as cp, but attention keeps its tokens cut, and keys and values travel. Where a mask says who sees whom, it
    is as cp.
    """

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        in_ring = attention_in_ring(entry.view) if entry.view.target in ATTENTION else None
        if in_ring is not None and all(kind is True for kind in cut_kinds(problem, entry, in_ring)):
            return [in_ring]
        return super().extra(problem, entry)


def grad_cost(nbytes: int, placement: Placement, degree: int) -> float:
    """A gradient that stays partial is reduced later, together with others: no launch of its own."""
    if isinstance(placement, Partial):
        return max(0.0, reshard_bytes(nbytes, placement, R, degree) - LAUNCH_BYTES)
    return 0.0


def resolve_overrides(graph: LogicalGraph | AnnotatedGraph, strategy: Strategy) -> dict[str, Placement]:
    """Override of each parameter placeholder by name; the first glob that matches wins. Raises OverrideError."""
    found: dict[str, Placement] = {}
    params = [(node, info) for node, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"]
    names = [fqn for _, info in params for fqn in (info.fqn, *info.aliases)]
    for pattern, text in strategy.overrides:
        placement = parse_override(pattern, text)
        matched = [(n, i) for n, i in params if any(fnmatch.fnmatchcase(f, pattern) for f in (i.fqn, *i.aliases))]
        if not matched:
            hint = nearest_name(pattern, names) or ". Globs run over parameter FQNs."
            raise OverrideError(pattern, "matches no parameter", hint)
        for node, info in matched:
            _check_dim(pattern, placement, info)
            found.setdefault(node.name, placement)
    return found


def _check_dim(pattern: str, placement: Placement, info: Input) -> None:
    rank = len(info.meta.shape)
    if isinstance(placement, Shard) and placement.dim >= rank:
        raise OverrideError(
            pattern, f"{placement} names dim {placement.dim}, but parameter {info.fqn!r} has {rank} dims."
        )


__all__ = [
    "ContextAxis",
    "ModelAxis",
    "RingAxis",
    "RowsAxis",
    "TensorAxis",
    "boundary_placement",
    "grad_cost",
    "resolve_overrides",
]
