"""MetaOps of several tasks from their captured graphs (Spindle, arXiv 2409.03365, section 3.1): chains of equal layers,
edges between them, and which of them have the same weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import fx

from fxpar.cost.ops import SizesAt
from fxpar.errors import TaskGraphError
from fxpar.ir.fqn import common_module
from fxpar.ir.graph import LogicalGraph, run_dims
from fxpar.ir.node_meta import is_backward, tensor_metas
from fxpar.ops.traits import is_view
from fxpar.stages.nodes import producer
from fxpar.tasks.layers import Forward
from fxpar.tasks.parts import Part, modules_of, parts_of
from fxpar.waves.chains import Chain

SUM_BYTES = 4  # that a gradient adds up in: fp32


@dataclass(frozen=True)
class TaskStep:
    """What one task does in a step: `batches` mini-batches like the example of its captured graph, which are sequences
    where that is one row of tokens. `tokens` of the largest micro-batch, whose memory counts (0: those of the example).
    """

    logical: LogicalGraph
    batches: int = 1
    tokens: int = 0

    @cached_property
    def forward(self) -> Forward:
        return Forward.of(self.logical)


@dataclass
class Contracted:
    """A MetaOp before it has times: `part` of `task`, as `chain` says it to others; bytes as MetaOp has them."""

    task: str
    part: Part
    chain: Chain
    reads: tuple[int, ...]  # places of those that it reads from
    params: tuple[frozenset[str], ...]  # by layer
    output_bytes: float
    state_bytes: float
    saved_bytes: float
    gradient_bytes: float
    weights: str = ""

    @property
    def layers(self) -> int:
        return max(1, len(self.part.layers))


def contract(tasks: Mapping[str, TaskStep]) -> list[Contracted]:
    """The MetaOps of all tasks, each behind those that it reads from.

    Chains are cut where the set of tasks (and of chains of one task) that have a layer's parameters changes, so that
    two MetaOps have all weights in common, or none; those in common count with the larger of their states. Raises
    TaskGraphError for a task that computes nothing.
    """
    found: list[Contracted] = []
    for name, step in tasks.items():
        found += _of_task(name, step, len(found))
    found = _cut_apart(found, tasks)
    _share(found)
    return _named(found)


def _of_task(task: str, step: TaskStep, first: int) -> Iterator[Contracted]:
    parts, edges = parts_of(step.forward)
    if not parts:
        raise TaskGraphError(f"task {task!r}", "its loss computes nothing", "Give it a loss that reads the model")
    for i, part in enumerate(parts):
        reads = tuple(sorted(first + a for a, b in edges if b == i))
        yield _contracted(task, step, part, reads)


def _contracted(task: str, step: TaskStep, part: Part, reads: tuple[int, ...]) -> Contracted:
    forward = step.forward
    layers, (before, behind) = part.layers, (modules_of(calls, part.layers) for calls in (part.before, part.behind))
    params = tuple(frozenset(forward.params(layer)) for layer in layers)
    if not layers:  # all of it is one layer
        layers, before = (before,), ()
        params = (frozenset(forward.read_by(part.before)),)
    sizes = SizesAt(run_dims(step.logical))
    metas = {info.fqn: info.meta for info in step.logical.inputs if info.kind == "param"}
    mine = [metas[fqn] for fqn in forward.read_by(part.all_calls)]
    return Contracted(
        task,
        part,
        Chain("", task, layers, before, behind),
        reads,
        params,
        output_bytes=step.batches * _handed_on(forward, part, sizes),
        state_bytes=sum((SUM_BYTES + one.dtype.itemsize) * one.numel({}) for one in mine) / len(layers),
        saved_bytes=step.batches * _saved(part, sizes) / len(layers),
        gradient_bytes=sum(SUM_BYTES * one.numel({}) for one in mine) / len(layers),
    )


def _handed_on(forward: Forward, part: Part, sizes: SizesAt) -> int:
    """Bytes of what the second layer reads of the first; of a part of one layer, what others read of it."""
    inside = {node for node in part.all_calls}
    readers = set(forward.calls) - inside
    if len(part.layers) > 1:
        inside, readers = ({n for module in layer for n in forward.by_module[module]} for layer in part.layers[:2])
    sent = {producer(n): n for n in inside if any(user in readers for user in n.users)}
    return sum(_nbytes(node, sizes) for node in sent.values())


def _saved(part: Part, sizes: SizesAt) -> int:
    """Bytes of the results of a part that the backward reads; a view is what it is a view of."""
    mine = set(part.all_calls)
    kept: dict[fx.Node, int] = {}
    for node in part.all_calls:
        if any(is_backward(user) for user in node.users):
            whole = node
            while is_view(whole.target) and whole.all_input_nodes and whole.all_input_nodes[0] in mine:
                whole = whole.all_input_nodes[0]
            kept[whole] = max(kept.get(whole, 0), _nbytes(node, sizes))
    return sum(kept.values())


def _nbytes(node: fx.Node, sizes: SizesAt) -> int:
    return sum(math.prod(sizes(meta)) * meta.dtype.itemsize for meta in tensor_metas(node) if meta is not None)


def _cut_apart(found: Sequence[Contracted], tasks: Mapping[str, TaskStep]) -> list[Contracted]:
    """With chains cut wherever one layer has its parameters in common with other chains than the next one has."""
    users: dict[frozenset[str], frozenset[int]] = {}
    for place, one in enumerate(found):
        for layer in one.params:
            users[layer] = users.get(layer, frozenset()) | {place}
    cut: list[Contracted] = []
    ends: dict[int, int] = {}  # by place before, the place of its last piece
    for place, one in enumerate(found):
        edges = [i for i, (a, b) in enumerate(pairwise(one.params), 1) if users[a] != users[b]]
        reads = tuple(ends[source] for source in one.reads)
        for first, last in pairwise([0, *edges, len(one.params)]):
            cut.append(_piece(one, tasks[one.task], first, last, reads) if edges else replace(one, reads=reads))
            reads = (len(cut) - 1,)
        ends[place] = len(cut) - 1
    return cut


def _piece(whole: Contracted, step: TaskStep, first: int, last: int, reads: tuple[int, ...]) -> Contracted:
    layers = whole.part.layers[first:last]
    calls = [node for layer in layers for module in layer for node in step.forward.by_module[module]]
    at_start, at_end = first == 0, last == len(whole.part.layers)
    part = Part(layers, calls, whole.part.before if at_start else [], whole.part.behind if at_end else [])
    return replace(_contracted(whole.task, step, part, reads), output_bytes=whole.output_bytes)


def _share(found: Sequence[Contracted]) -> None:
    """Give those with the same parameters, layer by layer, one name, and the largest of their states."""
    alike: dict[tuple[frozenset[str], ...], list[Contracted]] = {}
    for one in found:
        if all(one.params):
            alike.setdefault(one.params, []).append(one)
    for members in alike.values():
        state, gradient = (max(getattr(one, key) for one in members) for key in ("state_bytes", "gradient_bytes"))
        for one in members:
            one.weights, one.state_bytes, one.gradient_bytes = _module(one.chain), state, gradient
    names = Counter(one.weights for one in found if one.weights)
    for params, members in alike.items():
        if names[members[0].weights] > len(members):  # another cut of the same list
            for one in members:
                one.weights = min(params[0])


def _named(found: Sequence[Contracted]) -> list[Contracted]:
    """Each with a name of its own: its task and the module that it is in."""
    names: Counter[str] = Counter()
    named = []
    for one in found:
        name = f"{one.task}.{_module(one.chain) or 'loss'}"
        names[name] += 1
        name += f" ({names[name]})" if names[name] > 1 else ""
        named.append(replace(one, chain=replace(one.chain, metaop=name)))
    return named


def _module(chain: Chain) -> str:
    """The innermost module that all layers are in; of a single one itself."""
    modules = [module for layer in chain.layers for module in layer if module]
    return modules[0] if len(modules) == 1 else common_module(modules)
