"""How short a length group could take at best, whatever the micro-batches of its replicas."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from fxpar.batching.packing import PackingRule, SequenceItem

CLOSE = 1000  # no improvement within 1/CLOSE of the lower bound


def lower_bound(items: Sequence[SequenceItem], rule: PackingRule) -> int:
    """A time in ticks that no plan of `items` (dearest first) can undercut.

    The largest of: the mean over replicas; for each k, the k+1 cheapest of the k * replicas + 1 dearest sequences,
    as some replica gets k+1 of those (k = 0: the dearest sequence); the runs that the tokens need; in lock step, every
    `replicas`-th of the sequences that cannot share a micro-batch. In a pipeline, each with the least that fill and
    fixed costs add, and the least that idle micro-batches cost; and what `_crowded_bound` finds.
    """
    replicas, budget, fixed = rule.replicas, rule.budget, rule.fixed
    costs = [0, *accumulate(item.cost for item in items)]
    tokens = [0, *accumulate(item.tokens for item in items)]
    cheapest, runs = items[-1].cost, fewest_bins(items, budget) if rule.packed else len(items)
    bound = fixed * rounded_up(-(-runs // replicas), rule.unit) + rule.fill(cheapest)
    bound = max(bound, _mean_bound(items, rule, costs[-1], runs))
    spans = [(k * replicas - k, k * replicas + 1) for k in range((len(items) - 1) // replicas + 1)]
    totals = [costs[stop] - costs[first] for first, stop in spans]
    counts = [-(-(tokens[stop] - tokens[first]) // budget) for first, stop in spans]
    counts = counts if rule.packed else [stop - first for first, stop in spans]
    # More sequences, dearer ones or more runs take no less: no overhead is larger than this.
    most = least_overhead(max(totals), items[0].cost, max(counts), len(items), rule)
    for total, count, (first, _) in zip(totals, counts, spans, strict=True):
        if total + most > bound:
            bound = max(bound, total + least_overhead(total, items[first].cost, count, len(items), rule))
    if rule.lockstep:
        alone = [item.cost for item in items if not rule.packed or 2 * item.tokens > budget][::replicas]
        bound = max(bound, sum(alone) + fixed * rounded_up(len(alone), rule.unit) + rule.fill(items[0].cost))
    elif rule.stages > 1:
        bound = _crowded_bound(items, costs, rule, bound)
    idle = max(0, rule.unit - len(items))
    return bound + idle * cheapest


def _crowded_bound(items: Sequence[SequenceItem], costs: Sequence[int], rule: PackingRule, bound: int) -> int:
    """`bound`, or more if in that time the dearest sequences have no room; `costs[n]` is that of the n dearest.

    The less time, the fewer replicas can take dear sequences, and the fill leaves these less time to run them: in the
    order of their dearest sequences, what the replicas before one have no room for says how dear its own is.
    """

    def has_room(time: int) -> bool:
        room = 0
        for _ in range(rule.replicas):
            placed = bisect_right(costs, room) - 1
            if placed == len(items):
                return True
            own = time - rule.fixed - rule.fill(items[placed].cost)
            if own < 0:
                return False
            room += own
        return room >= costs[-1]

    low = high = bound
    while not has_room(high):
        low, high = high, 2 * high + 1
    while high - low > 1 + low // CLOSE:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return low


def _mean_bound(items: Sequence[SequenceItem], rule: PackingRule, total: int, runs: int) -> int:
    """What the mean over replicas says, for sequences that cost `total` and take at least `runs` runs."""
    dearest, cheapest, replicas = items[0].cost, items[-1].cost, rule.replicas
    if rule.stages == 1:
        return -(-(total + rule.fixed * runs) // replicas)
    # Each replica that runs anything fills its pipeline, one of them with the dearest sequence.
    used, fills = min(replicas, len(items)), rule.stages - 1
    least = rule.shorter * (total + rule.fixed * runs) + fills * (dearest + used * rule.fixed + (used - 1) * cheapest)
    mean = -(-total // replicas)
    if rule.lockstep or replicas == 1:
        overhead = least_overhead(mean, dearest, -(-runs // replicas), len(items), rule)
    else:  # of the replica whose sequences cost most
        overhead = least_overhead(mean, cheapest, 1, len(items), rule)
    return max(-(-least // (rule.shorter * used)), mean + overhead)


def least_overhead(total: int, dearest: int, fewest: int, most: int, rule: PackingRule) -> int:
    """The least that fixed costs and fill take, over all numbers of runs from `fewest` to `most`, where the sequences
    cost `total` together and the dearest of them `dearest`.

    n runs cost fixed * n + (stages - 1) / shorter * (fixed + max(total / n, dearest)), which is convex in n.
    """
    if rule.stages == 1:
        return rule.fixed * fewest
    low, high = -(-fewest // rule.unit), -(-most // rule.unit)
    best = best_runs(total, dearest, most, rule) // rule.unit
    found = []
    for n in {min(max(q, low), high) * rule.unit for q in (best, best + 1)}:
        shared = -(-(rule.stages - 1) * (rule.fixed * n + total) // (rule.shorter * n))
        found.append(rule.fixed * n + max(shared, rule.fill(dearest)))
    return min(found)


def best_runs(total: int, dearest: int, most: int, rule: PackingRule) -> int:
    """The number of runs, rounded down, at which fill and fixed costs are least; at most `most`.

    More runs than total / dearest do not shorten the longest any more.
    """
    best = min(most, total // dearest) if dearest else most
    return min(best, math.isqrt((rule.stages - 1) * total // (rule.shorter * rule.fixed))) if rule.fixed else best


def fewest_bins(items: Sequence[SequenceItem], budget: int) -> int:
    """A number of bins that no packing can undercut."""
    halves = sum(2 * item.tokens > budget for item in items)
    return max(halves, -(-sum(item.tokens for item in items) // budget))


def rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def shared_lower_bound(items: Sequence[SequenceItem], rule: PackingRule) -> int:
    """What replicas that share cores cannot undercut (`Load.time`)."""
    runs = fewest_bins(items, rule.budget) if rule.packed else len(items)
    return rule.shared(lower_bound(items, rule), sum(item.cost for item in items) + rule.fixed * runs)
