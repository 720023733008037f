"""What one run of a user's code computes from data, so that a second run can be compared with the first: a cache is
found there and changes nothing, state does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.torch_api.tracing import constants_of_trace, node_of
from fxpar.tracer.counts import SHAPED

_DATA = ("param", "batch")  # a buffer, such as the frequencies of positions, may be what a cache is made of


@dataclass(frozen=True)
class Computed:
    """The ops on values that come from parameters or the batch, with their other arguments; by id, which tensors of
    before the run the ops `read`, and which of the tensors that code keeps come `of_data`.
    """

    ops: tuple[str, ...]
    read: frozenset[int]
    of_data: frozenset[int]

    @classmethod
    def now(cls, graph: fx.Graph, kept: Iterable[Tensor]) -> Computed:
        """Of a trace that is running."""
        data: set[fx.Node] = set()
        ops = []
        for node in graph.nodes:
            if node.op == "placeholder":
                if node.meta.get("kind") in _DATA:
                    data.add(node)
            elif _is_of_data(node, data):
                data.add(node)
                ops.append(f"{node.target} {_in_words((node.args, node.kwargs), data)}")
        read = frozenset(map(id, constants_of_trace().values()))
        return cls(tuple(ops), read, frozenset(id(value) for value in kept if node_of(value) in data))


def _in_words(arguments: Any, data: set[fx.Node]) -> Any:
    operands = {True: "data", False: "constant"}
    return fx.node.map_arg(arguments, lambda node: operands[node in data])


def _is_of_data(node: fx.Node, data: set[fx.Node]) -> bool:
    """Whether its numbers come from data: sizes do not, nor does what has only the shape of data."""
    value: Any = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or node.target in SHAPED:
        return False
    return any(source in data for source in node.all_input_nodes)
