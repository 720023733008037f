"""Torch's attention over packed documents. Apart from the other kernels: it loads Dynamo, a second of CPU time."""

from __future__ import annotations

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn

varlen_attention = torch.ops.torch_attn._varlen_attn
