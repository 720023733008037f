"""The two plain baselines: the first holder sends everything; holders take turns. Nothing is relayed."""

from __future__ import annotations

import numpy as np

from fxpar.switch.planners.groups import by_slice, has_local_holder
from fxpar.switch.problem import SwitchProblem
from fxpar.switch.transfers import joined, rows


def first_come(problem: SwitchProblem) -> np.ndarray:
    """Every slice comes from its first holder (lowest rank), wherever that is."""
    return _turns(problem, rotate=False)


def round_robin(problem: SwitchProblem) -> np.ndarray:
    """The receivers of a slice take its holders in turn."""
    return _turns(problem, rotate=True)


def _turns(problem: SwitchProblem, rotate: bool) -> np.ndarray:
    parts = []
    for cls in problem.classes:
        for groups in by_slice(cls.held, cls.missing):
            count = groups.receivers.shape[1]
            turn = np.arange(count) % groups.holders.shape[1] if rotate else np.zeros(count, np.int64)
            dst = np.broadcast_to(groups.receivers, (len(cls.members), *groups.receivers.shape))
            parts.append(rows(cls, groups.slices, groups.holders[None][:, :, turn], dst, 0))
    return joined(parts)


def least_seconds(problem: SwitchProblem) -> float:
    """What no plan without relays undercuts: ranks get over the network what no rank of their node holds."""
    received = np.zeros(problem.world)
    for cls in problem.classes:
        received += len(cls.members) * (cls.nbytes @ (cls.missing & ~has_local_holder(problem, cls)))
    cluster = problem.cluster
    return float(received.max() / (cluster.inter_gb_per_s * 1e9)) + cluster.latency_us * 1e-6
