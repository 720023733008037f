"""Zeros that take no memory until they are written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGN_BYTES = 64  # as torch's own allocator


def lazy_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros(count)`; on the CPU its pages come from the operating system when they are first touched.

    torch writes its zeros, which makes a rank pay for buffers that some strategies only use later, or never.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    nbytes = count * dtype.itemsize
    raw = np.zeros(nbytes + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype)
