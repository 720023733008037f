"""Rounds of teams: sequences of very different lengths at the same time, each in a team of its own degree.

A team is the ranks of one strategy side by side, a round what runs at the same time, a layout the degrees of a round.
Nothing here imports torch.
"""

from __future__ import annotations

from fxpar.rounds.cost import RoundCost, TeamCost, read_cost
from fxpar.rounds.plan import Round, RoundPlan, Team, homogeneous_ms, plan_rounds
from fxpar.rounds.published import PUBLISHED, cost_of

__all__ = [
    "PUBLISHED",
    "Round",
    "RoundCost",
    "RoundPlan",
    "Team",
    "TeamCost",
    "cost_of",
    "homogeneous_ms",
    "plan_rounds",
    "read_cost",
]
