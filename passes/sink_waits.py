"""Sink waits: a collective is waited for where its result is first used, not where it was started.

Before: each wait stands right behind its collective. After: right before its first user, so that independent work in
between runs while the network does (NCCL; gloo overlaps little). What unpacks a result goes with its wait.

    %c = all_reduce(%x, "sum", "@tp")           %c = all_reduce(%x, "sum", "@tp")
    %w = wait_tensor(%c)                        %m = mm(%a, %b)
    %m = mm(%a, %b)                             %w = wait_tensor(%c)
    %y = add(%w, %m)                            %y = add(%w, %m)

Cost: none; the result buffer of the collective is live as before.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.ops import layout
from fxpar.ops.traits import is_view


@dataclass(frozen=True)
class SinkWaits:
    """No options."""

    name: ClassVar[str] = "sink_waits"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        wait = torch.ops._c10d_functional.wait_tensor.default
        sinking = dict.fromkeys(graph.graph.find_nodes(op="call_function", target=wait))
        todo = list(sinking)
        while todo:
            for user in todo.pop().users:
                if user not in sinking and (user.target in _UNPACKS or is_view(user.target)):
                    sinking[user] = None
                    todo.append(user)
        front: dict[fx.Node, fx.Node] = {}  # of what stands in front of a node already, the next towards the front
        for node in sorted(sinking, reverse=True):
            place = min(node.users, default=None)
            while place in front:
                place = front[place]
            if place is not None:
                place.prepend(node)
                front[place] = node


_UNPACKS = {layout.unpack, layout.lower, layout.unfuse, operator.getitem}
