"""Accumulate gradients: the body of a later micro-batch adds its loss and gradients to those so far, in place.

Before: results are one micro-batch's. After: for each loss and gradient there is one more input `acc_*`, and the
result is that buffer, added to. Buffers' new values are not accumulated.

    %m = mm(%g, %x)                             %acc = placeholder
    %d = exp(%y)                                %m = addmm_(%acc, %g, %x)
    return (%m, %d)                             %d = exp(%y); %s = add_(%acc_1, %d); return (%m, %s)

A matrix product that is nothing but a gradient adds up as it is computed (as "gradient accumulation fusion" does in
Megatron-LM), and so does a sum of products; through a transpose or a reshape the same view of the accumulator is added
to.

Cost: one pass over the gradients that are no products; no memory. A product's sum may differ from product and addition
in its last bit. Used on the body graph alone, for micro-batches after the first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import one_local
from fxpar.ir.pass_base import Tier, right_behind, set_results
from fxpar.ir.strategy import SINGLE

aten = torch.ops.aten
_PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}
# These undo themselves: a view of any accumulator, whatever its strides.
_SWAPS = {aten.t.default, aten.transpose.int}
_RESHAPES = {aten.reshape.default, aten.view.default}


@dataclass(frozen=True)
class AccumulateGradients:
    """`keep`: positions of results that are not accumulated (buffers, and values that only the epilogue needs)."""

    keep: tuple[int, ...] = ()
    name: ClassVar[str] = "accumulate_gradients"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        results = list(graph.results)
        places = graph.placeholders
        cursor = places[-1] if places else next(iter(graph.graph.nodes))
        for i, node in enumerate(results):
            if i in self.keep:
                continue
            with graph.graph.inserting_after(cursor):
                accumulator = graph.graph.placeholder(f"acc_{i}")
            accumulator.meta.update({k: node.meta[k] for k in ("tensor", "dist", "local") if k in node.meta})
            cursor = accumulator
            chain = _product_below(node)
            if chain is not None:
                _add_product(chain, accumulator)
                continue
            # Right behind the gradient, which is free then, instead of all of them at the end.
            with right_behind(graph.graph, node):
                total = graph.graph.call_function(aten.add_.Tensor, (accumulator, node))
            total.meta.update(node.meta)
            results[i] = total
        set_results(graph.graph, results)


def accumulate(graph: fx.Graph, keep: Collection[int]) -> None:
    """Apply AccumulateGradients to the graph of a part."""
    AccumulateGradients(keep=tuple(keep))(AnnotatedGraph(graph, (), (), (), SINGLE))


def _product_below(result: fx.Node) -> list[fx.Node] | None:
    """A matrix product and the relabelling behind it, up to `result`; None if the result is something else, or if
    anybody else reads any of it.
    """
    chain = [result]
    while len(chain[-1].users) == 1 and chain[-1].target in _SWAPS | _RESHAPES:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    product = chain[-1]
    # Two results that are one node have one user; two that share a product give it two.
    (output,) = result.graph.find_nodes(op="output")
    if _first_term(product) is None or len(product.users) != 1 or output.args[0].count(result) != 1:  # type: ignore[union-attr]
        return None
    swaps, reshapes = ({node.target for node in chain} & kinds for kinds in (_SWAPS, _RESHAPES))
    # An accumulator lies in one stretch in the order of the result, or as the first micro-batch left it. These are the
    # same for a reshape of a product, which then is a view of it; not if there are transposes as well.
    if (swaps and reshapes) or (reshapes and not all(_is_static(node) for node in chain)):
        return None
    return chain[::-1]


def _first_term(product: fx.Node) -> fx.Node | None:
    """The product that a sum of products begins with, which the others are added to in place (a loss in chunks)."""
    while product.target is aten.addmm_.default and product.all_input_nodes[0].users.keys() == {product}:
        product = product.all_input_nodes[0]
    return product if product.target in _PRODUCTS else None


def _is_static(node: fx.Node) -> bool:
    meta = one_local(node)
    return meta is not None and all(isinstance(size, int) for size in meta.shape)


def _add_product(chain: list[fx.Node], accumulator: fx.Node) -> None:
    """Turn the product at the start of `chain` into one that adds to `accumulator`."""
    product, graph = _first_term(chain[0]) or chain[0], accumulator.graph
    view = accumulator
    with graph.inserting_before(product):
        for node, target in zip(reversed(chain[1:]), reversed(chain[:-1]), strict=True):
            if node.target in _SWAPS:
                view = graph.call_function(node.target, (view, *node.args[1:]))  # type: ignore[arg-type]
            else:
                view = graph.call_function(aten.view.default, (view, list(one_local(target).shape)))  # type: ignore[union-attr]
            view.meta.update(target.meta)
    product.target = _PRODUCTS[product.target]
    product.args = (view, *product.args)
