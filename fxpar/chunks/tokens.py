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
from fxpar.ir.dist_config import P, Placement, R, Shard
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import local_metas, local_tensor
from fxpar.ir.pass_base import ancestors, tensor_operands
from fxpar.ir.serialize import OpOverload
from fxpar.ops import layout
from fxpar.ops.traits import is_product
from fxpar.rules.option import Option
from fxpar.rules.table import rule_of
from fxpar.rules.view import Sizes, make_view

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Moved = Callable[[Shard, tuple[Any, ...]], Shard | None]
"""(how tokens lie in operand 0, the call's arguments) -> how they do in the result; None if they would mix."""


def _to(shift: int, *mixed: int) -> Moved:
    """Along the same dim, or one further on or back; not if it is one of `mixed`."""
    return lambda lies, _: None if lies.dim in mixed else Shard(lies.dim + shift, lies.sections)


def _apart(at: int, shift: int) -> Moved:
    """Along a dim that the argument `at` does not name."""
    return lambda lies, args: None if lies.dim == args[at] else Shard(lies.dim + shift, lies.sections)


def _take(lies: Shard, args: tuple[Any, ...]) -> Shard | None:
    """Of tokens that are cut in sections, one for each rank (in each of the call's own), each rank has its own."""
    degree, dim, sections = args[1], args[2], args[3]
    if lies.dim != dim:
        return lies
    fits = len(set(sections)) <= 1 and len(lies.sections) == degree * max(1, len(sections))
    return Shard(dim, tuple(sections)) if fits else None


def _pack(lies: Shard, args: tuple[Any, ...]) -> Shard | None:
    """All rows of `_take`."""
    row = _take(lies, args)
    return None if row is None else Shard(row.dim + 1, row.sections)


def _unpack(lies: Shard, args: tuple[Any, ...]) -> Shard | None:
    dim, sections = args[1], args[2]
    if lies.dim != dim + 1:
        return Shard(lies.dim - 1, lies.sections) if lies.dim else None
    rows = local_tensor(args[0]).shape[0]
    fits = len(set(sections)) <= 1 and len(lies.sections) == len(sections) and isinstance(rows, int)
    return Shard(dim, (1,) * (rows * max(1, len(sections)))) if fits else None  # type: ignore[operator]


_MOVES: dict[Any, Moved] = {
    c10d.all_reduce.default: _to(0),
    c10d.wait_tensor.default: _to(0),
    c10d.all_gather_into_tensor.default: _to(0, 0),
    c10d.reduce_scatter_tensor.default: _to(0, 0),
    c10d.all_to_all_single.default: _to(0, 0),
    layout.repeat: _to(0, 0),
    layout.lift: _to(1),
    layout.lower: _to(-1, 0),
    layout.take: _take,
    layout.zero_padding: _apart(1, 0),
    layout.pack: _pack,
    layout.unpack: _unpack,
}
"""What passes have put around collectives, and these themselves: on local tensors no rule speaks of them."""
_FACTORIES = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}


@dataclass
class TokenCuts:
    """`takes[node]`: how the tensor operands of a call lie, in order; `makes[node]`: how its results do. A `Shard` is
    cut in chunks of tokens (in each of its sections), a `Partial` is one term of a sum over chunks, the rest is whole.
    """

    takes: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    makes: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)


Wrong = tuple[fx.Node, str]


def cut_tokens(
    graph: AnnotatedGraph, nodes: Sequence[fx.Node], chunks: int, is_wide: Callable[[fx.Node], bool]
) -> TokenCuts | Wrong:
    """How tokens lie in the values of `nodes`, the first of which is a product that makes all of them; or which node
    cannot run in `chunks` of them, and why. What is wide and from outside is in the cuts as well.
    """
    wrong: Wrong | None = None
    for start in _starts(graph, nodes[0]):
        spread = _Spread(graph, chunks, is_wide)
        found = spread.over(nodes, start)
        if found is None:
            return spread.cuts
        wrong = wrong or found
    return wrong or (nodes[0], "has no dim of tokens")


def _starts(graph: AnnotatedGraph, head: fx.Node) -> Iterator[Shard]:
    """Where the tokens may lie in the product: along a dim that changes from batch to batch, or any; all behind each
    other, or those of each row, and of each rank that gets a part of them from the others.
    """
    shape = local_tensor(head).shape
    moving = [d for d, size in enumerate(shape) if not isinstance(size, int)]
    sizes = [info.meta.shape[0] for info in graph.inputs if info.kind == "batch" and len(info.meta.shape) > 1]
    rows = dict.fromkeys([1, *(size for size in sizes if isinstance(size, int))])
    degrees = dict.fromkeys([1, *(degree for _, degree in graph.strategy.axes if degree > 1)])
    for dim in moving or range(len(shape)):
        for count in dict.fromkeys(row * degree for degree in degrees for row in rows):
            yield Shard(dim, (1,) * count if count > 1 else ())


class _Spread:
    """Follows tokens from call to call."""

    def __init__(self, graph: AnnotatedGraph, chunks: int, is_wide: Callable[[fx.Node], bool]) -> None:
        strategy = graph.strategy
        multiple = chunks * strategy.world * strategy.token_parts
        self.sizes = Sizes([d.symbol for d in graph.dims], multiple, token_symbol(graph))
        self.chunks, self.is_wide, self.cuts = chunks, is_wide, TokenCuts()
        self.open: set[fx.Node] = set()  # constants, which lie as they are wanted
        self.whole: set[fx.Node] = set()  # what the first of the nodes is made of, which stands before all chunks

    def over(self, nodes: Sequence[fx.Node], start: Shard) -> Wrong | None:
        makes, takes = self.cuts.makes, self.cuts.takes
        self.whole = ancestors(nodes[:1])
        for node in nodes:
            if node.target in _FACTORIES:
                self.open.add(node)
                continue
            if node.target is operator.getitem:
                source: Any = node.args[0]
                makes[node] = takes[node] = (makes[source][node.args[1]],)  # type: ignore[index]
                continue
            operands = tensor_operands(node)
            known = [makes[operand][0] if operand in makes else None for operand in operands]
            if P in known:
                summed = operands[known.index(P)]
                return node, f"needs %{summed.name}, a sum over all tokens, before the gradient of the first one"
            wrong = self._place(node, known, (True, 0, start) if node is nodes[0] else None)
            if wrong is not None:
                return wrong
        return next(((n, "is made of all tokens at once") for n in self.open), None)

    def _place(
        self, node: fx.Node, known: Sequence[Placement | None], wanted: tuple[bool, int, Shard] | None
    ) -> Wrong | None:
        """Place a call, and constants and wide values that it takes."""
        if wanted is None:
            place = next((i for i, lies in enumerate(known) if isinstance(lies, Shard)), None)
            wanted = None if place is None else (False, place, known[place])  # type: ignore[assignment]
        option = None if wanted is None else self._option(node, known, *wanted)
        if option is None:
            return node, "is not known to treat tokens one by one"
        self.cuts.takes[node], self.cuts.makes[node] = option.inputs, option.outputs
        for operand, lies in zip(tensor_operands(node), option.inputs, strict=True):
            new = operand not in self.cuts.makes and operand.op == "call_function" and operand not in self.whole
            wide = not is_product(node.target) and self.is_wide(operand)  # a product takes what is as wide as the model
            if isinstance(lies, Shard) and new and (operand in self.open or wide):
                self.open.discard(operand)
                known = [self.cuts.makes.get(o, (None,))[0] for o in tensor_operands(operand)]
                known = [None] * len(known) if operand.target in _FACTORIES else known
                wrong = self._place(operand, known, (True, 0, lies))
                if wrong is not None:
                    return wrong
        return None

    def _option(
        self, node: fx.Node, known: Sequence[Placement | None], is_result: bool, place: int, shard: Shard
    ) -> Option | None:
        """How the call runs for a chunk of tokens. It is `known` how operands lie; those from outside (None) lie as
        they are wanted.
        """
        if node.target in _MOVES:
            moves = _MOVES[node.target]  # type: ignore[index]
            given = _before(node, shard) if is_result else [shard]
            found = ((lies, moved) for lies in given if (moved := moves(lies, node.args)) is not None)
            return next((Option((a,), (b,)) for a, b in found if not is_result or b == shard), None)
        rule = rule_of(node.target) if isinstance(node.target, OpOverload) else None
        if rule is None:
            return None
        view, _ = make_view(node, self.sizes, metas=local_metas)
        for option in rule.cuts(view, self.chunks, (is_result, place), shard):
            fits = all(lies is None or lies == want for lies, want in zip(known, option.inputs, strict=True))
            if fits and all(isinstance(made, Shard) or made in (P, R) for made in option.outputs):
                return option
        return None


def _before(node: fx.Node, shard: Shard) -> list[Shard]:
    """Ways in which the operand of a call that moves values may lie."""
    rows = next((arg for arg in node.args[1:2] if isinstance(arg, int)), 1)
    sections = dict.fromkeys([shard.sections, (1,) * rows if rows > 1 else ()])
    dims = range(len(local_tensor(node.args[0]).shape))
    return [Shard(dim, each) for dim in dims for each in sections]
