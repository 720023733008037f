"""Process groups by the names that graphs hold."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group


def is_gloo(name: str) -> bool:
    """Whether the process group of this name carries everything with gloo."""
    return dist.get_backend(_resolve_process_group(GroupName(name))) == "gloo"
