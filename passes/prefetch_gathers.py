"""Prefetch gathers: the parameters of a block are gathered while the block before computes (ZeRO-3).

Before: each gather stands right in front of the first use of what it gathers. After: those of a block start where the
first one of the block before is waited for, so that the network brings the parameters of one block while the device
computes with those of another, as FSDP's prefetch does (Zhao et al., "PyTorch FSDP", section 3.3.2). The first gathers
of the backward start with the backward.

    %g0 = all_gather(%a, "@dp")                 %g0 = all_gather(%a, "@dp")
    %w0 = wait_tensor(%g0)                      %g1 = all_gather(%b, "@dp")
    %x  = mm(%x0, %w0)                          %w0 = wait_tensor(%g0)
    %g1 = all_gather(%b, "@dp")                 %x  = mm(%x0, %w0)
    %w1 = wait_tensor(%g1)                      %w1 = wait_tensor(%g1)

Cost: the same bytes; the gathered parameters of one more block are there at the same time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import is_backward, phase_of
from fxpar.ir.pass_base import Tier, a_block_ahead, ancestors, begin_of_backward

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass(frozen=True)
class PrefetchGathers:
    """No options."""

    name: ClassVar[str] = "prefetch_gathers"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        params = {node for node, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"}
        body = [n for n in graph.graph.nodes if n.op == "call_function" and phase_of(n) == "body"]
        turns = begin_of_backward(body)
        before: fx.Node | None = None
        gathers = [node for node in body if node.target is _GATHER and "bucket" in node.meta]
        for _, found in itertools.groupby(gathers, key=lambda node: node.meta["bucket"]):
            block = list(found)
            for gather in block if before is not None else ():
                _start_before(a_block_ahead(before, turns if is_backward(gather) else None), gather, params)
            before = min(next(iter(gather.users)) for gather in block)


def _start_before(place: fx.Node, gather: fx.Node, params: set[fx.Node]) -> None:
    """Move a gather, and what makes its operand of parameters, in front of `place`; if it is made of nothing else."""
    made = ancestors([gather])
    if any(node.op == "placeholder" and node not in params for node in made):
        return
    for node in sorted(node for node in made if node.op == "call_function" and place < node):
        place.prepend(node)
