"""Before the graph of a file is run: do the batches fit it, would it fill the memory of this machine, and are labels
looked at?
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpar.errors import GraphFileError
from fxpar.ir.columns import human_bytes
from fxpar.ir.exec_graph import Part, Program
from fxpar.ir.graph import LogicalGraph, run_dims
from fxpar.ir.node_meta import tensor_of
from fxpar.remat import run_on_meta, tensors_of

aten = torch.ops.aten
# Every rank of a program is a thread of this process.
MOST_RANKS = 256
_LARGEST_INT = 2**63


def check_batches(path: str, logical: LogicalGraph, batches: Sequence[Mapping[str, Tensor]]) -> dict[sympy.Symbol, int]:
    """The largest size of each dynamic dim. Raises GraphFileError for batches that are not of the graph."""
    largest = {dim.symbol: 1 for dim in logical.dims}
    for batch in batches:
        sizes: dict[Any, int] = {}
        for info in logical.inputs:
            if info.kind != "batch":
                continue
            found = batch.get(info.fqn)
            if found is None or found.dtype != info.meta.dtype or found.dim() != len(info.meta.shape):
                raise GraphFileError(path, f"its batches do not fit {info.fqn!r} of its graph", _AGAIN)
            for stated, size in zip(info.meta.shape, found.shape, strict=True):
                if sizes.setdefault(stated, size) != size or (isinstance(stated, int) and stated != size):
                    raise GraphFileError(path, f"its batches do not fit {info.fqn!r} of its graph", _AGAIN)
        for dim in logical.dims:
            size = sizes.get(dim.symbol, dim.example)
            if size > (dim.maximum or size) or size < dim.minimum:
                raise GraphFileError(path, f"a batch has {dim.name}={size}, which its graph does not allow", _AGAIN)
            largest[dim.symbol] = max(largest[dim.symbol], size)
    if not batches:
        raise GraphFileError(path, "it holds no batches to check with", _AGAIN)
    return largest


def rehearse(path: str, graph: LogicalGraph | Program, dims: Mapping[sympy.Symbol, int]) -> None:
    """Run a graph without its data. Raises GraphFileError where memory would not do, or where torch refuses."""
    if isinstance(graph, LogicalGraph):
        ranks, programs = 1, ({"": Part(graph.gm.graph, ())},)
    else:
        ranks, programs = graph.strategy.world, tuple(placed.parts for placed in graph.placed)
        dims = run_dims(graph, {symbol.name: size for symbol, size in dims.items()})
    if ranks > MOST_RANKS:
        raise GraphFileError(path, f"its {ranks:,} ranks are more than the {MOST_RANKS} that are run here", _AGAIN)
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    for parts in programs:
        results: dict[str, list[Any]] = {}
        for name, part in parts.items():
            places = zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=False)
            made = {node: results[other][i] for node, (other, i) in places if other in results}
            numbers = {node: value for node, value in made.items() if isinstance(value, int)}
            results[name] = _rehearse(path, part.graph, dims, limit, numbers)


_AGAIN = "Write it again with: fxpar dump MODEL -o FILE.fxpar"


def _rehearse(
    path: str, graph: fx.Graph, dims: Mapping[sympy.Symbol, int], limit: int, numbers: Mapping[fx.Node, int]
) -> list[Any]:
    """Adds up what is alive, node by node. Returns the results that are numbers, at their places."""
    found = dict(numbers)
    last = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
    held: dict[fx.Node, list[Any]] = {}
    users: Counter[int] = Counter()
    alive = 0
    for node, value in run_on_meta(graph, dims, numbers):
        if isinstance(value, int):
            found[node] = value
        held[node] = list({id(s): s for s in (t.untyped_storage() for t in tensors_of(value))}.values())
        for storage in held[node]:
            alive += storage.nbytes() if not users[id(storage)] else 0
            users[id(storage)] += 1
        too_large = isinstance(value, int) and abs(value) > _LARGEST_INT
        if alive > limit or too_large:
            what = "a number of more than 64 bits" if too_large else f"{human_bytes(alive)} at once on a rank"
            raise GraphFileError(path, f"%{node.name} of its graph needs {what}", "This machine has not got that")
        for operand in {node, *node.all_input_nodes}:
            if last.get(operand, node) is node:
                for storage in held.pop(operand, ()):
                    users[id(storage)] -= 1
                    alive -= storage.nbytes() if not users[id(storage)] else 0
    (output,) = graph.find_nodes(op="output")
    return [found.get(node) for node in output.args[0]]


def look_at_labels(path: str, graph: LogicalGraph | Program) -> None:
    """See that labels are looked at before the gradient of a label loss takes each for a place in memory: the loss does
    that, the gradient does not. A program may have the loss elsewhere, and gets a gradient that looks for itself.
    Raises GraphFileError for a logical graph whose gradient is of other labels than its loss.
    """
    if not isinstance(graph, LogicalGraph):
        parts = [part for placed in graph.placed for part in placed.parts.values()]
        for node in (node for part in parts for node in part.graph.nodes if node.target is _UNSEEING):
            node.target = nll_loss_backward
        return
    seen = set[tuple[Any, Any]]()
    for node in graph.gm.graph.nodes:
        if node.target is aten.nll_loss_forward.default:
            seen.add((node.args[1], tensor_of(node.args[0]).shape))
        elif node.target is _UNSEEING and (node.args[2], tensor_of(node.args[1]).shape) not in seen:
            raise GraphFileError(path, f"%{node.name} of its graph is not the gradient of a loss before it", _AGAIN)


_UNSEEING = aten.nll_loss_backward.default


def nll_loss_backward(
    grad: Tensor,
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """`aten.nll_loss_backward` with a look at `labels` [N] of `scores` [N, C]. Raises IndexError."""
    wrong = (labels != ignored) & ((labels < 0) | (labels >= scores.shape[-1]))
    if bool(wrong.any()):
        raise IndexError(f"label {int(labels[wrong].reshape(-1)[0])} is none of {scores.shape[-1]} classes")
    return _UNSEEING(grad, scores, labels, weight, reduction, ignored, total_weight)
