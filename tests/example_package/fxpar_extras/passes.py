"""A pass on a graph, and one on the weights of all strategies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.passes.share_weights import SharedStorage, ShareWeights

aten = torch.ops.aten


@dataclass(frozen=True)
class SquareByMul:
    """Before: x ** 2 is a power. After: it is x * x, the same bits, which every device has a fast kernel for."""

    name: ClassVar[str] = "square_by_mul"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
            if node.args[1] == 2:
                node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])
                node.meta["dist_in"] *= 2  # one entry per tensor operand


@dataclass(frozen=True)
class Apart:
    """Before: one piece of memory may hold a weight for several strategies. After: each has its own, one behind the
    other, so that what a strategy reads was written for it.
    """

    name: ClassVar[str] = "apart"
    tier: ClassVar[Tier] = "exact"

    def lay_out(
        self, programs: Mapping[str, Program], rank: int, resident: Collection[str] | None = None
    ) -> SharedStorage:
        sizes, views = {}, {}
        for name, program in programs.items():
            alone = ShareWeights().lay_out({name: program}, rank)
            behind = {fqn: sizes.get((view.pool, view.dtype), 0) for fqn, view in alone.views[name].items()}
            views[name] = {
                fqn: replace(view, offset=behind[fqn] + view.offset) for fqn, view in alone.views[name].items()
            }
            sizes |= {key: sizes.get(key, 0) + count for key, count in alone.numel.items()}
        return SharedStorage(sizes, views, tuple(programs))
