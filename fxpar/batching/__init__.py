"""From a mini-batch of sequences to length groups, replicas and micro-batches. No process group is needed.

`collate`, `check_sequences` and `valid_tokens` are in `fxpar.batching.collate`.
"""

from __future__ import annotations

from fxpar.batching.groups import LengthGroup, length_groups
from fxpar.batching.plan import BatchPlan, GroupPlan, MicroBatch
from fxpar.batching.planner import RunTime, plan_batch
from fxpar.cost.group_cost import GroupCost

__all__ = ["BatchPlan", "GroupCost", "GroupPlan", "LengthGroup", "MicroBatch", "RunTime", "length_groups", "plan_batch"]
