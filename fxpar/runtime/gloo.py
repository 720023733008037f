"""The graph that a rank runs, with collectives as gloo carries them out best.

Gloo's reduce-scatter is an all-reduce of a copy of all rows, of which one is kept; its all-gather copies all that has
arrived once more. An all-to-all sends each byte once, straight from and into the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.ir.exec_graph import substitute_tokens
from fxpar.ir.node_meta import local_tensor
from fxpar.ops import layout
from fxpar.torch_api.groups import is_gloo

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def graph_of_rank(graph: fx.Graph, groups: Mapping[str, str], indices: Mapping[str, int]) -> fx.Graph:
    """A copy of a part's graph with this rank's process groups (name by token) and positions in their axes."""
    graph = substitute_tokens(graph, dict(groups), dict(indices))
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        if is_gloo(node.args[2]):
            _send_to_all(graph, node)
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        if is_gloo(node.args[3]) and node.args[1] == "sum":
            _sum_what_arrives(graph, node)
    return graph


def _send_to_all(graph: fx.Graph, gather: fx.Node) -> None:
    """all_gather([1, ...]) = all_to_all([K, ...]) of K times the same row."""
    row, degree, group = gather.args
    with graph.inserting_before(gather):
        rows = graph.call_function(layout.repeat, (row, degree))
    _exchange(gather, rows, degree, group)


def _sum_what_arrives(graph: fx.Graph, scatter: fx.Node) -> None:
    """reduce_scatter([K, ...]) = all_to_all, then the sum of its rows in the order of ranks."""
    rows, _, degree, group = scatter.args
    (wait,) = scatter.users
    _exchange(scatter, rows, degree, group)
    with graph.inserting_after(wait):
        total = graph.call_function(aten.sum.dim_IntList, (wait, [0], True), {"dtype": local_tensor(scatter).dtype})
    wait.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _exchange(node: fx.Node, rows: Any, degree: Any, group: Any) -> None:
    """Make `node` an all-to-all of one row per rank."""
    node.target, node.args = c10d.all_to_all_single.default, (rows, [1] * degree, [1] * degree, group)
