"""Micro-batches of one length group for its data-parallel replicas, and how short they could take at best.

Two cases, by what the replicas wait for:

    free        a replica's time is the sum over its micro-batches; the group ends with the slowest replica
    lock step   (ZeRO-2 and 3) micro-batches at one position run side by side; the group's time is the sum over
                positions of the dearest one there

A micro-batch costs `fixed` plus what its sequences cost. Several constructions are tried and the cheapest is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from itertools import accumulate

from fxpar.batching.packing import Bin, Item, as_bin, dearest_first, longest_first, pack, spread, spread_within

Share = list[Bin]  # micro-batches of one replica
MORE_SLOTS = 3  # numbers of positions tried in lock step
ROUNDS = 32  # of improvement
IMPROVED_ITEMS = 40_000  # sequences packed anew in all rounds together: bounds the time
OPEN_SLOTS = 4  # positions that are still filled while later ones are begun
OTHERS = 4  # replicas that the slowest one tries to exchange with
EXCHANGES = 6  # tried with each of them
CLOSE = 1000  # no improvement within 1/CLOSE of the lower bound


def share_out(
    items: Sequence[Item], replicas: int, budget: int, fixed: int, *, lockstep: bool, packed: bool
) -> list[Share]:
    """The micro-batches of each replica, dearest first, from `items`, dearest first.

    Without `packed` each sequence is a micro-batch of its own.

    Micro-batches hold at most `budget` tokens, which the longest sequence must not exceed.
    """
    if not packed:
        singles = [as_bin([item]) for item in items]
        shares = deal(singles, replicas) if lockstep else spread(singles, replicas, fixed)
    elif lockstep:
        candidates = (deal(bins, replicas) for bins in _slot_bins(items, replicas, budget))
        shares = min(candidates, key=_Price(fixed, True))
    else:
        shares = _free(items, replicas, budget, fixed)
    return [dearest_first(share) for share in shares]


def makespan(shares: Sequence[Sequence[Bin]], fixed: int, lockstep: bool) -> int:
    """Time of a group in ticks."""
    if lockstep:
        slots = max(map(len, shares), default=0)
        return sum(fixed + max(s[k].cost for s in shares if k < len(s)) for k in range(slots))
    return max((_load(share, fixed) for share in shares), default=0)


def lower_bound(items: Sequence[Item], replicas: int, budget: int, fixed: int, *, lockstep: bool, packed: bool) -> int:
    """A time in ticks that no plan of `items` (dearest first) can undercut.

    The largest of: the mean over replicas; for each k, the k+1 cheapest of the k * replicas + 1 dearest sequences,
    as some replica gets k+1 of those (k = 0: the dearest sequence); the runs that the tokens need; in lock step, every
    `replicas`-th of the sequences that cannot share a micro-batch.
    """
    costs = [0, *accumulate(item.cost for item in items)]
    tokens = [0, *accumulate(item.tokens for item in items)]
    runs = _fewest_bins(items, budget) if packed else len(items)
    bound = max(fixed * -(-runs // replicas), -(-(costs[-1] + fixed * runs) // replicas))
    for k in range((len(items) - 1) // replicas + 1):
        first, stop = k * replicas - k, k * replicas + 1
        runs = -(-(tokens[stop] - tokens[first]) // budget) if packed else k + 1
        bound = max(bound, costs[stop] - costs[first] + fixed * runs)
    if lockstep:
        alone = [item.cost for item in items if not packed or 2 * item.tokens > budget]
        bound = max(bound, sum(fixed + cost for cost in alone[::replicas]))
    return bound


def _fewest_bins(items: Sequence[Item], budget: int) -> int:
    """A number of bins that no packing can undercut."""
    halves = sum(2 * item.tokens > budget for item in items)
    return max(halves, -(-sum(item.tokens for item in items) // budget))


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

    def __init__(self, fixed: int, lockstep: bool) -> None:
        self.fixed, self.lockstep = fixed, lockstep

    def __call__(self, shares: Sequence[Sequence[Bin]]) -> tuple[int, int, int]:
        tokens = max(sum(one.tokens for one in share) for share in shares)
        return makespan(shares, self.fixed, self.lockstep), tokens, sum(map(len, shares))


# ---------------------------------------------------------------------------------------------------- lock step
def _slot_bins(items: Sequence[Item], replicas: int, budget: int) -> Iterator[list[Bin]]:
    """Ways to pack for lock step: few bins of similar lengths; positions balanced one by one; all bins equal."""
    yield pack(items, budget)
    yield _slot_by_slot(items, replicas, budget)
    slots = -(-_fewest_bins(items, budget) // replicas)
    for more in range(MORE_SLOTS):
        bins = spread_within(items, (slots + more) * replicas, budget)
        if bins is not None:
            yield bins


def _slot_by_slot(items: Sequence[Item], replicas: int, budget: int) -> list[Bin]:
    """Fill one position after the other, each item into the cheapest bin of the first position that has room.

    Only the last few positions stay open, so that the time does not grow with the square of their number.
    """
    slots: list[list[tuple[int, int, int]]] = []  # heaps of (cost, tokens, bin) of the open positions
    bins: list[list[Item]] = []
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
def _free(items: Sequence[Item], replicas: int, budget: int, fixed: int) -> list[Share]:
    """Spread, then pack each share; or pack, then spread the bins; then improve the better of the two."""
    price = _Price(fixed, False)
    by_sequence = [pack(share, budget) for share in spread(items, replicas)]
    if replicas == 1:
        return by_sequence
    by_bin = spread(dearest_first(pack(items, budget)), replicas, fixed)
    best = min(by_sequence, by_bin, key=price)
    bound = lower_bound(items, replicas, budget, fixed, lockstep=False, packed=True)
    rounds = min(ROUNDS, IMPROVED_ITEMS * replicas // (2 * len(items)))
    for _ in range(rounds):
        if makespan(best, fixed, False) <= bound + bound // CLOSE:
            break
        better = _improve(best, budget, fixed)
        if better is None:
            break
        best = better
    return best


def _improve(shares: list[Share], budget: int, fixed: int) -> list[Share] | None:
    """The slowest replica gives a sequence to another one, or swaps two; None if no such change helps."""
    loads = [_load(share, fixed) for share in shares]
    slowest = max(range(len(loads)), key=lambda r: (loads[r], -r))
    given = longest_first(item for one in shares[slowest] for item in one.items)
    for other in sorted(range(len(loads)), key=lambda r: (loads[r], r))[:OTHERS]:
        gap = loads[slowest] - loads[other]
        if other == slowest or gap <= 0:
            continue
        taken = longest_first(item for one in shares[other] for item in one.items)
        for give, take in _exchanges(given, taken, gap):
            left = [pack(_without(given, give, take), budget), pack(_without(taken, take, give), budget)]
            if max(_load(share, fixed) for share in left) < loads[slowest]:
                changed = list(shares)
                changed[slowest], changed[other] = left
                return changed
    return None


def _exchanges(given: Sequence[Item], taken: Sequence[Item], gap: int) -> list[tuple[Item, Item | None]]:
    """The few exchanges (what goes, what comes back or None) whose difference is next to half of `gap`."""
    ascending = taken[::-1]
    costs = [item.cost for item in ascending]
    found: list[tuple[int, Item, Item | None]] = []
    for item in given:
        found.append((abs(2 * item.cost - gap), item, None))
        at = bisect_left(costs, item.cost - gap // 2)
        for place in (at - 1, at):
            if 0 <= place < len(costs) and costs[place] < item.cost:
                found.append((abs(2 * (item.cost - costs[place]) - gap), item, ascending[place]))
    found.sort(key=lambda entry: (entry[0], entry[1].index, -1 if entry[2] is None else entry[2].index))
    return [(give, take) for _, give, take in found[:EXCHANGES]]


def _without(items: Sequence[Item], gone: Item | None, come: Item | None) -> list[Item]:
    kept = [item for item in items if item is not gone]
    return longest_first([*kept, come]) if come is not None else kept


def _load(share: Sequence[Bin], fixed: int) -> int:
    return sum(one.cost for one in share) + fixed * len(share)
