"""Our planner: each slice enters a node once, then spreads inside it.

Step 0: a node that needs a slice and holds none of it gets it over the network once, from the holder that has sent
least between nodes to the receiver there that has received least; nodes with holders share it out among themselves.
Step 1: whoever let a slice in sends it to the other receivers on its node. All counters are per device and direction
and shared by all tensors; big slices are placed first, so that small ones even out what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpar.switch.planners.groups import Groups, by_node, by_slice, has_local_holder, local_groups
from fxpar.switch.problem import SwitchProblem, TensorClass
from fxpar.switch.transfers import joined, rows
from fxpar.switch.waterfill import pick


@dataclass(eq=False)
class _Loads:
    """Bytes so far, per rank."""

    sent_inside: np.ndarray
    sent_between: np.ndarray
    received_between: np.ndarray


def relay(problem: SwitchProblem) -> np.ndarray:
    """The transfers; those of step 1 are sent on by ranks that received the slice in step 0."""
    loads = _Loads(*(np.zeros(problem.world, np.int64) for _ in range(3)))
    parts: list[np.ndarray] = []
    largest_first = sorted(problem.classes, key=lambda cls: -int(cls.nbytes.max(initial=0)))
    for cls in largest_first:
        parts += _enter(problem, cls, loads)
    for cls in largest_first:
        parts += _share_out(problem, cls, loads)
    return joined(parts)


def _choose(groups: Groups, nbytes: np.ndarray, candidates: np.ndarray, count: int, load: np.ndarray) -> np.ndarray:
    """[groups, count]: the least loaded candidates one after the other; their load is counted."""
    picks = pick(load[candidates], nbytes[groups.slices], count)
    chosen = np.take_along_axis(candidates, picks, 1)
    np.add.at(load, chosen, nbytes[groups.slices][:, None])
    return chosen


def _share_out(problem: SwitchProblem, cls: TensorClass, loads: _Loads) -> list[np.ndarray]:
    """Receivers with a holder on their node; tensors of the class take turns too."""
    parts, members = [], len(cls.members)
    for groups in local_groups(problem, cls):
        count = groups.receivers.shape[1]
        chosen = _choose(groups, cls.nbytes, groups.holders, members * count, loads.sent_inside)
        src = chosen.reshape(-1, members, count).transpose(1, 0, 2)
        dst = np.broadcast_to(groups.receivers, src.shape)
        parts.append(rows(cls, groups.slices, src, dst, 0))
    return parts


def _enter(problem: SwitchProblem, cls: TensorClass, loads: _Loads) -> list[np.ndarray]:
    """Bring slices to nodes without them, and spread them there."""
    remote = cls.missing & ~has_local_holder(problem, cls)
    doors = np.full((len(cls.members), len(cls.nbytes), problem.nodes), -1, np.int64)
    parts = []
    # The receivers of a node are both the candidates for the door and those that it serves.
    for groups in by_node(problem, remote, remote):
        chosen = _choose(groups, cls.nbytes, groups.receivers, len(cls.members), loads.received_between)
        nodes = problem.node_of[groups.receivers[:, 0]]
        doors[:, groups.slices, nodes] = chosen.T
        parts += _spread(cls, groups, chosen.T, loads)
    parts += _fetch(cls, doors, loads)
    return parts


def _spread(cls: TensorClass, groups: Groups, doors: np.ndarray, loads: _Loads) -> list[np.ndarray]:
    """Step 1: from the doors [members, groups] to all other receivers of the group."""
    others = groups.receivers.shape[1] - 1
    if not others:
        return []
    position = (groups.receivers[None] == doors[:, :, None]).argmax(2)
    index = np.arange(others)
    index = index + (index >= position[:, :, None])  # all but the door
    dst = np.take_along_axis(np.broadcast_to(groups.receivers, (*doors.shape, others + 1)), index, 2)
    np.add.at(loads.sent_inside, doors, (others * cls.nbytes[groups.slices])[None])
    return [rows(cls, groups.slices, doors[:, :, None], dst, 1)]


def _fetch(cls: TensorClass, doors: np.ndarray, loads: _Loads) -> list[np.ndarray]:
    """Step 0: from the least loaded holders to the doors [members, slices, nodes] (-1: none)."""
    parts, members = [], len(cls.members)
    wanted = doors[0] >= 0
    for groups in by_slice(cls.held, wanted):
        count = groups.receivers.shape[1]  # here: nodes
        chosen = _choose(groups, cls.nbytes, groups.holders, members * count, loads.sent_between)
        src = chosen.reshape(-1, members, count).transpose(1, 0, 2)
        dst = doors[:, groups.slices[:, None], groups.receivers]
        parts.append(rows(cls, groups.slices, src, dst, 0))
    return parts
