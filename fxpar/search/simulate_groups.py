"""HotSPa's Table 3: gains of length groups over the static layout, from prices of its five layouts of a 32B model.

The shares of the bands of lengths are those of the static row, each band's seconds over its price per token; so the
tokens of a mini-batch are the one free number of a dataset. They are chosen so that the static row takes its seconds.
A micro-batch is a row of documents, as long as the upper length of its group, and at least as long as the shortest
bucket of HotSPa's artifact where a group is not the static one; attention runs over the whole row, rows are not padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fxpar.batching import LengthGroup, plan_batch
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import Cost, GroupCost
from fxpar.ir.strategy import Strategy
from fxpar.search.published import COMBINATIONS, EDGES, LAYOUTS, OTHERS_S, SHORTEST_ROW, STATIC, Band
from fxpar.switch import ParamLayout
from fxpar.switch.order import SwitchSchedule

SHORTEST = 64  # tokens of the shortest documents
BATCHES = 24  # mini-batches that times are means of
HALVINGS = 14  # of the interval that holds the tokens of a mini-batch
BETWEEN = (1e4, 1e8)  # tokens of a mini-batch


@dataclass(frozen=True)
class SimulatedGroup:
    """A length group of a dataset under its layout: mean seconds, and the speed-up over the static layout."""

    dataset: str
    band: str
    layout: str
    seconds: float
    static_s: float

    @property
    def speedup(self) -> float:
        return self.static_s / self.seconds


@dataclass(frozen=True)
class SimulatedTotal:
    """A mini-batch of a combination: its groups, the switches, and the speed-up over the static layout."""

    dataset: str
    combination: str
    groups_s: float
    switches_s: float
    static_s: float

    @property
    def speedup(self) -> float:
        return self.static_s / (self.groups_s + self.switches_s)


@dataclass(frozen=True)
class Dataset:
    """`static_s` of Table 3, by band; `costs` of a micro-batch by layout."""

    name: str
    static_s: Sequence[float]
    costs: Mapping[str, GroupCost]
    batches: int = BATCHES
    _seconds: dict[Band, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        """Of the static row, shortest first."""
        return tuple(Band(low, high, STATIC) for low, high in zip((0, *EDGES), EDGES, strict=False))

    @cached_property
    def shares(self) -> np.ndarray:
        """[bands] of the tokens."""
        pairs = zip(self.static_s, EDGES, strict=True)
        tokens = np.array([seconds / self.costs[STATIC].seconds([row]) * row for seconds, row in pairs])
        return tokens / tokens.sum()

    @cached_property
    def tokens(self) -> int:
        """Of a mean mini-batch."""
        low, high = BETWEEN
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            drawn = self.drawn(middle)
            total = sum(mean_s(self.costs, drawn, band) for band in self.bands)
            low, high = (middle, high) if total < sum(self.static_s) else (low, middle)
        return round(math.sqrt(low * high))

    def drawn(self, tokens: float) -> list[np.ndarray]:
        """Mini-batches of so many tokens in the mean: as many documents of each band as come by chance (Poisson), each
        length of a band with the same share of the tokens.
        """
        found = []
        for number in range(self.batches):
            rng = np.random.default_rng(number)
            lengths = []
            for band, share in zip(self.bands, self.shares, strict=True):
                low = max(band.low, SHORTEST)
                spread = math.log(band.high / low)
                # The same quantile for all `tokens`, so that the mean time grows evenly with them.
                count = rng.poisson(tokens * share * spread / (band.high - low))
                logs = np.random.default_rng([number, band.high]).uniform(0, spread, count)
                lengths.append(np.ceil(low * np.exp(logs)))
            found.append(np.concatenate(lengths).astype(np.int64))
        return found

    @cached_property
    def sample(self) -> list[np.ndarray]:
        """Mini-batches of `tokens`."""
        return self.drawn(self.tokens)

    def seconds(self, band: Band) -> float:
        """Of the documents of a band under its layout, in a mean mini-batch."""
        if band not in self._seconds:
            self._seconds[band] = mean_s(self.costs, self.sample, band)
        return self._seconds[band]

    def static_of(self, band: Band) -> float:
        """Of the same documents under the static layout, in the bands of its row."""
        return sum(self.seconds(one) for one in self.bands if band.low <= one.low < band.high)


def mean_s(costs: Mapping[str, GroupCost], drawn: Sequence[np.ndarray], band: Band) -> float:
    """Seconds of the documents of a band under its layout, over mini-batches."""
    row = band.high if band.layout == STATIC else max(band.high, SHORTEST_ROW)
    inside = (lengths[(lengths > band.low) & (lengths <= band.high)] for lengths in drawn)
    return sum(_group_s(costs[band.layout], packed(lengths, row), band.layout) for lengths in inside) / len(drawn)


def _group_s(cost: GroupCost, rows: Sequence[int], layout: str) -> float:
    replicas = Strategy.parse(LAYOUTS[layout]).replicas
    return max(cost.replica_s([[row] for row in rows[first::replicas]]) for first in range(replicas))


def packed(lengths: np.ndarray, row: int) -> list[int]:
    """Tokens of the rows of at most `row` tokens, longest first; each document goes to the first row with room."""
    rows = np.zeros(len(lengths), np.int64)
    used = 0
    for length in np.sort(lengths)[::-1]:
        place = int(np.argmax(rows[: used + 1] + length <= row)) if used < len(rows) else used
        rows[place] += length
        used = max(used, place + 1)
    return sorted(rows[:used].tolist(), reverse=True)


def table_3(
    datasets: Sequence[Dataset], switches_s: Mapping[str, float]
) -> tuple[list[SimulatedGroup], list[SimulatedTotal]]:
    """All groups, each once, and all totals. `switches_s` by combination."""
    groups: dict[tuple[str, Band], SimulatedGroup] = {}
    totals = []
    for one in datasets:
        static_s = sum(map(one.seconds, one.bands))
        for name, bands in COMBINATIONS.items():
            for band in bands:
                found = SimulatedGroup(one.name, band.name, band.layout, one.seconds(band), one.static_of(band))
                groups.setdefault((one.name, band), found)
            total = sum(map(one.seconds, bands))
            totals.append(SimulatedTotal(one.name, name, total, switches_s[name], static_s))
    return list(groups.values()), totals


def pair(
    costs: Mapping[str, GroupCost], drawn: Sequence[np.ndarray], switches_s: Mapping[str, float]
) -> list[SimulatedTotal]:
    """HotSPa's combinations (by `switches_s`) against the static layout in rows of the longest documents, as
    Megatron-LM runs it: HSPMD (OSDI 2026) reports one of the first and one of the second.
    """
    static_s = mean_s(costs, drawn, Band(0, max(EDGES), STATIC))
    return [
        SimulatedTotal("CommonCrawl", name, sum(mean_s(costs, drawn, b) for b in COMBINATIONS[name]), seconds, static_s)
        for name, seconds in switches_s.items()
    ]


@dataclass(frozen=True)
class SimulatedFormation:
    """HSPMD's strategies side by side on the mini-batches whose longest sequence they are for: how many those are, and
    mean seconds of what they run, and of the weights' and gradients' way from home and back (0 where there are none).
    """

    name: str
    strategy: str
    limit: int
    mini_batches: int
    runs_s: float
    borders_s: float


def formations(
    prices: Mapping[int, tuple[str, Strategy, Cost, float]], drawn: Sequence[np.ndarray]
) -> list[SimulatedFormation]:
    """`prices` by limit: name, strategy, what its teams take, and the seconds of weights and gradients. A sequence runs
    in one of the teams, in micro-batches of as many tokens per rank as the widest team has with one of the limit.
    """
    found, below = [], 0
    for limit, (name, strategy, cost, borders_s) in sorted(prices.items()):
        group = LengthGroup(limit, strategy, limit)
        mine = [lengths.tolist() for lengths in drawn if below < lengths.max() <= limit]
        runs = [plan_batch(lengths, [group], [cost], lambda *_: 0.0).predicted_s for lengths in mine]
        mean_s = sum(runs) / len(runs) if runs else 0.0
        found.append(SimulatedFormation(name, str(strategy), limit, len(mine), mean_s, borders_s))
        below = limit
    return found


def chain_s(layouts: Mapping[str, ParamLayout], cluster: ClusterSpec) -> dict[str, float]:
    """Seconds of the switches of a mini-batch in HotSPa's flow, in its order, by its planner, by combination."""
    found = {}
    for name in OTHERS_S:
        *short, longest = (band.layout for band in COMBINATIONS[name])
        mine = {one: layouts[one] for one in (longest, *short)}
        found[name] = SwitchSchedule(mine, None, cluster, "hotspa", gradients="chain").evaluate(list(mine)).predicted_s
    return found
