"""The table op -> sharding rule. An op without an entry runs replicated, with a warning that names it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from fxpar.errors import NotAnOpError, OpContractError, OpExistsError, nearest
from fxpar.ir.dist_config import OuterShard, P, R, Shard
from fxpar.ir.serialize import OpOverload
from fxpar.ops import traits
from fxpar.rules import matmul, own_ops, pointwise, reduction, reshape, slicing
from fxpar.rules.contract import checked_partials, checked_rule
from fxpar.rules.option import Cut, Factor, Option, OpView, Rule, Seed, from_factors, linear, replicated
from fxpar.rules.sub_axes import nest_all

aten = torch.ops.aten
own = torch.ops.fxpar
Factors = Callable[[OpView], list[Factor]]
Partials = Callable[[OpView], list[Option]]


@dataclass(frozen=True)
class OpRule:
    """How an op may be cut: by a sharded operand or result (`cuts`), and by partial operands (`partials`).

    `factors` are the loops that `cuts` speaks of, where it is made of loops. `terms` are partial operands that could
    pass through as well, but are better summed up before: they count where the axis asks for them.
    """

    cuts: Rule
    partials: Partials | None = None
    factors: Factors | None = None
    terms: Partials | None = None

    @property
    def name(self) -> str:
        """The function that holds the rule, such as `rules.matmul.mm_factors`."""
        written = self.factors or self.cuts
        return f"{written.__module__.removeprefix('fxpar.')}.{written.__name__}"


def _by(factors: Factors, partials: Partials | None = None, terms: Partials | None = None) -> OpRule:
    def cuts(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
        return from_factors(factors(op), op, degree, seed, shard)

    return OpRule(cuts, partials, factors, terms)


def _pass_through(op: OpView) -> list[Option]:
    return [linear(op, *range(len(op.inputs)))]


def _first(op: OpView) -> list[Option]:
    return [linear(op, 0)]


def _each(op: OpView) -> list[Option]:
    return [linear(op, position) for position in range(len(op.inputs))]


POINTWISE = _by(pointwise.pointwise_factors, pointwise.pointwise_partials, pointwise.pointwise_terms)
_VIEW = OpRule(reshape.view, _first)
_REDUCTION = _by(reduction.reduction_factors, reduction.reduction_partials)
_FACTORY = _by(reshape.factory_factors)

TABLE: dict[Any, OpRule] = {
    aten.mm.default: _by(matmul.mm_factors, terms=_each),
    aten.bmm.default: _by(matmul.bmm_factors, terms=_each),
    aten.mv.default: _by(matmul.mv_factors),
    aten.dot.default: _by(matmul.dot_factors),
    aten.convolution.default: _by(matmul.convolution_factors),
    aten.convolution_backward.default: _by(matmul.convolution_backward_factors),
    aten.view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.permute.default: _by(reshape.permute_factors, _first),
    aten.transpose.int: _by(reshape.transpose_factors, _first),
    aten.t.default: _by(reshape.transpose_factors, _first),
    aten.unsqueeze.default: _by(reshape.unsqueeze_factors, _first),
    aten.squeeze.default: _by(reshape.squeeze_factors, _first),
    aten.squeeze.dim: _by(reshape.squeeze_factors, _first),
    aten.squeeze.dims: _by(reshape.squeeze_factors, _first),
    aten.expand.default: _by(reshape.expand_factors, _first),
    aten.repeat.default: _by(reshape.repeat_factors, _first),
    aten.view_as_complex.default: _by(reshape.complex_factors, terms=_first),
    aten.view_as_real.default: _by(reshape.complex_factors, terms=_first),
    aten.full.default: _FACTORY,
    aten.zeros.default: _FACTORY,
    aten.ones.default: _FACTORY,
    aten.empty.memory_format: _FACTORY,
    aten.new_zeros.default: _FACTORY,
    aten.new_ones.default: _FACTORY,
    aten.new_full.default: _FACTORY,
    aten.new_empty.default: _FACTORY,
    aten.slice.Tensor: OpRule(slicing.slice_, _first),
    aten.slice_backward.default: OpRule(slicing.slice_backward, _first),
    aten.slice_scatter.default: _by(slicing.slice_scatter_factors),
    aten.select_scatter.default: _by(slicing.select_scatter_factors),
    aten.select.int: _by(slicing.select_factors, _first),
    aten.select_backward.default: _by(slicing.select_backward_factors, _first),
    aten.unbind.int: _by(slicing.select_factors, _first),
    aten.split.Tensor: OpRule(slicing.split, _first),
    aten.split_with_sizes.default: OpRule(slicing.split, _first),
    aten.cat.default: OpRule(slicing.cat, _pass_through),
    aten.stack.default: _by(slicing.stack_factors, _pass_through),
    aten.index.Tensor: _by(slicing.index_factors, _first),
    aten.index_select.default: _by(slicing.index_select_factors, _first),
    aten.gather.default: _by(slicing.gather_factors, _first),
    aten.scatter.src: _by(slicing.scatter_factors),
    aten.scatter.value: _by(slicing.scatter_factors),
    aten.scatter_add.default: _by(slicing.scatter_factors),
    aten.constant_pad_nd.default: _by(slicing.pad_factors),
    aten.roll.default: _by(slicing.roll_factors, _first),
    aten.flip.default: _by(slicing.roll_factors, _first),
    aten.tril.default: _by(slicing.triangle_factors, _first),
    aten.triu.default: _by(slicing.triangle_factors, _first),
    aten.sort.default: _by(slicing.sort_factors),
    aten.topk.default: _by(slicing.sort_factors),
    aten.cumsum.default: _by(reduction.cumulative_factors, _first),
    aten.cumprod.default: _by(reduction.cumulative_factors),
    **dict.fromkeys(reduction.LOSSES, _by(reduction.loss_factors)),
    **dict.fromkeys(reduction.LOSSES_BACKWARD, _by(reduction.loss_backward_factors)),
    aten.nll_loss_forward.default: _by(reduction.label_loss_factors),
    aten.nll_loss_backward.default: _by(reduction.label_loss_backward_factors),
    aten._softmax.default: _by(reduction.softmax_factors),
    aten._log_softmax.default: _by(reduction.softmax_factors),
    aten._safe_softmax.default: _by(reduction.softmax_factors),
    aten._softmax_backward_data.default: _by(reduction.softmax_factors),
    aten._log_softmax_backward_data.default: _by(reduction.softmax_factors),
    aten.native_layer_norm.default: _by(reduction.layer_norm_factors),
    aten.native_layer_norm_backward.default: _by(
        reduction.layer_norm_backward_factors, terms=reduction.norm_backward_terms
    ),
    aten._fused_rms_norm.default: _by(reduction.rms_norm_factors),
    aten._fused_rms_norm_backward.default: _by(
        reduction.rms_norm_backward_factors, terms=reduction.norm_backward_terms
    ),
    own.attention.default: OpRule(own_ops.attention),
    own.attention_backward.default: OpRule(own_ops.attention),
    own.attention_sinks_backward.default: OpRule(own_ops.attention_sinks_backward),
    **dict.fromkeys(traits.RECURRENCES, OpRule(own_ops.recurrence)),
    own.causal_conv.default: OpRule(own_ops.causal_conv),
    own.causal_conv_backward.default: OpRule(own_ops.causal_conv),
    own.cross_entropy.default: OpRule(own_ops.cross_entropy),
    own.cross_entropy_backward.default: OpRule(own_ops.cross_entropy_backward),
    own.dropout.default: OpRule(own_ops.dropout),
    own.embedding.default: OpRule(own_ops.embedding),
    own.embedding_backward.default: OpRule(own_ops.embedding_backward),
    own.expert_mm.default: _by(own_ops.expert_mm_factors, terms=own_ops.first_two),
    own.expert_mm_backward.default: _by(own_ops.expert_mm_backward_factors, terms=own_ops.first_two),
    own.weighted_sum.default: _by(own_ops.weighted_sum_factors, own_ops.weighted_sum_partials),
    own.weighted_sum_backward.default: _by(
        own_ops.weighted_sum_backward_factors, own_ops.weighted_sum_backward_partials
    ),
    **dict.fromkeys(reduction.REDUCTIONS, _REDUCTION),
    **dict.fromkeys(traits.LOOKS_ELEMENTWISE, POINTWISE),
}

# Run the same everywhere; nothing to gain from cutting them, so they are no surprise without a rule.
REPLICATED_ON_PURPOSE = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.nonzero.default,
    aten.searchsorted.Tensor,
    aten.bucketize.Tensor,
    aten.linspace.default,
}


def register_op(
    op: Any,
    *,
    rule: Factors | None = None,
    partials: Partials | None = None,
    flops: traits.Flops | None = None,
    flow: traits.Statement | None = None,
    precision: traits.Computes | None = None,
    replace: bool = False,
) -> None:
    """Say what an op is; what is left out stays as it was.

    `rule(view)` lists the loops along which the op may be cut, `partials(view)` options in which operands that are sums
    still spread over ranks pass through. `flops(operands, results)` are the floating-point operations of one call
    (2 per multiply-add), from the shapes of its tensor operands and results: with it the op counts as a product, whose
    work an axis should cut; without, as one that memory limits. `flow(call)` says how tokens flow through it: one of
    the statements of `fxpar.flow.statements`, or one's own. `precision` is what it computes in under mixed precision,
    a word of `fxpar.ops.traits.Computes`.

    It counts for graphs that are placed afterwards, so call it where the op is defined. Raises NotAnOpError for what
    is no overload of an op, OpContractError for a value that cannot be said, OpExistsError for an op that has a rule or
    is registered, unless `replace` is set. An OpContractError is also what these functions raise or
    answer that cannot be, where a graph asks them (a CostModelError for a count of operations).
    """
    if not isinstance(op, OpOverload):
        raise NotAnOpError(op)
    for name, given in {"rule": rule, "partials": partials, "flops": flops, "flow": flow}.items():
        if given is not None and not callable(given):
            raise OpContractError(str(op), f"{name}={given!r} is not a function")
    if partials is not None and rule is None:
        raise OpContractError(str(op), "partials= needs rule=, which says how the op may be cut at all")
    words = get_args(traits.Computes)
    if precision is not None and precision not in words:
        near = nearest(str(precision), words)
        raise OpContractError(str(op), f"precision={precision!r} is none of {', '.join(words)}{near}")
    if not replace and op in TABLE:
        raise OpExistsError(str(op), f"has the sharding rule {TABLE[op].name}")
    if not replace and op in traits.DECLARED:
        raise OpExistsError(str(op), "is registered already")
    if rule is not None:
        TABLE[op] = _by(checked_rule(op, rule), None if partials is None else checked_partials(op, partials))
    known = traits.declared(op)
    traits.DECLARED[op] = traits.OpTraits(flops or known.flops, flow or known.flow, precision or known.computes)


def rule_of(target: Any) -> OpRule | None:
    """The rule of an op, or None where there is none (it then runs replicated)."""
    if target in TABLE:
        return TABLE[target]
    return POINTWISE if traits.is_elementwise(target) else None


Ways = dict[tuple[Seed, Cut] | tuple[tuple[Seed, Cut], ...] | None, tuple[Option, ...]]
"""Of one call: options that cut a seed, and all that there are for several; under None those that no seed asks for."""


def options(op: OpView, degree: int, seeds: list[tuple[Seed, Cut]]) -> list[Option]:
    """All legal options of `op` that cut one of the seeds, partial pass-throughs, and the replicated one."""
    rule = rule_of(op.target)
    if rule is None:
        return [replicated(op)]
    known, asked = _ways(op, degree, rule), tuple(seeds)
    if asked in known:
        return [*known[asked]]
    found = [replicated(op)]
    for seed in seeds:
        if seed not in known:
            known[seed] = _for_all_batches(op, _cutting(op, rule, degree, *seed))
        found += known[seed]
    if rule.partials is not None and op.inputs:
        if None not in known:
            known[None] = _for_all_batches(op, rule.partials(op))
        found += known[None]
    known[asked] = tuple(dict.fromkeys(found))
    return [*known[asked]]


@functools.lru_cache(maxsize=1 << 14)  # stages and depths of a model have the same calls
def _ways(op: OpView, degree: int, rule: OpRule) -> Ways:
    """What was asked for of a call, and grows."""
    return {}


def _cutting(op: OpView, rule: OpRule, degree: int, seed: Seed, cut: Cut) -> list[Option]:
    if not isinstance(cut, OuterShard):
        return rule.cuts(op, degree, seed, cut)
    outer = rule.cuts(op, cut.degree, seed, Shard(cut.dim))
    return nest_all(outer, [replicated(op)] if cut.inner == R else passing(op, seed), cut.degree)


def passing(op: OpView, seed: Seed | None = None) -> list[Option]:
    """How partial sums can pass through `op`, `terms` included; with `seed`, those on this tensor."""
    rule = rule_of(op.target)
    ways = (rule.partials, rule.terms) if rule is not None and op.inputs else ()
    found = dict.fromkeys(option for way in ways if way is not None for option in way(op))
    return [option for option in found if seed is None or option.at(seed) == P]


def _for_all_batches(op: OpView, options: list[Option]) -> tuple[Option, ...]:
    """Options that hold for every size of the dynamic dims: sections are numbers, so unequal ones of such a dim (the
    first 4 tokens and the rest) are those of one batch.
    """

    def holds(option: Option) -> bool:
        cuts = zip((*option.inputs, *option.outputs), op.dynamic, strict=False)
        return not any(isinstance(p, Shard) and p.dim in dims and len(set(p.sections)) > 1 for p, dims in cuts)

    return tuple(options) if not any(op.dynamic) else tuple(filter(holds, options))


__all__ = ["REPLICATED_ON_PURPOSE", "TABLE", "OpRule", "options", "passing", "rule_of"]
