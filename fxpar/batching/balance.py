"""Micro-batches of one length group for its data-parallel replicas.

Two cases, by what the replicas wait for:

    free        a replica's time is the sum over its micro-batches; the group ends with the slowest replica
    lock step   (ZeRO-2 and 3, and the bins of a replica) micro-batches at one position run side by side; the group's
                time is the sum over positions of the dearest one there

A micro-batch costs `fixed` plus what its sequences cost. In a pipeline the time to fill and drain it is added, which is
the shorter the smaller the largest micro-batch is (see `GroupCost`); so sequences are cut into more micro-batches than
the budget asks for, until their fixed costs outweigh that. Several constructions are tried and the cheapest is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from itertools import accumulate, pairwise

from fxpar.batching.bounds import CLOSE, best_runs, fewest_bins, least_overhead, lower_bound, rounded_up
from fxpar.batching.packing import (
    Bin,
    PackingRule,
    SequenceItem,
    as_bin,
    dearest_first,
    longest_first,
    pack,
    spread,
    spread_within,
)

Share = list[Bin]  # micro-batches of one replica
MORE_SLOTS = 3  # numbers of positions tried in lock step
ROUNDS = 32  # of improvement
IMPROVED_ITEMS = 40_000  # sequences packed anew in all rounds together: bounds the time
OPEN_SLOTS = 4  # positions that are still filled while later ones are begun
OTHERS = 4  # replicas that the slowest one tries to exchange with
EXCHANGES = 6  # tried with each of them
CUTS = 4  # times that an exchange packs a share anew in a pipeline


def share_out(items: Sequence[SequenceItem], rule: PackingRule) -> list[Share]:
    """The micro-batches of each replica, dearest first, from `items`, dearest first.

    Micro-batches hold at most `rule.budget` tokens, which the longest sequence must not exceed.
    """
    if rule.bins > 1 and not rule.lockstep:
        shares = spread(items, rule.replicas // rule.bins) if rule.replicas > rule.bins else [items]
        return [
            each for share in shares for each in (share_out(share, _of_replica(rule)) if share else [[]] * rule.bins)
        ]
    if not rule.packed:
        singles = [as_bin([item]) for item in items]
        shares = deal(singles, rule.replicas) if rule.lockstep else _spread_bins(singles, rule)
        if rule.stages > 1 and not rule.lockstep:
            apart = [[as_bin([item]) for item in share] for share in _by_cost(items, rule)]
            shares = min(shares, apart, key=_Price(rule))
    elif rule.lockstep:
        candidates = (deal(bins, rule.replicas) for bins in _slot_bins(items, rule))
        shares = min(candidates, key=_Price(rule))
    else:
        shares = _free(items, rule)
    return [dearest_first(share) for share in shares]


def makespan(shares: Sequence[Sequence[Bin]], rule: PackingRule) -> int:
    """Time of a group in ticks."""
    if rule.bins > 1 and not rule.lockstep:
        firsts = range(0, len(shares), rule.bins)
        return max(makespan(shares[first : first + rule.bins], _of_replica(rule)) for first in firsts)
    if rule.lockstep:
        slots = max(map(len, shares), default=0)
        return rule.time([max(s[k].cost for s in shares if k < len(s)) for k in range(slots)])
    return max((_load(share, rule) for share in shares), default=0)


def _of_replica(rule: PackingRule) -> PackingRule:
    """The rule for the bins of one replica."""
    return replace(rule, replicas=rule.bins, bins=1, lockstep=True)


# ---------------------------------------------------------------------------------------------------- how finely to cut
def _counts(items: Sequence[SequenceItem], replicas: int, fewest: int, rule: PackingRule) -> list[int]:
    """Numbers of micro-batches per replica worth a try in a pipeline, ascending; `fewest` hold all tokens.

    Around the best number if sequences could be cut; as they cannot, some more may make the longest shorter.
    """
    total, most = sum(item.cost for item in items) // replicas, -(-len(items) // replicas)
    best = max(fewest, best_runs(total, items[0].cost, most, rule))
    tried = {fewest, fewest + 1, best - 1, best, best + 1, best + best // 8, best + best // 3, most}
    if rule.unit > 1:
        tried |= {rounded_up(count, rule.unit) for count in tried} | {rounded_up(best, rule.unit) - rule.unit}
    return sorted(count for count in tried if fewest <= count <= most)


def _cut(items: Sequence[SequenceItem], rule: PackingRule, around: int = 0) -> Share:
    """Items, dearest first, of one replica in micro-batches: few, or in a pipeline as many as take least time.

    With `around`, only numbers next to it are tried.
    """
    few = pack(items, rule.budget)
    if rule.stages == 1 or not items:
        return few
    counts = range(around - 1, around + CUTS - 2) if around else _counts(items, 1, len(few), rule)
    total, dearest = sum(item.cost for item in items), items[0].cost
    least = {n: _least_load(total, dearest, n, rule) for n in counts if len(few) <= n <= len(items)}
    best, price = few, (_load(few, rule), len(few))
    for n in sorted(least, key=lambda n: least[n]):
        if least[n] > price[0]:  # so it is with all that follow
            break
        bins = spread_within(items, n, rule.budget)
        if bins and (_load(bins, rule), len(bins)) < price:
            best, price = bins, (_load(bins, rule), len(bins))
    return best


def _least_load(total: int, dearest: int, count: int, rule: PackingRule) -> int:
    """What so many micro-batches take at least, whose sequences cost `total` together, and the dearest `dearest`."""
    return total + rule.fixed * count + rule.fill(max(dearest, -(-total // count)))


def deal(bins: Sequence[Bin], replicas: int) -> list[Share]:
    """Bins to replicas so that those at one position cost about the same.

    Sorted by cost, each run of `replicas` neighbours is one position: no other grouping has a smaller sum of maxima.
    Within a position the dearest goes to the replica that has least.
    """
    shares: list[Share] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    ordered = dearest_first(bins)
    for start in range(0, len(ordered), replicas):
        free = sorted(range(replicas), key=lambda r: (loads[r], r))
        for r, one in zip(free, ordered[start : start + replicas], strict=False):
            shares[r].append(one)
            loads[r] += one.cost
    return shares


class _Price:
    """Sort key of shares: time, tokens of the fullest replica (a cost may be blind to them), micro-batches."""

    def __init__(self, rule: PackingRule) -> None:
        self.rule = rule

    def __call__(self, shares: Sequence[Sequence[Bin]]) -> tuple[int, int, int]:
        tokens = max(sum(one.tokens for one in share) for share in shares)
        return makespan(shares, self.rule), tokens, sum(map(len, shares))


# ---------------------------------------------------------------------------------------------------- lock step
def _slot_bins(items: Sequence[SequenceItem], rule: PackingRule) -> Iterator[list[Bin]]:
    """Ways to pack for lock step: few bins of similar lengths; positions balanced one by one; all bins equal."""
    yield pack(items, rule.budget)
    yield _slot_by_slot(items, rule.replicas, rule.budget)
    slots = -(-fewest_bins(items, rule.budget) // rule.replicas)
    tried = list(range(slots, slots + MORE_SLOTS))
    if rule.stages > 1:
        tried = sorted({*tried, *_counts(items, rule.replicas, slots, rule)})
    for count in tried:
        bins = spread_within(items, count * rule.replicas, rule.budget)
        if bins is not None:
            yield bins


def _slot_by_slot(items: Sequence[SequenceItem], replicas: int, budget: int) -> list[Bin]:
    """Fill one position after the other, each item into the cheapest bin of the first position that has room.

    Only the last few positions stay open, so that the time does not grow with the square of their number.
    """
    slots: list[list[tuple[int, int, int]]] = []  # heaps of (cost, tokens, bin) of the open positions
    bins: list[list[SequenceItem]] = []
    for item in items:
        slot = next((s for s in slots if s[0][1] + item.tokens <= budget), None)
        if slot is None:
            slot = [(0, 0, len(bins) + r) for r in range(replicas)]
            bins.extend([] for _ in range(replicas))
            slots = [*slots[-OPEN_SLOTS:], slot]
        cost, tokens, b = slot[0]
        bins[b].append(item)
        heapreplace(slot, (cost + item.cost, tokens + item.tokens, b))
    return [as_bin(members) for members in bins if members]


# --------------------------------------------------------------------------------------------------------- free
def _free(items: Sequence[SequenceItem], rule: PackingRule) -> list[Share]:
    """Spread, then pack each share; or pack, then spread the bins; then improve the better of the two.

    In a pipeline also: spread with the fill in mind, or the dear sequences apart from the cheap ones.
    """
    price, replicas = _Price(rule), rule.replicas
    starts = [[_cut(share, rule) for share in spread(items, replicas)]]
    if replicas == 1:
        return starts[0]
    starts.append(_spread_bins(dearest_first(pack(items, rule.budget)), rule))
    if rule.stages > 1:
        starts.append([_cut(share, rule) for share in spread(items, replicas, first=rule.fill)])
        starts.append([_cut(share, rule) for share in _by_cost(items, rule)])
    best = min(starts, key=price)
    bound = lower_bound(items, rule)
    work = 2 * len(items) * (1 if rule.stages == 1 else CUTS)
    rounds = min(ROUNDS, IMPROVED_ITEMS * replicas // work)
    for _ in range(rounds):
        if makespan(best, rule) <= bound + bound // CLOSE:
            break
        better = _improve(best, rule)
        if better is None:
            break
        best = better
    return best


def _by_cost(items: Sequence[SequenceItem], rule: PackingRule) -> list[list[SequenceItem]]:
    """The dearest items to the first replica, the next ones to the second, and so on, for about equal times.

    So few replicas have a long fill.
    """
    costs = [0, *accumulate(item.cost for item in items)]
    tokens = [0, *accumulate(item.tokens for item in items)]

    def time(first: int, stop: int) -> int:
        total, runs = costs[stop] - costs[first], stop - first
        if rule.packed:
            runs = -(-(tokens[stop] - tokens[first]) // rule.budget)
        return total + least_overhead(total, items[first].cost, runs, stop - first, rule)

    def stops(limit: int) -> list[int]:
        found = [0]
        for _ in range(rule.replicas):
            first = found[-1]
            ends = range(first + 1, len(items) + 1)
            found.append(first + bisect_right(ends, limit, key=partial(time, first)))
        return found

    low = high = lower_bound(items, rule)
    while stops(high)[-1] < len(items):
        low, high = high, 2 * high + 1
    while high - low > 1 + low // CLOSE:
        middle = (low + high) // 2
        low, high = (low, middle) if stops(middle)[-1] == len(items) else (middle, high)
    return [list(items[first:stop]) for first, stop in pairwise(stops(high))]


def _spread_bins(bins: Sequence[Bin], rule: PackingRule) -> list[Share]:
    """Bins, dearest first, to replicas whose times add up."""
    plain = spread(bins, rule.replicas, rule.fixed)
    if rule.stages == 1:
        return plain
    return min(plain, spread(bins, rule.replicas, rule.fixed, rule.fill), key=_Price(rule))


def _improve(shares: list[Share], rule: PackingRule) -> list[Share] | None:
    """The slowest replica gives a sequence to another one, or swaps two; None if no such change helps."""
    loads = [_load(share, rule) for share in shares]
    slowest = max(range(len(loads)), key=lambda r: (loads[r], -r))
    given = longest_first(item for one in shares[slowest] for item in one.items)
    for other in sorted(range(len(loads)), key=lambda r: (loads[r], r))[:OTHERS]:
        gap = loads[slowest] - loads[other]
        if other == slowest or gap <= 0:
            continue
        taken = longest_first(item for one in shares[other] for item in one.items)
        for give, take in _exchanges(given, taken, gap):
            left = [
                _cut(_without(given, give, take), rule, len(shares[slowest])),
                _cut(_without(taken, take, give), rule, len(shares[other])),
            ]
            if max(_load(share, rule) for share in left) < loads[slowest]:
                changed = list(shares)
                changed[slowest], changed[other] = left
                return changed
    return None


def _exchanges(
    given: Sequence[SequenceItem], taken: Sequence[SequenceItem], gap: int
) -> list[tuple[SequenceItem, SequenceItem | None]]:
    """The few exchanges (what goes, what comes back or None) whose difference is next to half of `gap`."""
    ascending = taken[::-1]
    costs = [item.cost for item in ascending]
    found: list[tuple[int, SequenceItem, SequenceItem | None]] = []
    for item in given:
        found.append((abs(2 * item.cost - gap), item, None))
        at = bisect_left(costs, item.cost - gap // 2)
        for place in (at - 1, at):
            if 0 <= place < len(costs) and costs[place] < item.cost:
                found.append((abs(2 * (item.cost - costs[place]) - gap), item, ascending[place]))
    found.sort(key=lambda entry: (entry[0], entry[1].index, -1 if entry[2] is None else entry[2].index))
    return [(give, take) for _, give, take in found[:EXCHANGES]]


def _without(items: Sequence[SequenceItem], gone: SequenceItem | None, come: SequenceItem | None) -> list[SequenceItem]:
    kept = [item for item in items if item is not gone]
    return longest_first([*kept, come]) if come is not None else kept


def _load(share: Sequence[Bin], rule: PackingRule) -> int:
    return rule.time([one.cost for one in share])
