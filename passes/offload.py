"""Offload: what the forward saves for the backward waits in the memory of the host.

Before: every forward value that the backward reads stays on the device until then. After: it is copied to the host
behind its last reader in the forward, and fetched a block ahead of its first reader in the backward
(`fxpar.ir.pass_base.a_block_ahead`), as vDNN does (Rhu et al., arXiv 1602.08124, section 3). Views of
one storage move once, and are made again of what was fetched.

    %h = silu(%a)                               %h = silu(%a)
    %y = mm(%h, %w)                             %y = mm(%h, %w)
    ...                                         %host = to_host(%h)
                                                ...
    %dw = mm(%dy_t, %h)                         %h_back = from_host(%host)
                                                %dw = mm(%dy_t, %h_back)

What moves is whole storages that the forward itself makes and that nothing writes to: no parameter or what is made of
parameters alone, no input, no result. What a loss in the graph leaves for its own backward stays, as it would come back
at once; so do the smallest values, as each copy costs a start. Of a share those move that the forward makes first,
which wait longest. Saves: their bytes on the device, but for those of one block more that are there early. Costs: the
same bytes over the link to the host, both ways.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import sympy
import torch
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import AnnotatedGraph, TensorMeta, run_dims
from fxpar.ir.node_meta import is_backward, is_on_host, is_size, local_meta, phase_of, reader_of
from fxpar.ir.pass_base import Tier, a_block_ahead, begin_of_backward, forward_of
from fxpar.ir.serialize import OpOverload
from fxpar.ir.strategy import Strategy
from fxpar.remat import Storages, trace_storages
from fxpar.torch_api.schemas import writes

own = torch.ops.fxpar
_SMALL = 0.01  # of all bytes that may go: what the smallest values may be together, which stay
_KEPT = ("tensor", "local", "dist", "source", "phase")  # of a value, by what is copied from it


@dataclass(frozen=True)
class Offload:
    """Reads the share from the strategy and its rules, in bytes with the dynamic dims at `sizes` by name; the sizes of
    the captured example where they are not given.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "offload"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        turns = begin_of_backward(graph.graph.nodes)
        if graph.strategy.most("offload") and turns is not None:
            movable = _movable(graph, run_dims(graph, dict(self.sizes)), turns)
            groups = _by_block(movable)
            if any(out.kind == "loss" for out in graph.outputs):
                groups = groups[1:]
            moved = _shares(_large(itertools.chain.from_iterable(groups)), graph.strategy)
            _fetch(graph.graph, moved, {saved: _send(graph.graph, saved) for saved in moved}, turns)


@dataclass(eq=False)
class _Saved:
    """A storage that goes: `value` is all of it, `last` its last reader in the forward, `reads` are the calls of the
    backward that read it, in order, with what they read: the value or views of it.
    """

    value: fx.Node
    nbytes: int
    last: fx.Node
    reads: list[tuple[fx.Node, fx.Node]]

    @property
    def first(self) -> fx.Node:
        return self.reads[0][0]


@dataclass
class _Uses:
    """Of one storage: what lies in it, and who takes that, both in order."""

    members: list[fx.Node] = field(default_factory=list)
    takers: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def _movable(graph: AnnotatedGraph, dims: Mapping[sympy.Symbol, int], turns: fx.Node) -> list[_Saved]:
    """All that may go."""
    storages = trace_storages(graph.graph, dims)
    early = forward_of(graph)
    early |= {n for n in graph.graph.nodes if n.target is operator.getitem and n.args[0] in early}
    stay = storages.borrowed | storages.weights | {s for node in graph.results for s in storages.of.get(node, ())}
    uses: dict[int, _Uses] = defaultdict(_Uses)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        for storage in storages.of[node]:
            uses[storage].members.append(node)
        for operand in node.all_input_nodes:
            for storage in storages.of[operand]:
                uses[storage].takers.append((node, operand))
    found = (_saved(s, used, storages, early, dims, turns) for s, used in uses.items() if s not in stay)
    return list(filter(None, found))


def _saved(
    storage: int,
    used: _Uses,
    storages: Storages,
    early: set[fx.Node],
    dims: Mapping[sympy.Symbol, int],
    turns: fx.Node,
) -> _Saved | None:
    """One storage, if the backward reads it and nothing speaks against moving it."""
    value = next((node for node in used.members if _is_whole(node, storage, storages, dims)), None)
    reads = [(node, operand) for node, operand in used.takers if operand in early and node not in early]
    if value is None or value not in early or is_on_host(value) or not reads:
        return None
    # A collective reads its operand until it is waited for.
    before = [value, *(node for node, _ in used.takers if node in early)]
    before += [wait for node in before if collective_kind(node) for wait in node.users]
    last = max(before)
    lasting = all(phase_of(node) == "body" and not writes(node) for node, _ in used.takers)
    behind = last < turns and all(is_backward(node) for node, _ in reads)
    made_again = all(_is_view_of(operand, value, storage, storages) for _, operand in reads)
    if not (lasting and behind and made_again):
        return None
    return _Saved(value, storages.nbytes[storage], last, reads)


def _is_whole(node: fx.Node, storage: int, storages: Storages, dims: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a node's value is one tensor that is there (no collective under way) and fills the storage."""
    meta = local_meta(node)
    if storages.of[node] != (storage,) or not isinstance(meta, TensorMeta) or collective_kind(node):
        return False
    return meta.numel(dims) * meta.dtype.itemsize == storages.nbytes[storage]


def _is_view_of(node: fx.Node, value: fx.Node, storage: int, storages: Storages) -> bool:
    """Whether a node can be made again of the value and of sizes, by views alone."""
    while node is not value:
        operands = [operand for operand in node.all_input_nodes if not is_size(operand)]
        if len(operands) != 1 or storages.of[operands[0]] != (storage,) or collective_kind(node):
            return False
        (node,) = operands
    return True


def _by_block(movable: Iterable[_Saved]) -> list[list[_Saved]]:
    """What each block of the backward reads first, in the order of that."""
    in_order = sorted(movable, key=lambda saved: saved.first)
    return [list(group) for _, group in itertools.groupby(in_order, key=lambda saved: _block_of(saved.first))]


def _large(movable: Iterable[_Saved]) -> list[_Saved]:
    """Without the smallest ones, in the order in which the forward makes them."""
    by_size = sorted(movable, key=lambda saved: saved.nbytes)
    together = list(itertools.accumulate(saved.nbytes for saved in by_size))
    found = (saved for saved, nbytes in zip(by_size, together, strict=True) if nbytes > _SMALL * together[-1])
    return sorted(found, key=lambda saved: saved.value)


def _shares(movable: list[_Saved], strategy: Strategy) -> list[_Saved]:
    """Of what each rule governs (and the strategy itself) at least the share that it says, the earliest first."""
    governed: dict[int | None, list[_Saved]] = defaultdict(list)
    for saved in movable:
        governed[strategy.rule_of(reader_of(saved.value), "offload")].append(saved)
    found: list[_Saved] = []
    for rule, here in governed.items():
        wanted, moved = strategy.share_of("offload", rule) * sum(saved.nbytes for saved in here), 0
        for saved in here:
            if moved < wanted:
                moved += saved.nbytes
                found.append(saved)
    return found


def _send(graph: fx.Graph, saved: _Saved) -> fx.Node:
    """The copy on the host, behind the last reader of the forward."""
    with graph.inserting_after(saved.last):
        return _copy(graph, own.to_host.default, saved.value, saved, {"backward": False, "host": True})


def _fetch(graph: fx.Graph, moved: Iterable[_Saved], hosts: Mapping[_Saved, fx.Node], turns: fx.Node) -> None:
    """Let the backward read what comes from the host: all that a block reads first starts to come a block ahead."""
    before: fx.Node | None = None
    for together in _by_block(moved):
        place = a_block_ahead(before, turns)
        for saved in together:
            with graph.inserting_before(place):
                meta = {"backward": True, "again": True}
                fetched = _copy(graph, own.from_host.default, hosts[saved], saved, meta)
            _read(graph, saved, fetched)
        before = together[0].first


def _block_of(node: fx.Node) -> str:
    """The repeated block that a node is computed for; outside of blocks the module."""
    return block_of(reader_of(node)) or reader_of(node)


def _copy(graph: fx.Graph, target: OpOverload, operand: fx.Node, saved: _Saved, meta: dict[str, bool]) -> fx.Node:
    node = graph.call_function(target, (operand,))
    node.meta = {key: saved.value.meta[key] for key in _KEPT if key in saved.value.meta}
    node.meta |= {"fqn": reader_of(saved.value), **meta}
    if "dist" in node.meta:
        node.meta["dist_in"] = (node.meta["dist"],)
    return node


def _read(graph: fx.Graph, saved: _Saved, fetched: fx.Node) -> None:
    """Put what was fetched, and views that are made again of it, in the place of what was saved."""
    again = {saved.value: fetched}

    def remake(view: fx.Node) -> fx.Node:
        if view not in again:
            operand = next(node for node in view.all_input_nodes if not is_size(node))
            made = {operand: remake(operand)}
            again[view] = graph.node_copy(view, lambda node: made.get(node, node))
            again[view].meta = {**view.meta, "backward": True}
        return again[view]

    for reader, operand in saved.reads:
        with graph.inserting_before(reader):
            reader.replace_input_with(operand, remake(operand))
