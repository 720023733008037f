"""Names of torch.distributed.checkpoint that its metadata is made of.

What this wraps (torch 2.13): `torch.distributed.checkpoint.filesystem._StorageInfo`.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
