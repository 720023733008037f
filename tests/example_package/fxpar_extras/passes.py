"""A pass on a graph, and one on the weights of all strategies."""

from __future__ import annotations

from collections import Counter
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
    """Before: strategies share memory. After: each has its own, so that what it reads was written for it."""

    name: ClassVar[str] = "apart"
    tier: ClassVar[Tier] = "exact"

    def lay_out(self, programs: Mapping[str, Program], rank: int, resident: Collection[str] | None = None):
        sizes, views = Counter(), {}
        for name, program in programs.items():
            one = ShareWeights().lay_out({name: program}, rank)
            views[name] = {f: replace(v, offset=v.offset + sizes[v.pool, v.dtype]) for f, v in one.views[name].items()}
            sizes.update(one.numel)  # adds
        return SharedStorage(sizes, views, tuple(programs))
