"""ATen ops that are split while tracing: a product and the addition to it are two nodes.

A sharded product may be a partial sum, to which a bias must not be added once per rank.
The search for the line of the model that a node comes from ends at frames of `step.py`, so this is no part of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _product_plus(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """beta * addend + alpha * product(a, b); a beta of 0 leaves the addend out, even one that is not finite."""

    def decomposed(addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = product(a, b)
        if alpha != 1:
            result = result * alpha
        if beta == 0:
            return result.expand(torch.broadcast_shapes(result.shape, addend.shape)).clone()
        return result + (addend if beta == 1 else addend * beta)

    return decomposed


DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.addmm.default: _product_plus(torch.mm),
    aten.baddbmm.default: _product_plus(torch.bmm),
    aten.addmv.default: _product_plus(torch.mv),
}
