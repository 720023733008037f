"""Which part of a graph must run for some tokens at a time, so that no value of all tokens and the vocabulary stands.

The head is the last matrix product in front of a loss over classes: it makes the logits. A value is *wide* that is made
of them without another product and is about as large. Whatever reads a wide value runs chunk by chunk, and so does what
lies between the head and such a reader: the forward of the loss, its backward, the products of its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fxpar.chunks.tokens import TokenCuts, cut_tokens
from fxpar.errors import ChunkedLossError
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph, Dim, TensorMeta
from fxpar.ir.node_meta import is_backward, is_size, local_meta, local_tensor, phase_of, tensor_of
from fxpar.ir.pass_base import ancestors
from fxpar.ir.serialize import OpOverload
from fxpar.ops.traits import ATTENTION, EMBEDDINGS, LABEL_LOSSES, computes, is_product

aten = torch.ops.aten
_SHAPE_ONLY = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
"""They read nothing of their operand but its shape -> the number that they are full of."""
_MEAN = 1  # of aten's numbers for reduction="none", "mean", "sum"
_MANY = 1 << 20  # tokens: so many that a value of tokens is larger than a weight


@dataclass(frozen=True)
class LossRegion:
    """`nodes` run chunk by chunk, operands first; `cuts` says how tokens lie in their values."""

    head: fx.Node
    nodes: tuple[fx.Node, ...]
    cuts: TokenCuts


def find_head(graph: AnnotatedGraph) -> fx.Node | None:
    """The product that makes the logits: of several the one with the most on all ranks together, of equal ones the
    first, as the others may be made of it. None where no loss over classes is.
    """
    losses = [n for n, out in zip(graph.results, graph.outputs, strict=True) if out.kind == "loss"]
    behind = ancestors(losses)
    return _head_of([n for n in _body(graph) if n in behind], losses, _many(graph.dims))


def loss_span(calls: Sequence[fx.Node], dims: Iterable[Dim]) -> tuple[int, int] | None:
    """Where in the calls of a lowered body (`ExecGraph`) logits, or what is made of them and about as large, are there:
    places of the head and of the last call that reads such a value. None where no loss over classes is.
    """
    at = _many(dims)
    head = _head_of(calls, [n for n in calls if any(u.op == "output" for u in n.users)], at)
    if head is None:
        return None
    readers = _made_of_logits(calls, head, at)[2]
    return calls.index(head), max(i for i, node in enumerate(calls) if node in readers)


def _head_of(calls: Sequence[fx.Node], losses: Collection[fx.Node], at: Mapping[sympy.Symbol, int]) -> fx.Node | None:
    """Of calls in order; `losses` are results."""
    to_classes: dict[fx.Node, bool] = {}  # from here on without a product: whether a loss over classes is on the way
    forward = [n for n in calls if not is_backward(n)]
    for node in reversed(forward):
        users = [u for u in node.users if u in to_classes and not _is_model(u)]
        direct = node in losses or any(phase_of(u) != "body" for u in node.users)
        if users or direct:
            of_classes = node.target in LABEL_LOSSES or computes(node.target) == "softmax"
            to_classes[node] = of_classes or any(to_classes[u] for u in users)
    heads = [n for n in forward if to_classes.get(n) and is_product(n.target)]
    return max(heads, key=lambda n: tensor_of(n).numel(at), default=None)


def begin_with_constants(graph: fx.Graph) -> None:
    """Let the backward not be made of sums over all tokens, which come behind all chunks, where it does not read them:
    it begins with the gradient 1 of the loss, of which it needs the shape alone; and the gradient of a sum of losses
    takes the number of their terms, which that of a mean divides by.
    """
    for node in list(graph.nodes):
        if node.target is aten.nll_loss_backward.default and node.args[4] != _MEAN:
            with graph.inserting_before(node):
                unread = graph.call_function(aten.full.default, ([], 0.0), {"dtype": local_tensor(node).dtype})
            unread.meta = dict(node.args[6].meta)  # type: ignore[union-attr]
            node.update_arg(6, unread)
        meta = local_meta(node)
        if node.target in _SHAPE_ONLY and isinstance(meta, TensorMeta) and not meta.shape:
            node.target, node.args = aten.full.default, ([], _SHAPE_ONLY[node.target])  # type: ignore[index]
            node.kwargs = {"dtype": meta.dtype}
            node.meta.pop("dist_in", None)


def find_region(graph: AnnotatedGraph, head: fx.Node, chunks: int) -> LossRegion:
    """What must run in `chunks` with the head, in a graph between `lower_collectives` and `rematerialize`, behind
    `begin_with_constants`.

    Raises ChunkedLossError where that cannot be, as an op is not known to treat tokens one by one.
    """
    body = _body(graph)
    members = set(body)
    at = _many(graph.dims)
    most = _numel(head, at)
    made, wide, readers = _made_of_logits(body, head, at)
    outside = next((n for n in wide if any(u not in members for u in n.users)), None)
    if outside is not None:
        raise ChunkedLossError(_given(graph, chunks), _words(outside), "leaves the step as a result, for all tokens")
    needed = ancestors(readers)
    nodes = _with_parts([n for n in body if n in made and n in needed], body)
    cuts = cut_tokens(graph, nodes, chunks, lambda n: 2 * _numel(n, at) > most)
    if isinstance(cuts, tuple):
        raise ChunkedLossError(_given(graph, chunks), _words(cuts[0]), cuts[1])
    return LossRegion(head, tuple(sorted(cuts.makes)), cuts)


def _made_of_logits(
    calls: Sequence[fx.Node], head: fx.Node, at: Mapping[sympy.Symbol, int]
) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Calls behind the head that are made of the logits; of them the wide ones; and those that read a wide one."""
    made, wide, readers = {head}, {head}, {head}
    most = _numel(head, at)
    for node in calls:
        if node in made or not any(o in made for o in node.all_input_nodes):
            continue
        made.add(node)
        if any(o in wide for o in node.all_input_nodes):
            readers.add(node)
            if not _is_model(node) and 2 * _numel(node, at) > most:
                wide.add(node)
    return made, wide, readers


def _body(graph: AnnotatedGraph) -> list[fx.Node]:
    calls = (n for n in graph.graph.nodes if n.op == "call_function")
    return [n for n in calls if phase_of(n) == "body" and not is_size(n)]


def _is_model(node: fx.Node) -> bool:
    return is_product(node.target) or node.target in ATTENTION or node.target in EMBEDDINGS


def _with_parts(nodes: list[fx.Node], body: list[fx.Node]) -> list[fx.Node]:
    """With the results of ops that have several, and the waits for collectives."""
    found = set(nodes)
    for node in body:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in found:
            several = isinstance(local_meta(source), tuple)
            if several or collective_kind(source) is not None:
                found.add(node)
    return [n for n in body if n in found]


def _many(dims: Iterable[Dim]) -> Mapping[sympy.Symbol, int]:
    return {dim.symbol: _MANY for dim in dims}


def _numel(node: fx.Node, dims: Mapping[sympy.Symbol, int]) -> int:
    meta = local_meta(node)
    return meta.numel(dims) if isinstance(meta, TensorMeta) else 0


def _given(graph: AnnotatedGraph, chunks: int) -> str:
    return f"chunks({chunks}) of strategy '{graph.strategy}' on {graph.name}"


def _words(node: fx.Node) -> str:
    """`%mm_3 (aten.mm.default, in lm_head, model.py:41)`."""
    places = [f"in {node.meta['fqn']}"] * bool(node.meta.get("fqn")) + [node.meta.get("source") or ""]
    target = getattr(node.target, "__name__", "") if callable(node.target) else ""
    op = str(node.target) if isinstance(node.target, OpOverload) else target
    return f"%{node.name} ({', '.join([op, *filter(None, places)])})"
