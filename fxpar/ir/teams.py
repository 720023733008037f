"""How strategies side by side share what one of them would take: by the ranks that a replica of each has."""

from __future__ import annotations

from fxpar.ir.strategy import Strategy


def ranks_of_replica(strategy: Strategy) -> int:
    """Among which the tokens of a micro-batch are shared: those of a pipeline stage."""
    return strategy.world // strategy.replicas // strategy.pipeline_size


def largest_team(strategy: Strategy) -> Strategy:
    """Of strategies side by side the first of those whose replicas have most ranks; else the strategy itself."""
    return max(strategy.teams, key=ranks_of_replica, default=strategy)


def team_budgets(strategy: Strategy, tokens: int) -> tuple[int, ...]:
    """Tokens of a micro-batch of each team, where the largest one's has so many: as many per rank."""
    return tuple(team_budget(strategy, team, tokens) for team in strategy.teams)


def team_budget(strategy: Strategy, team: Strategy, tokens: int) -> int:
    """That of one of the teams."""
    return max(team.bins, tokens * ranks_of_replica(team) // ranks_of_replica(largest_team(strategy)))
