"""Length groups: what the user's `strategies={512: "dp4", 4096: "dp2.tp2+sp"}` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.errors import (
    LengthLimitError,
    NoStrategiesError,
    StrategiesTypeError,
    StrategyWorldsError,
    TokenBudgetError,
    UnknownBudgetError,
)
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations, in_step, largest_team, ranks_of_replica, team_budgets
from fxpar.ir.written import LONGEST, brief


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of up to `limit` tokens run under `strategy`.

    `token_budget` is the most tokens that one micro-batch of one replica may have; each of its bins holds `limit`.
    Lengths are multiples of `multiple`: a strategy that cuts tokens needs it of a model that would see padding.
    """

    limit: int
    strategy: Strategy
    token_budget: int
    multiple: int = 1

    def takes(self, length: int) -> bool:
        """Whether a sequence of this many tokens may run in the group."""
        return length <= self.limit and length % self.multiple == 0

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, each with micro-batches of its own."""
        return self.strategy.replicas

    @cached_property
    def teams(self) -> tuple[LengthGroup, ...]:
        """A group per team of strategies side by side; else this one. The largest team's micro-batches have up to
        `token_budget` tokens, those of the others as many per rank; a team takes the sequences that its own hold.
        """
        if not self.strategy.teams:
            return (self,)
        return tuple(
            LengthGroup(min(self.limit, budget // team.bins), self.strategy.of_team(number), budget, self.multiple)
            for number, (team, budget) in enumerate(
                zip(self.strategy.teams, team_budgets(self.strategy, self.token_budget), strict=True)
            )
        )

    @property
    def bin_budget(self) -> int:
        """The most tokens of a bin, of which a micro-batch may have several of equal length: of the team with most."""
        return max(team.token_budget // team.strategy.bins for team in self.teams)

    @property
    def in_step(self) -> bool:
        """Whether teams run their micro-batches side by side, all with ZeRO-3."""
        return in_step(self.strategy)

    @property
    def lockstep(self) -> bool:
        """Whether the replicas run their micro-batches side by side.

        From ZeRO-2 on, every micro-batch ends with a collective over the replicas (gradients are scattered, with
        ZeRO-3 weights are gathered too), so each one takes as long as the slowest replica's.
        """
        if self.strategy.teams:
            return self.in_step or any(team.lockstep for team in self.teams)
        return self.strategy.most_zero >= 2 and self.replicas > 1

    def __str__(self) -> str:
        return f"<={self.limit}: {self.strategy}"


SIZES = "tokens or rows"
"""What limits of a task count, as long as its captured step has not shown which."""


def length_groups(
    strategies: Mapping[int, Strategy | str],
    *,
    world: int,
    token_budget: int | Mapping[int, int] | None = None,
    unit: str = "tokens",
) -> tuple[LengthGroup, ...]:
    """The groups of `strategies` (longest sequence in tokens -> strategy), sorted by limit. Errors call what limits
    count `unit`.

    `token_budget` is the most tokens of one micro-batch of one replica: one number for all groups, or a number by
    limit. A group that it does not name gets as many tokens per rank as the longest group has with one sequence of full
    length per micro-batch, or in each bin of one, but at least its own limit. A rank of a pipeline holds a stages-th of
    the layers, of as many micro-batches as there are stages: pp does not divide the tokens. Of teams side by side it is
    the budget of the largest one (see `LengthGroup.teams`). What a strategy says itself, `tokens(N)`, goes first.

    Of `rounds(cp4)` each formation is a group, which takes what one of its teams holds: as many tokens as it says, or
    as many per rank as the widest one has. Several may have one limit: the first one takes a sequence, unless another
    one runs instead.

    Raises StrategiesTypeError, NoStrategiesError, LengthLimitError, StrategySyntaxError, StrategyWorldsError (a
    strategy that does not take all `world` ranks), TokenBudgetError, UnknownBudgetError.
    """
    check_strategies(strategies)
    several = {limit: formations(choice) for limit, choice in sorted(strategies.items())}
    parsed = {limit: found[0] for limit, found in several.items()}
    if any(strategy.world != world for strategy in parsed.values()):
        raise StrategyWorldsError({limit: (str(s), s.world) for limit, s in parsed.items()}, world, unit)
    if isinstance(token_budget, Mapping):
        for limit in token_budget:
            if limit not in parsed:
                raise UnknownBudgetError(limit, parsed)
    groups = []
    for limit, widest in parsed.items():
        budget = _budget(limit, widest, parsed, token_budget)
        groups += [_formation_group(limit, one, budget, widest) for one in several[limit]]
    return tuple(sorted(groups, key=lambda group: group.limit))


def _formation_group(limit: int, strategy: Strategy, budget: int, widest: Strategy) -> LengthGroup:
    """With as many tokens per rank as `widest` has with this budget, where a team does not say how many it has."""
    largest, most = largest_team(strategy), largest_team(widest)
    tokens = largest.tokens or max(largest.bins, budget * ranks_of_replica(largest) // ranks_of_replica(most))
    group = LengthGroup(limit, strategy, tokens)
    return replace(group, limit=min(limit, group.bin_budget))


def check_strategies(strategies: object) -> None:
    """Raise StrategiesTypeError, NoStrategiesError, LengthLimitError for what is no dict from lengths to strategies."""
    if not isinstance(strategies, Mapping):
        raise StrategiesTypeError(strategies)
    if not strategies:
        raise NoStrategiesError
    for limit in strategies:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LONGEST:
            raise LengthLimitError(brief(limit), LONGEST)
    if not all(isinstance(choice, str | Strategy) for choice in strategies.values()):
        raise StrategiesTypeError(strategies)


def _budget(
    limit: int, strategy: Strategy, parsed: Mapping[int, Strategy], given: int | Mapping[int, int] | None
) -> int:
    largest = largest_team(strategy)
    budget = largest.tokens or (given.get(limit) if isinstance(given, Mapping) else given)
    if budget is None:
        most = max(parsed)
        longest = largest_team(parsed[most])
        tokens = most * longest.bins * ranks_of_replica(largest) // ranks_of_replica(longest)
        return max(limit * largest.bins, tokens)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < limit * largest.bins:
        raise TokenBudgetError(budget, limit, str(strategy), largest.bins)
    return budget
