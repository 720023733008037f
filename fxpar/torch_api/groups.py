"""Process groups by the names that graphs hold, and groups that nobody but their members makes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group


def is_gloo(name: str) -> bool:
    """Whether the process group of this name carries everything with gloo."""
    return dist.get_backend(_resolve_process_group(GroupName(name))) == "gloo"


def members_suffice() -> bool:
    """Whether a group can be made without the other ranks: not where NCCL splits it off the default group, which is
    bound to a device, and not where the default group makes the groups itself.
    """
    default: Any = dist.group.WORLD
    return default.bound_device_id is None and not hasattr(default, "new_group")


def group_of_members(
    ranks: Sequence[int], name: str, timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group of `ranks`, ascending, which these alone make, each with the same `name`. Members that make
    several groups make them in one order. Only if `members_suffice()`. Without `backend` that of the default group.

    torch's own way, `new_group(use_local_synchronization=True)`, names a group by its ranks and by how many groups the
    process has made (torch 2.13): members that have made different numbers wait for each other for ever.
    """
    world: Any = getattr(c10d, "_world")  # noqa: B009 - not in the stubs
    default, store = world.pg_map[dist.group.WORLD]
    backend = backend or default
    made: Any = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        group_name=GroupName(name),
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
    )
    group: dist.ProcessGroup = made[0]
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
