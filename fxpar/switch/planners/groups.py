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
    """`slices` [groups], `holders` [groups, S], `receivers` [groups, M], ascending ranks."""

    slices: np.ndarray
    holders: np.ndarray
    receivers: np.ndarray


def has_local_holder(problem: SwitchProblem, cls: TensorClass) -> np.ndarray:
    """[slices, ranks]: is there a holder of the slice on the rank's node."""
    starts = np.arange(0, problem.world, problem.cluster.devices_per_node)
    on_node = np.logical_or.reduceat(cls.held, starts, axis=1)
    return on_node[:, problem.node_of]


def local_groups(problem: SwitchProblem, cls: TensorClass) -> list[Groups]:
    """Receivers with a holder on their node: one group per (slice, node)."""
    return by_node(problem, cls.held, cls.missing & has_local_holder(problem, cls))


def remote_groups(problem: SwitchProblem, cls: TensorClass) -> list[Groups]:
    """Receivers without: one group per slice."""
    return by_slice(cls.held, cls.missing & ~has_local_holder(problem, cls))


def by_slice(holders: np.ndarray, receivers: np.ndarray) -> list[Groups]:
    """One group per slice with receivers; both tables are [slices, ranks]."""
    return _form(holders[:, None], receivers[:, None])


def by_node(problem: SwitchProblem, holders: np.ndarray, receivers: np.ndarray) -> list[Groups]:
    """One group per (slice, node) with receivers, among the holders there; both tables are [slices, ranks]."""
    width, slices = problem.cluster.devices_per_node, len(holders)
    last = problem.nodes * width - problem.world  # devices of the last node that have no rank
    if last:
        holders, receivers = (np.pad(table, ((0, 0), (0, last))) for table in (holders, receivers))
    return _form(*(table.reshape(slices, problem.nodes, width) for table in (holders, receivers)))


def _form(holders: np.ndarray, receivers: np.ndarray) -> list[Groups]:
    """Groups of all (slice, part) with receivers, from tables [slices, parts, ranks of the part]."""
    wanted = np.asarray(receivers.any(2))
    slices, parts = np.nonzero(wanted)
    if not len(slices):
        return []
    levels = _levels(holders & wanted[:, :, None])
    first = (parts * holders.shape[2])[:, None]
    holders, receivers = holders[slices, parts], receivers[slices, parts]
    base = holders.shape[1] + 1  # one number for level, holders and receivers
    key = (levels[slices, parts] * base + holders.sum(1)) * base + receivers.sum(1)
    found = []
    for kind in np.unique(key).tolist():
        chosen = np.flatnonzero(key == kind)
        found.append(
            Groups(
                slices[chosen],
                np.nonzero(holders[chosen])[1].reshape(-1, kind // base % base) + first[chosen],
                np.nonzero(receivers[chosen])[1].reshape(-1, kind % base) + first[chosen],
            )
        )
    return found  # by level, as kinds are sorted: arrays of one level are in a row


def _levels(holders: np.ndarray) -> np.ndarray:
    """[slices, parts]: one more than the highest level of the slices before that share a holder of the part; 0 for all
    where no two share one, or each has one only and no load can change what is chosen.
    """
    levels = np.zeros(holders.shape[:2], np.int64)
    if (holders.sum(0) <= 1).all() or (holders.sum(2) <= 1).all():
        return levels
    last = np.full(holders.shape[1:], -1)
    for level, there in zip(levels, holders, strict=True):
        level[:] = np.where(there, last, -1).max(1) + 1
        last = np.where(there, level[:, None], last)
    return levels
