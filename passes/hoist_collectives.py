"""Hoist collectives: a collective starts as soon as what it sends is there.

Before: the projections of attention come first, then rotations, then the three all-to-alls of Ulysses. After: what
stands between the last product that a collective's operand is made with and the collective comes right behind that
product, so that queries travel while keys are projected. Nothing moves out of its block, or from the backward to the
forward: its result would be held for long.

    %q = mm(%x, %wq)                            %q = mm(%x, %wq)
    %k = mm(%x, %wk)                            %r = mul(%q, %cos)
    %r = mul(%q, %cos)                          %c = all_to_all(%r, "@cp")
    %c = all_to_all(%r, "@cp")                  %w = wait_tensor(%c)
    %w = wait_tensor(%c)                        %k = mm(%x, %wk)

Cost: none; `sink_waits` moves the waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.fqn import block_or_module_of
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import fqn_of, is_backward, phase_of
from fxpar.ir.pass_base import Tier
from fxpar.ops.traits import is_attention, is_product

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class HoistCollectives:
    """No options."""

    name: ClassVar[str] = "hoist_collectives"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        last: dict[fx.Node, fx.Node] = {}  # of what stands behind a product already: collectives stay in their order
        for node in list(graph.graph.nodes):
            if not collective_kind(node) or phase_of(node) != "body":
                continue
            product, made = _made_of(node)
            if product is None or _where(product) != _where(node):
                continue
            cursor = last.get(product, product)
            for one in (one for one in made if one > cursor):
                cursor.append(one)
                cursor = one
            last[product] = cursor


def _where(node: fx.Node) -> tuple[str, bool]:
    return block_or_module_of(fqn_of(node)), is_backward(node)


def _made_of(collective: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The last product that a collective is made of, None if there is none or another collective is waited for behind
    it, which would block sooner; and what it is made of behind that, with itself, in order.
    """
    made: list[fx.Node] = []
    todo = {collective}
    while todo:
        node = max(todo)  # of the order now: a node that two collectives need has moved with the first
        todo.remove(node)
        if node.target is _WAIT:
            break
        if is_product(node.target) or is_attention(node.target):
            return node, made[::-1]
        made.append(node)
        todo.update(operand for operand in node.all_input_nodes if operand.op == "call_function")
    return None, []
