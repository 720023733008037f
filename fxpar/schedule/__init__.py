"""Pipeline schedules as data: who runs which part of which micro-batch in which order. Nothing here needs torch.

plan = schedule("1f1b", stages=4, micro_batches=8)
timeline = simulate(plan, Costs(forward_ms=1.0, backward_ms=2.0))
print(chart(timeline))
"""

from __future__ import annotations

from fxpar.schedule.actions import Action, Schedule
from fxpar.schedule.build import KINDS, schedule
from fxpar.schedule.chart import chart
from fxpar.schedule.simulate import Costs, Span, Timeline, simulate
from fxpar.schedule.transfers import Receive, Send, Step, Transfer, Wait, with_transfers

__all__ = [
    "KINDS",
    "Action",
    "Costs",
    "Receive",
    "Schedule",
    "Send",
    "Span",
    "Step",
    "Timeline",
    "Transfer",
    "Wait",
    "chart",
    "schedule",
    "simulate",
    "with_transfers",
]
