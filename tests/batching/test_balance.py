"""Balance of one group against optima found by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching.balance import deal, makespan, share_out
from fxpar.batching.bounds import lower_bound
from fxpar.batching.packing import Bin, PackingRule, SequenceItem, as_bin, longest_first, pack
from tests.repeat import examples


def items_of(*lengths: int) -> list[SequenceItem]:
    """Sequences that cost as much as they are long."""
    return longest_first(SequenceItem(i, n, n) for i, n in enumerate(lengths))


def packings(
    items: Sequence[SequenceItem], budget: int, bins: list[list[SequenceItem]] | None = None
) -> Iterator[list[Bin]]:
    """All ways to put items into bins."""
    bins = [] if bins is None else bins
    if not items:
        yield [as_bin(b) for b in bins]
        return
    first, *rest = items
    for b in bins:
        if sum(item.tokens for item in b) + first.tokens <= budget:
            b.append(first)
            yield from packings(rest, budget, bins)
            b.pop()
    yield from packings(rest, budget, [*bins, [first]])


def test_longest_first_alone_is_improved():
    """3, 3, 2, 2, 2 on two replicas: longest-first ends at 7, the optimum is 6."""
    rule = PackingRule(2, 100)
    assert makespan(share_out(items_of(3, 3, 2, 2, 2), rule), rule) == 6


def test_few_runs_matter_when_a_run_is_dear():
    shares = share_out(items_of(6, 6, 4, 4), PackingRule(2, 10, 1000))
    assert [len(share) for share in shares] == [1, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4), st.sampled_from([0, 7, 1000]))
def test_lock_step_without_packing_is_optimal(lengths, replicas, fixed):
    rule = PackingRule(replicas, 50, fixed, lockstep=True, packed=False)
    best = sum(fixed + cost for cost in sorted(lengths, reverse=True)[::replicas])
    assert makespan(share_out(items_of(*lengths), rule), rule) == best
    assert lower_bound(items_of(*lengths), rule) == best


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(2, 3), st.sampled_from([0, 7, 1000]))
@settings(max_examples=examples(25))
def test_lock_step_is_near_the_optimum(lengths, replicas, fixed):
    items = longest_first(SequenceItem(i, n, n + n * n // 10) for i, n in enumerate(lengths))
    rule = PackingRule(replicas, 60, fixed, lockstep=True)
    found = makespan(share_out(items, rule), rule)
    best = min(makespan(deal(bins, replicas), rule) for bins in packings(items, 60))
    assert lower_bound(items, rule) <= best
    assert best <= found <= 1.25 * best


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_deal_pairs_equals(replicas):
    bins = [as_bin(items_of(n)) for n in (1, 9, 5, 8, 4)]
    dealt = deal(bins, replicas)
    assert sorted(b.cost for share in dealt for b in share) == [1, 4, 5, 8, 9]
    assert makespan(dealt, PackingRule(replicas, 10, lockstep=True)) == {1: 27, 2: 15, 3: 13}[replicas]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
@settings(max_examples=examples(25))
def test_few_bins(lengths):
    items = items_of(*lengths)
    fewest = min(map(len, packings(items, 60)))
    assert len(pack(items, 60)) <= 11 / 9 * fewest + 1
