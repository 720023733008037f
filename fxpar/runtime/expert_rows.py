"""How many rows each expert, and each rank, has had in a mini-batch: from the counts that rows are sorted by. And how
far rows are from the means that `lsh` lets experts see, on a sixteenth of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar.ir.exec_graph import Program
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import counted_by, fqn_of, is_again, is_backward, local_tensor
from fxpar.ops.copies import within_capacity
from fxpar.runtime.report import ExpertLoad

_EVERY = 16  # so many tokens, one is looked at


@dataclass(frozen=True)
class _Layer:
    """Experts of a module, of all ranks: those of a rank begin at its place on `axis`; `alike` ranks count each row.
    `wanted`: the counts are those before a capacity leaves rows out.
    """

    module: str
    experts: int
    axis: str
    alike: int
    wanted: bool


def _layers(nodes: Iterable[fx.Node], mesh: Mesh) -> list[tuple[fx.Node, _Layer]]:
    """The counts of a forward, and of which experts; its backward, and what runs again in it, has the same. Where a
    module has sets of experts of several sizes, the largest has its name, and those of the others say how many.
    """
    found = []
    for node in nodes:
        axis, alike = counted_by(node)
        if alike and node.op == "call_function" and not is_backward(node) and not is_again(node):
            here: Any = local_tensor(node).shape[0]
            total, source = here * (mesh.degree(axis) if axis else 1), node.args[0]
            wanted = isinstance(source, fx.Node) and source.target is within_capacity
            found.append((node, _Layer(fqn_of(node), total, axis, alike, wanted)))
    most: dict[str, int] = {}
    for _, layer in found:
        most[layer.module] = max(layer.experts, most.get(layer.module, 0))
    return [(node, layer if layer.experts == most[layer.module] else _smaller(layer)) for node, layer in found]


def _smaller(layer: _Layer) -> _Layer:
    return replace(layer, module=f"{layer.module} ({layer.experts} experts)")


class ExpertRows:
    """The counts of one rank's micro-batches, added up on the device; nothing waits for them before `take`. What is
    `idle` is not counted.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.idle = mesh, rank, False
        self._watched: list[_Layer] = []
        self._counts: dict[int, Tensor] = {}
        self._compressed: list[str] = []  # modules
        self._apart: dict[int, Tensor] = {}  # sums of squares: of distances to means, and of rows

    def watch(self, graph: fx.Graph) -> None:
        """Hear of the counts of a part's graph whenever it is run."""
        for node, layer in _layers(graph.nodes, self.mesh):
            self._watched.append(layer)
            with graph.inserting_after(node):
                graph.call_function(self._add, (len(self._watched) - 1, node))
        for node in graph.find_nodes(op="call_function", target=torch.ops.fxpar.cluster_restore.default):
            if not is_again(node):
                self._compressed.append(fqn_of(node))
                with graph.inserting_before(node):  # which may be written into the memory of its rows
                    graph.call_function(self._measure, (len(self._compressed) - 1, *node.args[1:4]))

    def _add(self, number: int, counts: Tensor) -> None:
        if not self.idle:
            before = self._counts.get(number)
            self._counts[number] = counts if before is None else before + counts

    def _measure(self, number: int, x: Tensor, means: Tensor, cluster: Tensor) -> None:
        if not self.idle:
            rows, of = x[::_EVERY], cluster[::_EVERY]
            apart = rows - means.view(len(means), -1)[of]
            sums = torch.stack([apart.double().square().sum(), rows.double().square().sum()])
            before = self._apart.get(number)
            self._apart[number] = sums if before is None else before + sums

    def take(self) -> dict[str, Tensor]:
        """Of each module with experts [2 * E + 3]: what to add up over ranks for the rows of each expert, for those
        that each would have had without a capacity (the same if there is none), and for the squares of distances to
        means and of rows; and the rows that this rank has had. Counting begins anew.
        """
        found: dict[str, Tensor] = {}
        limited = {self._watched[number].module for number in self._counts if self._watched[number].wanted}
        for number, counts in self._counts.items():
            layer = self._watched[number]
            rows = counts.new_zeros(2 * layer.experts + 3, dtype=torch.float64)
            first = len(counts) * (self.mesh.index(self.rank, layer.axis) if layer.axis else 0)
            for half in (0, 1) if layer.module not in limited else (layer.wanted,):
                start = first + layer.experts * half
                rows[start : start + len(counts)] = counts / layer.alike
            rows[-1] = counts.sum() * (not layer.wanted)
            found[layer.module] = found[layer.module] + rows if layer.module in found else rows
        for number, sums in self._apart.items():
            if self._compressed[number] in found:
                found[self._compressed[number]][-3:-1] += sums
        self._counts.clear()
        self._apart.clear()
        return found


def expert_layers(programs: Iterable[Program]) -> dict[str, int]:
    """The modules with experts that programs have, and how many."""
    parts = [(placed.mesh, part) for program in programs for placed in program.placed for part in placed.parts.values()]
    found = (layer for mesh, part in parts for _, layer in _layers(part.graph.nodes, mesh))
    return {layer.module: layer.experts for layer in found}


def expert_loads(
    groups: Sequence[Mapping[str, Tensor]],
    layers: Mapping[str, int],
    rank: int,
    world: int,
    device: torch.device,
    process_group: Any,
) -> tuple[ExpertLoad, ...]:
    """What all ranks of the world have counted in the groups of a mini-batch (`ExpertRows.take` of each), in one
    exchange. `layers` as of `expert_layers`, the same on all ranks.
    """
    if not layers:
        return ()
    sizes = {name: 2 * experts + 2 + world for name, experts in layers.items()}
    sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}
    for found in groups:
        for name, rows in found.items():
            sums[name][: len(rows) - 1] += rows[:-1]
            sums[name][len(rows) - 1 + rank] += rows[-1]
    whole = torch.cat([*sums.values()])
    if world > 1:
        dist.all_reduce(whole, group=process_group)
    loads = []
    for (name, experts), part in zip(layers.items(), whole.split([*sizes.values()]), strict=True):
        rows, wanted, squares, ranks = part.tensor_split((experts, 2 * experts, 2 * experts + 2))
        left_out = bool((wanted > rows).any())
        if part.any():
            counts = (tuple(one.tolist()) for one in (rows, ranks, wanted[: left_out * experts]))
            apart, length = squares.tolist()
            loads.append(ExpertLoad(name, *counts, residual=math.sqrt(apart / length) if length else None))
    return tuple(loads)
