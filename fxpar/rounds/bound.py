"""What no plan can undercut: a round with given sequences, and a batch under any cut into rounds."""

from __future__ import annotations

import numpy as np

from fxpar.rounds.work import Kinds, Work

CLOSE = 2e-3  # of a round's time, to which its bound is found
FEW = 3  # of sequences that fit into a team, from which on their number is not looked at
_SOLVED, _INFEASIBLE = 0, 2  # statuses of scipy's


def round_bound(work: Work, members: np.ndarray, upper: float) -> tuple[float, list[tuple[int, ...]]]:
    """ms that no round with these sequences can undercut, at most `upper`, which is what one takes; and the layouts of
    the aggregate program for shorter times that were looked at, the shortest last.

    A round of C ms gives a solution of the aggregate program of C (`teams_within`). As a longer round gives one of any
    larger C, all times below the least feasible C are impossible. Bisection keeps `low` at a time for which there is
    none, so `low` is a bound wherever it stops.
    """
    kinds = Kinds.of(work, members)
    low, high = _simple_bound(work, kinds), upper
    layouts: list[tuple[int, ...]] = []
    share = 0.01  # gaps are small: the first looks are close to what was found
    while high - low > CLOSE * upper:
        middle = max(high - share * upper, (low + high) / 2)
        found = teams_within(work, kinds, middle)
        if found is None:
            low = middle
        else:
            high = middle
            layouts.append(found)
            share *= 2
    return min(low, upper), layouts


def _simple_bound(work: Work, kinds: Kinds) -> float:
    """The sequence that takes longest at its best degree; and all devices busy, each sequence at the degree where it
    costs them least.
    """
    alone = float((kinds.ms + work.fixed[:, None]).min(0).max())
    device_ms = (kinds.ms * np.array(work.degrees)[:, None]).min(0)
    return max(alone, float(work.fixed.min() + (kinds.counts * device_ms).sum() / work.devices))


def teams_within(work: Work, kinds: Kinds, limit: float) -> tuple[int, ...] | None:
    """Numbers n_d of teams of each degree for which the aggregate program of a round of `limit` ms has a solution; None
    if it has none.

    It has whole n_d >= 0 with sum(d * n_d) <= devices, and flows z_dl >= 0 of sequences of length l to degree d, whose
    sum over d is how many there are. Of every round that ends within the limit, count its teams and the sequences of
    each length that the teams of a degree have. Then, as each team does so,

    - time: sum_l(z_dl * ms_dl) <= n_d * (limit - fixed_d), and tokens: sum_l(z_dl * l) <= n_d * room_d;
    - a team has time and room for at most k sequences of length l, so z_dl <= k * n_d. For k = 0 z_dl is 0.

    So every such round is a solution, and where there is no solution there is no such round. It is solved by HiGHS
    (Huangfu and Hall 2018), a branch and bound, to within its tolerance of 1e-6.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # which the words of the command line do without
    from scipy.sparse import csr_array

    rows, size = len(work.degrees), len(kinds.counts)
    left = limit - work.fixed
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.minimum(left[:, None] / kinds.ms, work.room[:, None] / kinds.lengths[None, :]) + 1e-9
    most = np.where(np.isfinite(kinds.ms), np.maximum(np.floor(most), 0), 0)
    if (most.max(0) == 0).any():
        return None
    row, kind = np.nonzero(most)
    flows = len(row)
    at = np.arange(flows)
    few = np.flatnonzero(most[row, kind] <= FEW)
    teams = flows + np.arange(rows)
    parts = [  # (constraint, variable, factor)
        (row, at, kinds.ms[row, kind] / limit),
        (np.arange(rows), teams, -left / limit),
        (rows + row, at, kinds.lengths[kind] / work.room[row]),
        (rows + np.arange(rows), teams, -np.ones(rows)),
        (np.full(rows, 2 * rows), teams, np.array(work.degrees, dtype=np.float64)),
        (2 * rows + 1 + np.arange(len(few)), few, np.ones(len(few))),
        (2 * rows + 1 + np.arange(len(few)), flows + row[few], -most[row, kind][few]),
        (2 * rows + 1 + len(few) + kind, at, np.ones(flows)),
    ]
    constraint, variable, factor = (np.concatenate([part[n] for part in parts]) for n in range(3))
    height = 2 * rows + 1 + len(few) + size
    matrix = csr_array((factor, (constraint, variable)), shape=(height, flows + rows))
    upper = np.zeros(height)
    upper[2 * rows] = work.devices
    upper[height - size :] = kinds.counts
    lower = np.full(height, -np.inf)
    lower[height - size :] = kinds.counts
    solved = milp(
        np.zeros(flows + rows),
        integrality=np.concatenate([np.zeros(flows), np.ones(rows)]),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix, lower, upper),
    )
    if solved.status == _INFEASIBLE:
        return None
    if solved.status != _SOLVED:
        raise RuntimeError(f"HiGHS ended without an answer: {solved.message}")
    return tuple(int(one) for one in solved.x[flows:].round())


def any_cut_bound(work: Work) -> float:
    """ms that no plan of these sequences can undercut, however they are cut into rounds.

    Let M be the number of rounds, C what the longest takes, f the least fixed time of a team, N the devices, and let
    p(l, C) be the fewest device-ms, degree * ms, of a sequence over the degrees at which it and the fixed time end
    within C. In a round of C_j ms no device is in two teams, so N * (C_j - f) is at least the sum over its teams of
    degree * (time - f), that is at least the sum over its sequences of degree * ms, and that at least the sum of
    p(l, C), as no round is longer than C. Over all rounds:

        sum C_j >= M * f + sum p(l, C) / N                                                      (1)

    The longest round holds at most `capacity` tokens. So the others hold at least the rest, which takes them what the
    sequences with the fewest device-ms per token would, cut as needed; and each takes f:

        sum C_j >= C + (M - 1) * f + (least device-ms of so many tokens) / N                    (2)

    M is at least `fewest_rounds`. (1) falls in C, in steps at the times that a sequence takes at some degree, and (2)
    rises, so the least of their larger one over all C is at such a step. C is at least what each sequence takes at its
    best degree.
    """
    kinds, fixed, rounds = Kinds.of(work), float(work.fixed.min()), work.fewest_rounds
    alone = kinds.ms + work.fixed[:, None]
    steps = np.unique(alone[np.isfinite(alone)])
    steps = steps[steps >= alone.min(0).max()]
    device_ms = kinds.ms * np.array(work.degrees)[:, None]
    least = np.stack([np.where(alone <= step, device_ms, np.inf).min(0) for step in steps])  # [Q, C]
    all_busy = rounds * fixed + (least * kinds.counts).sum(1) / work.devices
    free = device_ms.min(0)
    cheapest = np.argsort(free / kinds.lengths, kind="stable")
    tokens = np.cumsum((kinds.lengths * kinds.counts)[cheapest])
    taken = np.cumsum((free * kinds.counts)[cheapest])
    rest = max(0, int(tokens[-1]) - work.capacity)
    others = float(np.interp(rest, np.concatenate([[0], tokens]), np.concatenate([[0.0], taken])))
    one_longest = steps + (rounds - 1) * fixed + others / work.devices
    return float(np.maximum(all_busy, one_longest).min())
