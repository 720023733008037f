"""What no choice of senders can undercut: a linear program over fractional shares.

Receivers with a holder on their node are served inside it, the others from any holder, as Algorithm 1 does; each kind
of link is bounded on its own. Relayed plans are no such choice and may send less.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fxpar.switch.planners.groups import Groups, local_groups, remote_groups
from fxpar.switch.problem import SwitchProblem


def lower_bounds(problem: SwitchProblem) -> tuple[float, float]:
    """The least possible maximum, over ranks, of bytes sent inside nodes and of bytes sent between nodes."""
    return _bound(problem, local_groups), _bound(problem, remote_groups)


def _bound(problem: SwitchProblem, make: object) -> float:
    demand: dict[bytes, float] = {}
    holders: dict[bytes, np.ndarray] = {}
    for ranks, nbytes in _demands(problem, make):
        key = ranks.tobytes()
        demand[key] = demand.get(key, 0.0) + nbytes
        holders[key] = ranks
    bound = 0.0
    for part in _independent(list(holders.values()), problem.world):
        sets = [holders[key] for key in (ranks.tobytes() for ranks in part)]
        needs = np.array([demand[ranks.tobytes()] for ranks in sets])
        bound = max(bound, needs[0] / len(sets[0]) if len(sets) == 1 else _solve(sets, needs))
    return bound


def _demands(problem: SwitchProblem, make: object) -> Iterator[tuple[np.ndarray, int]]:
    """(holders, bytes that they must send together) of every group, all tensors of a class at once."""
    for cls in problem.classes:
        found: list[Groups] = make(problem, cls)  # type: ignore[operator]
        for groups in found:
            each = len(cls.members) * groups.receivers.shape[1]
            for piece, ranks in zip(groups.slices, groups.holders, strict=True):
                yield ranks, each * int(cls.nbytes[piece])


def _independent(sets: list[np.ndarray], world: int) -> list[list[np.ndarray]]:
    """The sets, those together that share ranks directly or through others."""
    root = list(range(world))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    for ranks in sets:
        for rank in ranks[1:]:
            root[find(int(rank))] = find(int(ranks[0]))
    parts: dict[int, list[np.ndarray]] = {}
    for ranks in sets:
        parts.setdefault(find(int(ranks[0])), []).append(ranks)
    return list(parts.values())


def _solve(sets: list[np.ndarray], needs: np.ndarray) -> float:
    """min t: every set sends its need, every rank at most t. Variables: a share per (set, rank) and t."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    ranks, column = np.unique(np.concatenate(sets), return_inverse=True)
    which = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
    shares = len(which)
    scale = float(needs.max())
    serve = csr_array((np.ones(shares), (which, np.arange(shares))), (len(sets), shares + 1))
    entries = np.concatenate([np.ones(shares), -np.ones(len(ranks))])
    row = np.concatenate([column, np.arange(len(ranks))])
    col = np.concatenate([np.arange(shares), np.full(len(ranks), shares)])
    limit = csr_array((entries, (row, col)), (len(ranks), shares + 1))
    cost = np.zeros(shares + 1)
    cost[-1] = 1
    solved = linprog(cost, limit, np.zeros(len(ranks)), serve, needs / scale, method="highs")
    return float(solved.fun) * scale
