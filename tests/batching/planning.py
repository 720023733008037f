"""Helpers of the planning tests: groups, costs, brute-force optima."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from fxpar.batching import BatchPlan, GroupCost, GroupPlan, LengthGroup, MicroBatch, length_groups
from fxpar.ir.strategy import Strategy

LINEAR = GroupCost(0.0, 1e-6, 0.0)
SQUARE = GroupCost(1e-3, 1e-6, 1e-9)
CHOICES = ("dp4", "dp2.tp2", "tp4", "cp4", "dp4+zero2", "dp2.cp2+zero3", "dp4+zero1", "dp2.pp2", "pp4", "dp2.pp2+zero2")
IN_BINS = ("rows4", "dp2.rows2", "dp2.rows2+zero2", "pp2.rows2", "rows2.tp2")


def no_switches(order: tuple[int, ...], run_s: tuple[float, ...]) -> float:
    return 0.0


def one_group(
    strategy: str = "dp4", limit: int = 100, budget: int | None = None, world: int = 4
) -> tuple[LengthGroup, ...]:
    return length_groups({limit: strategy}, world=world, token_budget=budget)


def seconds(group: GroupPlan, cost: GroupCost, lengths: Sequence[int]) -> float:
    """Time of a group worked out anew."""
    runs = [[_run_s(micro, cost, lengths) for micro in micros] for micros in group.replicas]
    if group.lockstep:
        runs = [[max(column) for column in itertools.zip_longest(*runs, fillvalue=0.0)]]
    return max(_with_bubble(times, cost) for times in runs)


def _run_s(micro: MicroBatch, cost: GroupCost, lengths: Sequence[int]) -> float:
    """Of bins that run side by side, each on its share of the ranks, the dearest counts."""
    left = iter(micro.sequences)
    bins = [[lengths[i] for i in itertools.islice(left, count)] for count in micro.bins or [len(micro.sequences)]]
    return cost.fixed_s + len(bins) * max(cost.seconds(one) - cost.fixed_s for one in bins)


def _with_bubble(times: Sequence[float], cost: GroupCost) -> float:
    if not times:
        return 0.0
    filled = list(times)
    while cost.virtual > 1 and len(filled) % cost.stages:
        filled.append(min(times))
    if cost.schedule == "zb_h1":  # weight parts of the next micro-batches fill gaps of the longest
        longest, *others = sorted(filled, reverse=True)[: cost.stages]
        return sum(filled) + (cost.stages - 1) * longest * 2 / 3 - sum(others) / 3
    return sum(filled) + (cost.stages - 1) * max(filled) / cost.virtual


def check_plan(
    plan: BatchPlan,
    lengths: Sequence[int],
    groups: Sequence[LengthGroup],
    costs: Sequence[GroupCost],
    packed: bool = True,
) -> None:
    """What holds for every plan."""
    placed = [i for group in plan.groups for micro in group.micro_batches() for i in micro.sequences]
    assert sorted(placed) == list(range(len(lengths)))
    assert list(plan.order) == sorted(set(plan.order))
    into, rides = dict(plan.merged), dict(((own, other), number) for own, other, number in plan.rides)
    rode: Counter[tuple[int, int]] = Counter()
    for part in plan.groups:
        group = groups[part.group]
        assert len(part.replicas) == group.replicas
        assert part.lockstep == group.lockstep
        assert part.sequences
        for micro in part.micro_batches():
            assert micro.sequences
            left, bins = iter(micro.sequences), group.strategy.bins if packed else 1
            assert len(micro.bins) == (bins if bins > 1 else 0)
            for count in micro.bins:
                assert sum(lengths[i] for i in itertools.islice(left, count)) <= group.token_budget // bins
            assert not list(left) or not micro.bins
            assert micro.tokens == sum(lengths[i] for i in micro.sequences) <= group.token_budget
        for i in part.sequences:
            assert group.takes(lengths[i])
            own = next(g for g, candidate in enumerate(groups) if candidate.takes(lengths[i]))
            rode[own, part.group] += own not in into and part.group != own
            assert into.get(own, part.group) == part.group >= own
        assert abs(part.predicted_s - seconds(part, costs[part.group], lengths)) <= 1e-9 * part.predicted_s + 1e-12
        assert part.lower_bound_s <= part.predicted_s
    assert +rode == rides
    assert abs(plan.predicted_s - plan.switch_s - sum(g.predicted_s for g in plan.groups)) <= 1e-9


@st.composite
def mini_batches(
    draw, most: int = 40, choices: Sequence[str] = CHOICES
) -> tuple[list[int], tuple[LengthGroup, ...], list[GroupCost]]:
    """Lengths, groups and costs that fit together."""
    limits = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=4)))
    strategies = {limit: draw(st.sampled_from(choices)) for limit in limits}
    bins = max(Strategy.parse(strategy).bins for strategy in strategies.values())
    budget = draw(st.one_of(st.none(), st.integers(limits[-1], 150).map(lambda tokens: bins * tokens)))
    groups = length_groups(strategies, world=4, token_budget=budget)
    coefficient = st.sampled_from([0.0, 1e-6, 3e-5, 1e-3])
    costs = [
        GroupCost(
            draw(coefficient),
            draw(coefficient),
            draw(coefficient) / 50,
            stages=group.strategy.degree("pp"),
            **draw(st.sampled_from([{}, {"virtual": 2}, {"schedule": "zb_h1"}])),
        )
        for group in groups
    ]
    lengths = draw(st.lists(st.integers(1, limits[-1]), min_size=1, max_size=most))
    return lengths, groups, costs


def fewest(lengths: Sequence[int], budget: int) -> int:
    """Fewest micro-batches for these lengths, by trying everything."""
    best = len(lengths)

    def place(at: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(lengths):
            best = len(bins)
            return
        for b in range(len(bins)):
            if bins[b] + lengths[at] <= budget:
                bins[b] += lengths[at]
                place(at + 1, bins)
                bins[b] -= lengths[at]
        place(at + 1, [*bins, lengths[at]])

    place(0, [])
    return best


def best_free(lengths: Sequence[int], replicas: int, budget: int, cost: GroupCost) -> float:
    """Least time of a group whose replicas do not wait for one another, by trying everything."""
    best = float("inf")
    for owners in itertools.product(range(replicas), repeat=len(lengths)):
        shares = [[n for n, r in zip(lengths, owners, strict=True) if r == own] for own in range(replicas)]
        best = min(best, max(_share_s(share, budget, cost) for share in shares))
    return best


def _share_s(share: Sequence[int], budget: int, cost: GroupCost) -> float:
    return fewest(share, budget) * cost.fixed_s + sum(map(cost.sequence_s, share)) if share else 0.0
