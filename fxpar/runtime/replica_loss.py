"""The loss of a group as each replica has found it: the step adds up those of all groups once.

A sum over replicas at the end of every group would let them wait for each other there, and take a process group of
replicas for each number of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.ir.axes import REPLICAS
from fxpar.ir.exec_graph import ExecGraph, collective_kind, restricted
from fxpar.ir.node_meta import comm_of
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def left_to_replicas(program: TrainGraph) -> TrainGraph:
    """The program, or its teams, with the loss and metrics of a replica where they are summed over replicas alone, one
    by one. Pipelines stay as they are.
    """
    if isinstance(program, TeamsGraph):
        teams: Any = program.teams
        return replace(program, teams=tuple(map(left_to_replicas, teams)))
    if not isinstance(program, ExecGraph) or is_of_replica(program):
        return program
    kinds = [out.kind for out in program.outputs if out.kind in ("loss", "grad", "buffer")]
    pairs = zip(program.epilogue.results, kinds, strict=True)
    results = [_before_sum(node) if kind == "loss" else node for node, kind in pairs]
    found = replace(program, epilogue=restricted(program.epilogue, results))
    return found if is_of_replica(found) else program


def is_of_replica(program: ExecGraph) -> bool:
    """Whether nothing of the loss and metrics is summed over replicas."""
    nodes = (node for node in program.loss.graph.nodes if collective_kind(node) is not None)
    return not any(REPLICAS in comm_of(node)[0].split(".") for node in nodes)


def _before_sum(node: fx.Node) -> fx.Node:
    total = node.args[0] if node.target is _WAIT else None
    if isinstance(total, fx.Node) and collective_kind(total) == "all_reduce" and comm_of(total)[0] == REPLICAS:
        term = total.args[0]
        assert isinstance(term, fx.Node)
        return term
    return node
