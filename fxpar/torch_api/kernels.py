"""Operators of torch with a leading underscore that fxpar calls or makes nodes of, under names of their own.

Names that only stand in tables of ATen ops (sharding rules, costs) are read from captured graphs and stay there.
"""

from __future__ import annotations

import torch

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_attention_cuda = torch.ops.aten._flash_attention_forward.default
flash_attention_cuda_backward = torch.ops.aten._flash_attention_backward.default
efficient_attention = torch.ops.aten._efficient_attention_forward.default
efficient_attention_backward = torch.ops.aten._efficient_attention_backward.default
to_copy = torch.ops.aten._to_copy.default
