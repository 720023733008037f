"""Reuse buffers: an all-reduce whose operand nobody else needs reduces it in place.

Before: `all_reduce` copies its operand, then reduces the copy. After: `all_reduce_`, where the operand is fresh
memory (a product, a sum, a fused buffer, or a reshape of one) with this single use.

    %c = _c10d_functional.all_reduce(%mm, ..)   %c = _c10d_functional.all_reduce_(%mm, ..)

Saves: one copy and one allocation of each reduced tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.ops import layout

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Results are contiguous and alias nothing.
_FRESH = {
    aten.mm.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.sum.dim_IntList,
    torch.ops.fxpar.embedding.default,
    torch.ops.fxpar.embedding_backward.default,
    layout.fuse,
}
SAME_STORAGE = {aten.reshape.default}


@dataclass(frozen=True)
class ReuseBuffers:
    """No options."""

    name: ClassVar[str] = "reuse_buffers"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
            if _is_fresh(node.args[0]):  # type: ignore[arg-type]
                node.target = c10d.all_reduce_.default


def _is_fresh(value: fx.Node) -> bool:
    while len(value.users) == 1 and value.target in SAME_STORAGE:
        value = value.args[0]  # type: ignore[assignment]
    return len(value.users) == 1 and value.target in _FRESH
