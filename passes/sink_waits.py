"""Sink waits: a collective is waited for where its result is first used, not where it was started.

Before: each wait stands right behind its collective. After: right before its first user, so that independent work in
between runs while the network does (NCCL; gloo overlaps little).

    %c = all_reduce(%x, "sum", "@tp")           %c = all_reduce(%x, "sum", "@tp")
    %w = wait_tensor(%c)                        %m = mm(%a, %b)
    %m = mm(%a, %b)                             %w = wait_tensor(%c)
    %y = add(%w, %m)                            %y = add(%w, %m)

Cost: none; the result buffer of the collective is live as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier


@dataclass(frozen=True)
class SinkWaits:
    """No options."""

    name: ClassVar[str] = "sink_waits"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        wait = torch.ops._c10d_functional.wait_tensor.default
        for node in reversed(graph.graph.find_nodes(op="call_function", target=wait)):
            if node.users:
                min(node.users).prepend(node)
