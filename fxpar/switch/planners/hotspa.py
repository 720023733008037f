"""Algorithm 1 of HotSPa (Ge et al., SOSP 2024), decision for decision.

Tensor by tensor, slice by slice (row-major), receiver by receiver (ascending ranks): a receiver that holds the slice
copies it at home. One with holders on its node takes the holder there that has sent least inside nodes so far; any
other takes, of all holders, the one that has sent least between nodes so far; the first one wins ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpar.switch.planners.groups import Groups, local_groups, remote_groups
from fxpar.switch.problem import SwitchProblem, TensorClass
from fxpar.switch.transfers import joined, rows
from fxpar.switch.waterfill import pick


@dataclass(eq=False)
class _Batch:
    """The groups of one level of a class, with the senders found so far ([members, groups, receivers])."""

    cls: TensorClass
    groups: Groups
    nbytes: np.ndarray
    senders: np.ndarray


def hotspa(problem: SwitchProblem) -> np.ndarray:
    """The transfers of Algorithm 1."""
    parts = []
    for make in (local_groups, remote_groups):  # the two never look at each other's counters
        batches = [_batches(cls, make(problem, cls)) for cls in problem.classes]
        sent = np.zeros(problem.world, np.int64)
        done = [0] * len(batches)
        for number in problem.class_of:
            for batch in batches[number]:
                _send(batch, done[number], sent)
            done[number] += 1
        for batch in (b for of_class in batches for b in of_class):
            dst = np.broadcast_to(batch.groups.receivers, batch.senders.shape)
            parts.append(rows(batch.cls, batch.groups.slices, batch.senders, dst, 0))
    return joined(parts)


def _batches(cls: TensorClass, found: list[Groups]) -> list[_Batch]:
    members = len(cls.members)
    return [
        _Batch(cls, groups, cls.nbytes[groups.slices], np.empty((members, *groups.receivers.shape), np.int64))
        for groups in found
    ]


def _send(batch: _Batch, member: int, sent: np.ndarray) -> None:
    """Choose the senders for one tensor and count what they send."""
    holders, nbytes = batch.groups.holders, batch.nbytes
    picks = pick(sent[holders], nbytes, batch.groups.receivers.shape[1])
    senders = np.take_along_axis(holders, picks, 1)
    batch.senders[member] = senders
    np.add.at(sent, senders, nbytes[:, None])
