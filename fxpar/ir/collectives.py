"""The communication ops of a graph before they become `_c10d_functional` calls.

`reshard` changes a placement in one step; its target is the node's own `meta["dist"]`. `passes/reshard_to_collectives`
replaces it by the others, each of which works on one mesh axis (or several joined by '.') and one dim. They are names
in a graph, not functions to run: `passes/lower_collectives` replaces them in turn.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, fx

from fxpar.errors import VerifyError


def _not_lowered(name: str) -> NoReturn:
    raise VerifyError(f"collective {name!r} is still in a graph that is being run; lower the graph first")


def reshard(x: Tensor) -> Tensor:
    """x in another placement."""
    _not_lowered("reshard")


def all_reduce(x: Tensor, axis: str, op: str) -> Tensor:
    """Partial -> replicated."""
    _not_lowered("all_reduce")


def all_gather(x: Tensor, axis: str, dim: int, sections: tuple[int, ...]) -> Tensor:
    """Shard(dim) -> replicated."""
    _not_lowered("all_gather")


def reduce_scatter(x: Tensor, axis: str, op: str, dim: int, sections: tuple[int, ...]) -> Tensor:
    """Partial -> Shard(dim)."""
    _not_lowered("reduce_scatter")


def all_to_all(
    x: Tensor, axis: str, gather_dim: int, gather_sections: tuple[int, ...], dim: int, sections: tuple[int, ...]
) -> Tensor:
    """Shard(gather_dim) -> Shard(dim)."""
    _not_lowered("all_to_all")


def shard(x: Tensor, axis: str, dim: int, sections: tuple[int, ...]) -> Tensor:
    """Replicated -> Shard(dim): a local slice, no traffic."""
    _not_lowered("shard")


def partial(x: Tensor, axis: str) -> Tensor:
    """Replicated -> partial sum: x on the first rank of the axis, zeros on the others; no traffic."""
    _not_lowered("partial")


def shift(x: Tensor, axis: str) -> Tensor:
    """x of the rank before on the axis, the last one's on the first. Between local tensors: no placement says it."""
    _not_lowered("shift")


def exchange(x: Tensor, axis: str, sent: Tensor, received: Tensor) -> Tensor:
    """Rows of x by rank, `sent` [ranks] of them to each -> rows by rank, `received` from each; of local tensors."""
    _not_lowered("exchange")


COLLECTIVES = (all_reduce, all_gather, reduce_scatter, all_to_all, shard, partial, shift, exchange)


def is_collective(node: fx.Node) -> bool:
    """Whether a node is one of the single-axis ops above."""
    return node.op == "call_function" and node.target in COLLECTIVES
