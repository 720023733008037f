"""Is a loss a sum over tokens? The walk that finds every mean behind it.

From the loss back, through whatever was computed from values without a dynamic dim, and through linear ops among values
of each token. What was computed with weights is the model, and what the model averages, such as tokens into a vector
for a head, is its own business; so is a vector for each sequence that the loss is not linear in.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import MeanLossError
from fxpar.ir.node_meta import source_of
from fxpar.ops.traits import FACTORIES, MOVES, is_elementwise
from fxpar.torch_api.schemas import schema_of
from fxpar.torch_api.tracing import OpOverload
from fxpar.tracer.context import Mean
from fxpar.tracer.counts import (
    CASTS,
    DIVISIONS,
    SCALINGS,
    SHAPED,
    is_count,
    is_of_batch,
    is_of_parameters,
    is_static,
    is_whole,
    out_of_place,
)

aten = torch.ops.aten

# What a sum over tokens may be made of before the per-token losses are reached.
_LINEAR = (
    MOVES
    | CASTS
    | {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.nansum.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.where.self,
        aten.index.Tensor,
        aten.index_put.default,
        aten.copy.default,
        aten.mean.dim,
        operator.getitem,
    }
)
# Elementwise ops after which a per-token loss still has the factor that it had before.
_SHAPES_LOSSES = {
    aten.rsub.Scalar,
    aten.relu.default,
    aten.abs.default,
    aten.nan_to_num.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.maximum.default,
    aten.minimum.default,
}
# What else adds up, linear in each of its operands.
_ADDS = _LINEAR | {
    aten.dot.default,
    aten.mv.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.scatter_add.default,
    aten.index_add.default,
}
_POOLS = ("aten.avg_pool", "aten._adaptive_avg_pool", "aten.adaptive_avg_pool")
_AVERAGES = 1  # aten's number for reduction="mean"


@dataclass(frozen=True)
class Place:
    """A value behind the loss. `by`: the op that multiplies it, divides by it or is not linear in it, if there is one;
    `divides` by it. `direct`: the loss is linear in it.
    """

    node: fx.Node
    by: fx.Node | None = None
    divides: bool = False
    direct: bool = True


def check_sum(loss: fx.Node, means: dict[fx.Node, Mean]) -> None:
    """Raise MeanLossError at a mean, and at a factor or divisor that depends on how long the batch is."""
    for place in behind_loss(loss):
        _check(place, means)


def no_sum(loss: fx.Node) -> fx.Node | None:
    """What makes one number of all tokens or rows without adding their losses up: a statistic such as `std`, or an op
    that is not linear in a sum, such as its square. None for a loss that is a sum.
    """
    for place in behind_loss(loss):
        node = place.node
        if node.op != "call_function" or not _closes_floats(node) or is_of_batch(node) or is_of_parameters(node):
            continue
        if node.target not in _ADDS and not _has_reduction(node):
            return node
        if not place.direct:
            return place.by or node
    return None


def _closes_floats(node: fx.Node) -> bool:
    """Whether it makes a static result of numbers with a dynamic dim."""
    if node.target in FACTORIES | SHAPED:  # of a tensor they take the shape
        return False
    return bool(node.all_input_nodes) and not is_whole(node.meta.get("val")) and _closes(node)


def _has_reduction(node: fx.Node) -> bool:
    """Whether it is a loss that is summed (a mean of it is told already), or adds at indices."""
    if not isinstance(node.target, OpOverload):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    return "reduction" in names or ("reduce" in names and _argument(node, names, "reduce", "") == "sum")


def behind_loss(loss: fx.Node) -> Iterator[Place]:
    """Every value that a mean may be taken of, or that may scale the loss, from the loss back."""
    todo = [Place(loss)]
    seen = {todo[0]}
    while todo:
        place = todo.pop()
        if not place.direct and _is_vector(place.node):
            continue
        yield place
        for found in _behind(place):
            if found not in seen:
                seen.add(found)
                todo.append(found)


def _check(place: Place, means: dict[fx.Node, Mean]) -> None:
    node, line = place.node, source_of(place.node)
    what = _mean_in_words(node)
    if node in means:
        what, line = f"{means[node].what} inside a larger expression", means[node].line
    if what is not None and not is_of_parameters(node):  # of parameters it is a sum times a constant
        raise MeanLossError(what, line)
    if place.by is not None and is_count(node, place.divides):
        line = source_of(place.by) or line
        how = f"{place.by.name!r} of the loss and"
        if out_of_place(place.by.target) in SCALINGS:
            how = f"a {'division' if place.divides else 'multiplication'} by"
        raise MeanLossError(f"{how} {_count_in_words(node)}, which depends on how long the batch is", line)


def _mean_in_words(node: fx.Node) -> str | None:
    """What averages over tokens in an op; None if nothing does."""
    if node.target is aten.mean.default:
        return "a mean over all elements"
    if node.target is aten.mean.dim and _is_over_dynamic(node):
        return "a mean over a dynamic dim"
    if node.target is aten._softmax.default and _is_over_dynamic(node) and is_of_batch(node):
        return f"weights of tokens that {node.name!r} makes of the batch, of sum 1"
    return f"a mean in {node.name!r}" if _averages(node) else None


def _count_in_words(node: fx.Node) -> str:
    """A count as the user wrote it: by the op that makes it, or as a length."""
    if isinstance(node.target, OpOverload) and isinstance(node.meta.get("val"), Tensor):
        return f"what `{str(node.target).split('.')[1]}` makes of the batch"
    return "a size of the batch"


def _behind(place: Place) -> list[Place]:
    """What a value is made of, as far as a mean there would be one of the loss."""
    node, value = place.node, place.node.meta.get("val")
    if node.op != "call_function" or isinstance(value, (torch.SymInt, torch.SymFloat)) or is_whole(value):
        return []
    op = out_of_place(node.target)
    if op in SCALINGS:
        return _of_scaling(place, op)
    if op in _LINEAR or op in _SHAPES_LOSSES:
        found = [n for n in _nodes(node.args) if _is_operand(n, op)]
        factors = [n for n in _nodes(tuple(node.kwargs.values())) if _is_factor(n, op)]  # such as alpha
        direct = place.direct and op in _LINEAR
        return [Place(n, place.by, place.divides, direct) for n in found] + [Place(n, node) for n in factors]
    if not is_static(value):
        return [Place(n, node) for n in node.all_input_nodes if op in FACTORIES | SHAPED and _is_factor(n, op)]
    if any(_is_weight(n) for n in node.all_input_nodes):
        return []
    return [Place(n, node, direct=False) for n in node.all_input_nodes if _is_operand(n, op) or _is_factor(n, op)]


def _of_scaling(place: Place, op: Any) -> list[Place]:
    a, b = place.node.args[:2]
    found = [(a, False), (b, op in DIVISIONS)]
    scaled = isinstance(a, fx.Node) and isinstance(b, fx.Node)
    by = place.node if scaled else place.by
    return [
        Place(n, by, place.divides != divides, place.direct and not divides)
        for n, divides in found
        if isinstance(n, fx.Node)
    ]


def _nodes(args: Any) -> list[fx.Node]:
    if isinstance(args, fx.Node):
        return [args]
    return [n for arg in args for n in _nodes(arg)] if isinstance(args, (tuple, list)) else []


def _is_operand(node: fx.Node, op: Any) -> bool:
    """Whether it brings numbers of the loss: not sizes, indices or masks."""
    value = node.meta.get("val")
    if is_whole(value) or not isinstance(value, (Tensor, tuple, list)):
        return _is_factor(node, op)
    return True


def _is_factor(node: fx.Node, op: Any) -> bool:
    """Whether an integer, or a number of Python, is one that the op computes with."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat):
        return True
    return is_elementwise(op) and (isinstance(value, torch.SymInt) or is_whole(value))


def _is_weight(node: fx.Node) -> bool:
    """Whether it is what a model computes with; a parameter of one element may be the loss function's."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and is_static(value) and value.numel() > 1 and is_of_parameters(node)


def _is_vector(node: fx.Node) -> bool:
    """Whether there are several numbers for each sequence."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and is_static(value) and value.dim() > 1 and value.shape[-1] > 1


def _is_over_dynamic(node: fx.Node) -> bool:
    """Whether what an op does over some dims, or over one, takes in a dynamic one."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 and node.args[1] is not None else range(len(shape))
    return any(not isinstance(shape[d], int) for d in ([dims] if isinstance(dims, int) else dims))


def _averages(node: fx.Node) -> bool:
    """Whether a value is a mean by another op: a loss with its reduction, a pool over what is dynamic, var_mean,
    what is scattered."""
    if node.target is operator.getitem and node.args[1] == 1:
        several = node.all_input_nodes[0]
        return str(several.target).startswith(("aten.var_mean", "aten.std_mean")) and _closes(several)
    if not isinstance(node.target, OpOverload):
        return False
    if str(node.target).startswith(_POOLS):
        return _closes(node)
    names = [argument.name for argument in schema_of(node.target).arguments]
    if "reduce" in names:  # of values at indices
        return _argument(node, names, "reduce", "") == "mean" and not all(
            is_static(n.meta.get("val")) for n in _nodes(node.args)
        )
    return "reduction" in names and _argument(node, names, "reduction", _AVERAGES) == _AVERAGES


def _argument(node: fx.Node, names: list[str], name: str, otherwise: Any) -> Any:
    position = names.index(name)
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, otherwise)


def _closes(node: fx.Node) -> bool:
    """Whether no dim of its result is dynamic, but one of its operand's."""
    return is_static(node.meta.get("val")) and not is_static(node.all_input_nodes[0].meta.get("val"))
