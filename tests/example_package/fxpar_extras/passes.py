"""A pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier

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
