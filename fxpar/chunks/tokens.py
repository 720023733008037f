"""How the tokens of a part of a graph lie in its values, by the loops of the sharding rules.

To run for one chunk of tokens is what a rank does that has a shard of them, so the rules know it: a loop over tokens is
a dim of each operand and result that is cut, or a result that is one term of a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.flow import token_symbol
from fxpar.ir.dist_config import P, Placement, Shard
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import local_meta, local_tensor
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.serialize import OpOverload
from fxpar.ops import layout
from fxpar.rules.option import Option
from fxpar.rules.table import rule_of
from fxpar.rules.view import Sizes, make_view

c10d = torch.ops._c10d_functional
Moved = Callable[[int, tuple[Any, ...]], int | None]
"""(the dim of operand 0 that tokens lie along, the call's arguments) -> that of the result; None if they would mix."""


def _but(dim: int) -> Moved:
    return lambda d, _: None if d == dim else d


_MOVES: dict[Any, Moved] = {
    c10d.all_reduce.default: lambda d, _: d,
    c10d.wait_tensor.default: lambda d, _: d,
    c10d.all_gather_into_tensor.default: _but(0),
    c10d.reduce_scatter_tensor.default: _but(0),
    c10d.all_to_all_single.default: _but(0),
    layout.repeat: _but(0),
    layout.lift: lambda d, _: d + 1,
    layout.lower: lambda d, _: d - 1 if d else None,
    layout.take: lambda d, args: None if d == args[2] else d,
    layout.zero_padding: lambda d, args: None if d == args[1] else d,
    layout.pack: lambda d, args: None if d == args[2] else d + 1,
    layout.unpack: lambda d, args: None if d - 1 in (-1, args[1]) else d - 1,
}
"""What passes have put around collectives, and these themselves: on local tensors no rule speaks of them."""


@dataclass
class TokenCuts:
    """`takes[node]`: how the tensor operands of a call lie, in order; `makes[node]`: how its results do. A `Shard` is cut
    in chunks of tokens (in each of its sections), a `Partial` is one term of a sum over chunks, the rest is whole.
    """

    takes: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    makes: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)


Wrong = tuple[fx.Node, str]


def cut_tokens(graph: AnnotatedGraph, nodes: Sequence[fx.Node], chunks: int) -> TokenCuts | Wrong:
    """How tokens lie in the values of `nodes`, the first of which is a product that makes all of them; or which node
    cannot run in `chunks` of them, and why.
    """
    wrong: Wrong | None = None
    for start in _starts(graph, nodes[0]):
        found = _spread(graph, nodes, chunks, start)
        if isinstance(found, TokenCuts):
            return found
        wrong = wrong or found
    return wrong or (nodes[0], "has no dim of tokens")


def _starts(graph: AnnotatedGraph, head: fx.Node) -> Iterator[Shard]:
    """Where the tokens may lie in the product: along a dim that changes from batch to batch, or any; of several rows at
    once all behind each other, or those of each row.
    """
    shape = local_tensor(head).shape
    moving = [d for d, size in enumerate(shape) if not isinstance(size, int)]
    rows = {info.meta.shape[0] for info in graph.inputs if info.kind == "batch" and len(info.meta.shape) > 1}
    for dim in moving or range(len(shape)):
        yield Shard(dim)
        for count in rows:
            if isinstance(count, int) and count > 1:
                yield Shard(dim, (1,) * count)


def _spread(graph: AnnotatedGraph, nodes: Sequence[fx.Node], chunks: int, start: Shard) -> TokenCuts | Wrong:
    strategy, token = graph.strategy, token_symbol(graph)
    sizes = Sizes([d.symbol for d in graph.dims], chunks * max(strategy.token_parts, strategy.world), token)
    cuts = TokenCuts()
    for node in nodes:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            cuts.makes[node] = cuts.takes[node] = (cuts.makes[source][node.args[1]],)  # type: ignore[index]
            continue
        known = [cuts.makes[operand][0] if operand in cuts.makes else None for operand in tensor_operands(node)]
        summed = next((o for o, lies in zip(tensor_operands(node), known, strict=True) if lies == P), None)
        if summed is not None:
            return node, f"needs %{summed.name}, a sum over all tokens, before the gradient of the first one"
        option = _option(node, known, sizes, chunks, start if node is nodes[0] else None)
        if option is None:
            return node, "is not known to treat tokens one by one"
        cuts.takes[node], cuts.makes[node] = option.inputs, option.outputs
    return cuts


def _option(
    node: fx.Node, known: Sequence[Placement | None], sizes: Sizes, chunks: int, start: Shard | None
) -> Option | None:
    """How the call runs for a chunk of tokens. It is `known` how operands lie; those from outside (None) lie as they
    are wanted.
    """
    place, shard = next(((i, lies) for i, lies in enumerate(known) if isinstance(lies, Shard)), (0, start))
    if shard is None:
        return None
    if node.target in _MOVES:
        moved = _MOVES[node.target](shard.dim, node.args)
        return None if moved is None else Option((shard,), (Shard(moved, shard.sections),))
    rule = rule_of(node.target) if isinstance(node.target, OpOverload) else None
    if rule is None:
        return None
    view, _ = make_view(node, sizes, metas=_metas)
    seed = (start is not None, place)
    for option in rule.cuts(view, chunks, seed, shard):
        fits = all(lies is None or lies == want for lies, want in zip(known, option.inputs, strict=True))
        if fits and all(isinstance(made, Shard) or made == P for made in option.outputs):
            return option
    return None


def _metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    found = local_meta(node)
    return found if isinstance(found, tuple) else (found,)
