"""`cut_stages`: one logical graph of a model becomes one logical graph per pipeline stage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import NotAChainError
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import whole_meta
from fxpar.stages.backward import Backward
from fxpar.stages.build import Result, StageBuilder, crossings
from fxpar.stages.forward import choose_cuts, stages_of
from fxpar.stages.nodes import Nodes, producer
from fxpar.stages.staged import SharedParam, StagedGraph

_ADD = torch.ops.aten.add.Tensor


def cut_stages(logical: LogicalGraph, stages: int, *, cuts: Sequence[str] | None = None) -> StagedGraph:
    """Cut forward, loss and backward of one replica into `stages` consecutive stages.

    A new stage begins with each module of `cuts` (FQNs, in the order in which they run). By default the cuts are at
    repeated layers and balance the predicted times of the stages' forwards: what runs before the first layer counts to
    the first stage, head and loss to the last. `logical` is left alone.

    The stages run one after the other give the bits of `logical`. Cheap values made of batch tensors and buffers alone
    (masks, rotary tables, sizes) are computed by each stage that needs them; any other value that a later stage reads
    is sent, over the stages in between if it must be. Gradients cross where they are smallest.

    Raises StageCountError for more stages than layers, UnknownCutError, NotAChainError where a module would have to run
    on two stages or a value to go back.
    """
    started = time.process_time()
    nodes = Nodes(logical)
    found = choose_cuts(nodes, stages, cuts)
    stage_of = stages_of(nodes, found)
    holders = _holders(nodes, stage_of)
    _check_buffers(nodes, stage_of)
    gradients, dropped = _gradient_terms(nodes, holders)
    pinned = {producer(value): holders[fqn] for fqn, values in gradients.items() for value in values}
    backward = Backward(nodes, stage_of, holders, pinned, frozenset(dropped)).assign(stages)
    homes = {**stage_of, **backward}
    results, shared_terms = _results(nodes, homes, holders, gradients, found)
    boundaries = crossings(nodes, homes, results, stages)
    unread = [
        frozenset(i.fqn for n, i in nodes.inputs.items() if not n.users and holders.get(i.fqn) == (k,))
        for k in range(stages)
    ]
    made = tuple(StageBuilder(nodes, homes, boundaries, k, results[k], unread[k]).build() for k in range(stages))
    where: dict[str, list[int]] = defaultdict(list)
    for stage in made:
        for info in stage.params():
            where[info.fqn].append(stage.index)
    shared = tuple(SharedParam(fqn, tuple(on), shared_terms.get(fqn, ())) for fqn, on in where.items() if len(on) > 1)
    work = [0] * stages
    for node, stage in stage_of.items():
        work[stage] += nodes.flops(node)
    timings = {**logical.timings, "cut_cpu_s": time.process_time() - started}
    return StagedGraph(made, tuple(fqn for _, fqn in found), shared, tuple(work), logical.name, timings)


def _holders(nodes: Nodes, stage_of: Mapping[fx.Node, int]) -> dict[str, tuple[int, ...]]:
    """Stages whose forward reads each parameter; one that nothing reads goes with the parameter before it."""
    found: dict[str, tuple[int, ...]] = {}
    before = 0
    for node, info in nodes.inputs.items():
        if info.kind == "param":
            read = sorted({stage_of[user] for user in node.users if user in stage_of})
            found[info.fqn] = tuple(read) or (before,)
            before = found[info.fqn][0]
    return found


def _check_buffers(nodes: Nodes, stage_of: Mapping[fx.Node, int]) -> None:
    """A buffer that changes from micro-batch to micro-batch has one stage. Raises NotAChainError."""
    for node, info in nodes.inputs.items():
        if info.kind == "buffer" and info.fqn in nodes.written:
            stages = {stage_of[user] for user in (*node.users, nodes.written[info.fqn]) if user in stage_of}
            if len(stages) > 1:
                raise NotAChainError(
                    nodes.logical.name,
                    f"buffer {info.fqn!r}, which the forward writes, is used on stages {sorted(stages)}",
                    "Cut elsewhere, or make the buffer one that the forward only reads",
                )


def _gradient_terms(
    nodes: Nodes, holders: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, list[fx.Node]], set[fx.Node]]:
    """The values that add up to each gradient (one, unless several stages hold the parameter), and the additions that
    stages will do instead of the graph.
    """
    found: dict[str, list[fx.Node]] = {}
    dropped: set[fx.Node] = set()
    for node, out in zip(nodes.logical.results, nodes.logical.outputs, strict=True):
        if out.kind == "grad":
            found[out.fqn] = _terms(node) if len(holders[out.fqn]) > 1 else [node]
            dropped |= _sums(node, found[out.fqn])
    return found, dropped


def _results(
    nodes: Nodes,
    homes: Mapping[fx.Node, int],
    holders: Mapping[str, tuple[int, ...]],
    gradients: Mapping[str, list[fx.Node]],
    cuts: Sequence[tuple[int, str]],
) -> tuple[dict[int, list[Result]], dict[str, tuple[int, ...]]]:
    """Results of the model by the stage that makes them, and for gradients with several terms the stages of these."""
    found: dict[int, list[Result]] = defaultdict(list)
    shared: dict[str, tuple[int, ...]] = {}
    for node, out in zip(nodes.logical.results, nodes.logical.outputs, strict=True):
        if out.kind != "grad":
            last = len(cuts) if out.kind == "loss" else _by_position(nodes, homes, node)
            found[homes.get(node, last)].append((out, (node,)))
            continue
        by_stage: dict[int, list[fx.Node]] = {}
        for value in gradients[out.fqn]:
            by_stage.setdefault(_owner(homes.get(value, 0), holders[out.fqn]), []).append(value)
        for stage, values in by_stage.items():
            found[stage].append((out, tuple(values)))
        shared[out.fqn] = tuple(by_stage)
    return found, shared


def _owner(made: int, holders: tuple[int, ...]) -> int:
    """The stage that gives a gradient made on stage `made`: the nearest one from there on that has the parameter."""
    return max((stage for stage in holders if stage <= made), default=holders[0])


def _by_position(nodes: Nodes, homes: Mapping[fx.Node, int], node: fx.Node) -> int:
    """The stage during which a free node runs in the model."""
    earlier = [n for n in nodes.bound if nodes.position[n] < nodes.position.get(node, 0)]
    return homes[earlier[-1]] if earlier else 0


# Gradients of parameters that several stages hold: the sum that the graph makes of them, taken apart into terms.
def _terms(gradient: fx.Node) -> list[fx.Node]:
    """The summands of a gradient in the order in which they are added; the gradient itself if it is no plain sum.

    A sum is taken apart only where nothing else reads it, and only to the left, so that adding the terms up one by one
    gives the same bits.
    """
    found: list[fx.Node] = []
    node: Any = gradient
    while len(node.users) == 1 and node.target is _ADD and not node.kwargs:
        left, right = node.args
        if not (_same(node, left) and _same(node, right)):
            break
        first, second = (left, right) if _earlier(left, right) else (right, left)
        found.append(second)
        node = first
    return [node, *reversed(found)]


def _same(node: fx.Node, term: Any) -> bool:
    return isinstance(term, fx.Node) and whole_meta(term) == whole_meta(node)


def _earlier(left: fx.Node, right: fx.Node) -> bool:
    """Whether the left one is a sum, else whether it is computed first (a + b and b + a have the same bits)."""
    if (left.target is _ADD) != (right.target is _ADD):
        return left.target is _ADD
    return left < right


def _sums(gradient: fx.Node, leaves: list[fx.Node]) -> set[fx.Node]:
    """The additions between a gradient and its terms."""
    found: set[fx.Node] = set()
    todo = [gradient] if gradient not in leaves else []
    while todo:
        node = todo.pop()
        found.add(node)
        todo += [n for n in node.all_input_nodes if n not in leaves and n not in found]
    return found
