"""Teams in step (`fxpar.ir.teams.in_step`): programs that differ, and meet in the collectives of their replicas.

Each is lowered as if all ranks ran it, so a collective over replicas is one of all ranks. That is right if all programs
make the same ones in the same order, and mean the same by them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpar.errors import TeamsGatherError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import ExecGraph, Program, collective_kind
from fxpar.ir.node_meta import comm_of
from fxpar.ir.serialize import target_name
from fxpar.ir.strategy import Strategy

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def in_step_programs(strategy: Strategy, teams: Sequence[Program]) -> list[Program]:
    """The programs of teams in step. The loss and metrics of an `ExecGraph` stay those of a replica: whose replicas
    stand where, only the sum over all teams knows.

    Raises TeamsGatherError for programs that do not meet in the same collectives, or whose parameters and gradients do
    not lie in one way.
    """
    for number, team in enumerate(teams):
        if isinstance(team, ExecGraph):
            _drop_reductions(team.epilogue.graph)
        own, first = strategy.of_team(number), strategy.of_team(0)
        met = _meetings(team, own)
        if any(not isinstance(size, int) for one in met for size in one.shape):
            raise TeamsGatherError(str(strategy), str(own), "sends tokens to other teams")
        if met != _meetings(teams[0], first):
            raise TeamsGatherError(str(strategy), str(own), f"gathers or reduces in another way than {str(first)!r}")
        pairs = zip(_stored(teams[0]), _stored(team), strict=True)
        other = next((one[0] for one, mine in pairs if one != mine), None)
        if other is not None:
            raise TeamsGatherError(str(strategy), str(own), f"has other pieces of {other!r} than {str(first)!r}")
    return list(teams)


def _drop_reductions(epilogue: fx.Graph) -> None:
    for node in list(epilogue.nodes):
        sums = collective_kind(node) == "all_reduce" and REPLICAS in comm_of(node)[0].split(".")
        if sums or (node.target is _WAIT and collective_kind(node.args[0]) is None):
            node.replace_all_uses_with(node.args[0])
            epilogue.erase_node(node)


@dataclass(frozen=True)
class _Meeting:
    """A collective with ranks of other teams: `of` are the parameters that a gather is of, or the results that come of
    a sum, as they lie in the buffer; `between` are the ops between those and the collective.
    """

    part: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    shape: tuple[Any, ...]
    of: tuple[str, ...]
    between: frozenset[str]


def _meetings(program: Program, own: Strategy) -> list[_Meeting]:
    """In the order of the program, which a team runs under `own`."""
    mine, crossing, flow = set(own.mesh.ranks), dict[str, tuple[tuple[int, ...], ...]](), _Flow(program)
    for axis in program.axes():
        groups = program.mesh.groups(tuple(axis.split(".")))
        if any(mine & set(group) and not mine.issuperset(group) for group in groups):
            crossing[axis] = tuple(groups)
    found = []
    for name, part in program.parts.items():
        for node in part.graph.nodes:
            kind = collective_kind(node)
            if kind is not None and comm_of(node)[0] in crossing:
                axis, sent = comm_of(node)
                ends = flow.before(node) if kind == "all_gather" else flow.behind(node)
                found.append(_Meeting(name, kind, crossing[axis], sent.dtype, tuple(sent.shape), *ends))
    return found


@dataclass(frozen=True)
class _Flow:
    """What comes from where in the parts of a program, as if they were one graph."""

    program: Program

    def before(self, node: fx.Node) -> tuple[tuple[str, ...], frozenset[str]]:
        """Inputs that a call is made of, in the order of operands, and the ops between."""
        return self._walk(node, lambda one: self._made_of.get(one) or one.all_input_nodes, self._inputs)

    def behind(self, node: fx.Node) -> tuple[tuple[str, ...], frozenset[str]]:
        """Results that are made of a call, in the order of its pieces, and the ops between."""

        def place(user: fx.Node) -> int:
            return user.args[1] if user.target is operator.getitem else -1  # type: ignore[return-value]

        return self._walk(node, lambda one: [*sorted(one.users, key=place), *self._readers[one]], self._results)

    def _walk(self, node: fx.Node, following: Any, names: Any) -> tuple[tuple[str, ...], frozenset[str]]:
        seen, left, ends, ops = {node}, [node], list[str](), set[str]()
        while left:
            one = left.pop()
            ends += names.get(one, ())
            if one is not node and one.op == "call_function":
                ops.add(target_name(one.target))
            others: Iterable[fx.Node] = following(one)
            left += [other for other in reversed(list(others)) if other not in seen]
            seen.update(others)
        return tuple(ends), frozenset(ops)

    @cached_property
    def _made_of(self) -> dict[fx.Node, list[fx.Node]]:
        """To a placeholder the result of an earlier part that it is."""
        parts, found = self.program.parts, {}
        for part in parts.values():
            for node, (where, index) in zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=True):
                if where != "input":
                    found[node] = [parts[where].results[index]]
        return found

    @cached_property
    def _readers(self) -> dict[fx.Node, list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for reader, (result,) in self._made_of.items():
            found[result].append(reader)
        return found

    @cached_property
    def _inputs(self) -> dict[fx.Node, list[str]]:
        found = {}
        for part in self.program.parts.values():
            for node, (where, index) in zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=True):
                if where == "input":
                    found[node] = [self.program.inputs[index].fqn]
        return found

    @cached_property
    def _results(self) -> dict[fx.Node, list[str]]:
        """Of the last part: those of a step, or the gradients of a forward."""
        last = list(self.program.parts.values())[-1].results
        found: dict[fx.Node, list[str]] = defaultdict(list)
        outputs = self.program.outputs
        if not isinstance(self.program, ExecGraph):
            outputs = tuple(out for out in outputs if out.kind in ("grad", "input_grad"))
        for node, out in zip(last, outputs, strict=True):
            found[node].append(f"{out.kind} {out.fqn}")
        return found


def _stored(program: Program) -> list[tuple[Any, ...]]:
    """By name which piece, and which term of a sum, each rank has of each parameter and gradient."""
    pairs = [*zip(program.inputs, program.stored_inputs, strict=True)]
    pairs += [*zip(program.outputs, program.stored_outputs, strict=True)]
    known: dict[Any, Any] = {}
    found = []
    for info, stored in pairs:
        if info.kind in ("param", "grad"):
            key = stored.dist, tuple(stored.meta.shape)
            if key not in known:
                known[key] = _pieces(stored.dist, tuple(int(size) for size in stored.meta.shape))
            found.append((info.fqn, info.kind, stored.meta.dtype, known[key]))
    return found


def _pieces(dist: DistConfig, shape: tuple[int, ...]) -> tuple[Any, ...]:
    terms = tuple(axis for axis, _ in dist.partial)
    return tuple(
        (
            [dist.intervals(rank, dim, size) for dim, size in enumerate(shape)],
            [dist.mesh.index(rank, axis) for axis in terms],
        )
        for rank in dist.mesh.ranks
    )
