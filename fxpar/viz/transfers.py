"""A switch plan as plain JSON: bytes between ranks and nodes, of all parameters and of each kind of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fxpar.switch import SwitchPlan
from fxpar.switch.problem import SwitchProblem, TensorClass

MOST_RANKS = 64
"""Up to this many ranks, matrices are by rank as well as by node."""
MOST_MOVES = 3000
"""Up to this many transfers, one parameter's are listed one by one."""


def switch_json(plan: SwitchPlan, kinds: Sequence[Sequence[str]], name: str) -> dict[str, Any]:
    """The numbers of a plan. `kinds` are groups of parameters (FQNs) that lie alike before and after; their matrices
    add up to those of the plan. `name` says where the weights come from.

    A matrix is a list of [from, to, bytes]; what stays on a rank is in none. Of the first parameter of each kind,
    `slices` are boxes, `had` those that a rank holds and needs, `moves` are [slice, from, to, step] of what it gets.
    """
    problem, found = plan.problem, plan.to_json()
    number = {fqn: i for i, fqn in enumerate(problem.tensors)}
    members = [np.array([number[fqn] for fqn in kind]) for kind in kinds]
    by_kind = _by_kind(plan, members)
    cluster, (inside, between) = problem.cluster, plan.lower_bounds
    return {
        "from": name,
        "to": problem.target,
        "planner": plan.planner,
        "chosen": plan.chosen,
        "inside_bytes": plan.intra_node_bytes,
        "between_bytes": plan.inter_node_bytes,
        "local_bytes": problem.local_bytes,
        "sent_inside_bytes": found["max_send_intra_bytes"],
        "sent_between_bytes": found["max_send_inter_bytes"],
        "bound_inside_bytes": found["lower_bound_intra_bytes"],
        "bound_between_bytes": found["lower_bound_inter_bytes"],
        "bound_ms": 1e3 * max(inside / (cluster.intra_gb_per_s * 1e9), between / (cluster.inter_gb_per_s * 1e9)),
        "predicted_ms": 1e3 * plan.predicted_s,
        "transfers": len(plan.transfers),
        "steps": plan.steps,
        **_matrices(problem, by_kind.sum(0)),
        "kinds": [_kind(plan, matrix, found) for matrix, found in zip(by_kind, members, strict=True)],
    }


def _by_kind(plan: SwitchPlan, members: Sequence[np.ndarray]) -> np.ndarray:
    """[kinds, ranks, ranks]: bytes from rank to rank."""
    kind_of = np.zeros(len(plan.problem.tensors), np.int64)
    for kind, tensors in enumerate(members):
        kind_of[tensors] = kind
    moved, world = plan.transfers, plan.problem.world
    key = (kind_of[moved["tensor"]] * world + moved["src"]) * world + moved["dst"]
    # float64 sums of whole numbers are exact up to 2**53 bytes
    sums = np.bincount(key, moved["nbytes"], len(members) * world * world)
    return sums.astype(np.int64).reshape(len(members), world, world)


def _matrices(problem: SwitchProblem, matrix: np.ndarray) -> dict[str, Any]:
    """By node, and by rank where these are not too many."""
    nodes = np.zeros((problem.nodes, problem.nodes), np.int64)
    np.add.at(nodes, (problem.node_of[:, None], problem.node_of[None, :]), matrix)
    return {"nodes": _sparse(nodes), "ranks": _sparse(matrix) if problem.world <= MOST_RANKS else None}


def _sparse(matrix: np.ndarray) -> list[list[int]]:
    return [[int(a), int(b), int(matrix[a, b])] for a, b in np.argwhere(matrix)]


def _kind(plan: SwitchPlan, matrix: np.ndarray, members: np.ndarray) -> dict[str, Any]:
    problem, first = plan.problem, int(members[0])
    cls = problem.classes[problem.class_of[first]]
    crossing = problem.node_of[:, None] != problem.node_of[None, :]
    stays = cls.needed & cls.held
    return {
        "inside_bytes": int(matrix[~crossing].sum()),
        "between_bytes": int(matrix[crossing].sum()),
        "local_bytes": len(members) * int((cls.nbytes * stays.sum(1)).sum()),
        **_matrices(problem, matrix),
        **_pieces(plan, cls, first),
    }


def _pieces(plan: SwitchPlan, cls: TensorClass, tensor: int) -> dict[str, Any]:
    """What each rank has and gets of one tensor; without `moves` where they are too many."""
    moved = plan.transfers[plan.transfers["tensor"] == tensor]
    moved = moved[cls.needed[moved["slice"], moved["dst"]]]  # a relay may hold what it does not need
    if len(moved) > MOST_MOVES:
        return {"slices": [], "had": [], "moves": None}
    stays = cls.needed & cls.held
    columns = (moved[name].tolist() for name in ("slice", "src", "dst", "step"))
    return {
        "slices": [box.ravel().tolist() for box in cls.boxes],
        "had": [np.flatnonzero(stays[:, rank]).tolist() for rank in range(plan.problem.world)],
        "moves": [list(move) for move in zip(*columns, strict=True)],
    }
