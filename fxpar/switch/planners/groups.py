"""Groups: the receivers of one slice that choose among the same holders, in arrays.

A receiver with a holder on its own node chooses among those (`local`), any other among all holders of the slice.
Groups of equal size stand in one array, and groups that share a holder are in different *levels*, so that a planner
which looks at the holders' loads may treat a whole level at once and still decide as if it went slice by slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpar.switch.problem import SwitchProblem, TensorClass


@dataclass(frozen=True, eq=False)
class Groups:
    """`slices` [groups], `holders` [groups, S], `receivers` [groups, M], ascending ranks; `level` orders the arrays."""

    slices: np.ndarray
    holders: np.ndarray
    receivers: np.ndarray
    level: int


def has_local_holder(problem: SwitchProblem, cls: TensorClass) -> np.ndarray:
    """[slices, ranks]: is there a holder of the slice on the rank's node."""
    starts = np.arange(0, problem.world, problem.cluster.devices_per_node)
    on_node = np.logical_or.reduceat(cls.held, starts, axis=1)
    return on_node[:, problem.node_of]


def local_groups(problem: SwitchProblem, cls: TensorClass) -> list[Groups]:
    """Receivers with a holder on their node: one group per (slice, node)."""
    local = cls.missing & has_local_holder(problem, cls)
    return by_node(problem, cls.held, local)


def remote_groups(problem: SwitchProblem, cls: TensorClass) -> list[Groups]:
    """Receivers without: one group per slice."""
    remote = cls.missing & ~has_local_holder(problem, cls)
    return form(np.arange(len(cls.nbytes)), cls.held, remote)


def by_node(problem: SwitchProblem, holders: np.ndarray, receivers: np.ndarray) -> list[Groups]:
    """One group per (slice, node) with receivers, among the holders there. Both tables are [slices, ranks]."""
    slices, ranks = np.nonzero(receivers)
    pairs = np.unique(slices * problem.nodes + problem.node_of[ranks])
    piece, node = np.divmod(pairs, problem.nodes)
    there = problem.node_of[None, :] == node[:, None]
    return form(piece, holders[piece] & there, receivers[piece] & there)


def form(slices: np.ndarray, holders: np.ndarray, receivers: np.ndarray) -> list[Groups]:
    """Groups of the rows that have receivers, from tables [rows, ranks]."""
    rows = receivers.any(1)
    slices, holders, receivers = slices[rows], holders[rows], receivers[rows]
    if not len(slices):
        return []
    key = np.stack([_levels(holders), holders.sum(1), receivers.sum(1)])
    found = []
    for kind in np.unique(key, axis=1).T:
        chosen = (key == kind[:, None]).all(0)
        found.append(
            Groups(
                slices[chosen],
                np.nonzero(holders[chosen])[1].reshape(-1, kind[1]),
                np.nonzero(receivers[chosen])[1].reshape(-1, kind[2]),
                int(kind[0]),
            )
        )
    return found


def _levels(table: np.ndarray) -> np.ndarray:
    """For each row, one more than the highest level of the rows above it that share a rank with it."""
    if (table.sum(0) <= 1).all():
        return np.zeros(len(table), np.int64)
    last = np.full(table.shape[1], -1)
    members = [np.flatnonzero(row) for row in table]
    levels = np.zeros(len(table), np.int64)
    for row, ranks in enumerate(members):
        levels[row] = last[ranks].max() + 1
        last[ranks] = levels[row]
    return levels
