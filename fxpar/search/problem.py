"""What a search is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.strategy import Strategy
from fxpar.search.known import KnownModel
from fxpar.search.price import Depth, Lower
from fxpar.search.pricing import PricedSet
from fxpar.search.rounds import Rounds
from fxpar.search.switching import Outlines


@dataclass(frozen=True)
class Problem:
    """What a plan is for: `shapes` to try, mini-batches to price with, the longest sequence, bytes of a device."""

    shapes: tuple[Strategy, ...]
    cluster: ClusterSpec
    batches: tuple[tuple[int, ...], ...]
    longest: int
    memory_bytes: int | None
    max_strategies: int
    depth: Depth
    packed: bool = True
    overlap: bool = False
    keep: int = 3
    rules: bool = False
    teams: bool = False
    rounds: bool = False

    @property
    def anchors(self) -> tuple[int, int]:
        """Tokens of the micro-batches for which memory is predicted."""
        return min(256, self.longest), max(*map(sum, self.batches), 2 * self.longest)

    @property
    def mean_tokens(self) -> float:
        """Of a mini-batch."""
        return sum(map(sum, self.batches)) / len(self.batches)

    def known(self, lower: Lower, outlines: Outlines) -> KnownModel:
        """What `find_plan_of` starts with."""
        return KnownModel(lower, outlines, self.cluster, self.depth, self.anchors)


@dataclass(frozen=True)
class Found:
    """The best sets, best first; the best single strategy; the seconds that no set can undercut, with rules where these
    are searched; those that no set without rules can, and the best of these; what was looked at. `refused` are
    strategies that the model cannot be lowered to, and why. `rounds` are the best teams that each mini-batch chooses
    rounds of, where these were asked for and some hold the longest sequence.
    """

    plans: tuple[PricedSet, ...]
    best_static: PricedSet
    lower_bound_s: float
    uniform_bound_s: float
    uniform_s: float
    evaluated: int
    pruned: int
    planned_sets: int
    refused: dict[str, str]
    search_cpu_s: float
    ruled: int = 0  # strategies with rules that were lowered for a set
    rounds: Rounds | None = None

    @property
    def rounds_win(self) -> bool:
        """Whether rounds of teams take less than the best set, in the same memory."""
        return self.rounds is not None and self.rounds.priced.predicted_s < self.plans[0].predicted_s

    @property
    def best(self) -> PricedSet:
        """What takes least: the first set, or the formations of rounds."""
        return self.rounds.priced if self.rounds is not None and self.rounds_win else self.plans[0]

    @property
    def won(self) -> float:
        """By which share of its time rules make the best set without them faster."""
        return 1.0 - self.plans[0].predicted_s / self.uniform_s

    @property
    def speedup(self) -> float:
        """Of the best set over the best single strategy."""
        return self.best_static.predicted_s / self.plans[0].predicted_s

    @property
    def gap(self) -> float:
        """By which share of its time the best set may be longer than the best there is."""
        return 1.0 - self.lower_bound_s / self.plans[0].predicted_s

    @property
    def uniform_gap(self) -> float:
        """`gap` among sets without rules."""
        return 1.0 - self.uniform_bound_s / self.uniform_s
