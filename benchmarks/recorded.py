"""The kernels of a step that no schedule, no engine and no fusion can save, taken down to be called again alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class Recorded(TorchDispatchMode):
    """Takes down the calls of products and attention inside of the block, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS | ATTENTION:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
