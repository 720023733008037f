"""Where to cut the forward into saved and recomputed values, as a linear program.

A value that the backward needs is saved or recomputed; recomputing it needs its operands in turn. With one variable per
recomputed node and one per saved storage all constraints are of the form `a + s >= b`: a closure problem, whose linear
program has whole solutions (its dual is a minimum cut; Picard, "Maximal closure of a graph and applications to
combinatorial problems", Management Science 1976). A budget on bytes is one row more and makes it a knapsack, solved by
branch and bound over the storages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.node_meta import is_size, phase_of
from fxpar.remat.forward import ForwardValues
from fxpar.remat.storages import Storages

if TYPE_CHECKING:  # loading scipy takes long, and most strategies recompute nothing
    from scipy.sparse import csr_matrix

# A limit on work, not on time: all ranks must find the same solution.
_LIMITS = {"mip_rel_gap": 2e-3, "node_limit": 500}


@dataclass(frozen=True)
class Cut:
    """`allowed`: nodes that may run again; `work`: seconds of each; `returned`: storages that live on as results."""

    values: ForwardValues
    storages: Storages
    allowed: frozenset[fx.Node]
    work: Mapping[fx.Node, float]
    returned: frozenset[int]


@dataclass(frozen=True)
class CutSolution:
    recomputed: frozenset[fx.Node]
    saved_bytes: int
    work: float


def least_bytes(cut: Cut) -> CutSolution:
    """Save as few bytes as possible; among such cuts, recompute as little as possible."""
    program = _Program(cut)
    work = program.work / (program.work.sum() or 1.0)  # less than one byte altogether
    return program.solve(np.concatenate([work, program.nbytes]), whole=False) or program.solution(frozenset())


def least_work(cut: Cut, budget_bytes: int, fallback: CutSolution) -> CutSolution:
    """Recompute as little as possible with at most `budget_bytes` saved; `fallback` is a solution that fits."""
    program = _Program(cut)
    none = program.solution(frozenset())
    if none.saved_bytes <= budget_bytes:
        return none
    nbytes = program.nbytes / (program.nbytes.sum() + 1.0)
    # Ties between cuts of equal work go to the one that saves less.
    weights = np.concatenate([program.work / (program.work.max(initial=0) or 1.0), nbytes * 1e-6])
    best = program.solve(weights, whole=True, budget_bytes=budget_bytes)
    return best if best is not None and best.saved_bytes <= budget_bytes else fallback


@dataclass
class _Rows:
    """Constraints `sum of coefficients * variables >= bound`, sparse."""

    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    bounds: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], bound: float) -> None:
        self.columns += [c for c, _ in terms]
        self.values += [v for _, v in terms]
        self.starts.append(len(self.columns))
        self.bounds.append(bound)

    def matrix(self, width: int) -> csr_matrix:
        from scipy.sparse import csr_matrix

        return csr_matrix((self.values, self.columns, self.starts), shape=(len(self.bounds), width))


class _Program:
    """Variables: one per relevant allowed node (1: it runs again), then one per storage (1: it is saved)."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.nodes = self._relevant()
        self.column = {node: i for i, node in enumerate(self.nodes)}
        self.storage_column: dict[int, int] = {}
        self.rows = _Rows()
        self._constrain()
        of = {column: storage for storage, column in self.storage_column.items()}
        self.free = cut.storages.borrowed | cut.storages.weights | cut.returned
        self.owned = [of[len(self.nodes) + i] for i in range(len(of))]
        self.nbytes = np.array([0 if s in self.free else cut.storages.nbytes[s] for s in self.owned], dtype=float)
        self.work = np.array([cut.work[n] for n in self.nodes], dtype=float)

    def _relevant(self) -> list[fx.Node]:
        """Allowed nodes on the way to what the backward needs, in order."""
        found: set[fx.Node] = set()
        todo = [n for n in self.cut.values.needed if n in self.cut.allowed]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += [o for o in node.all_input_nodes if o in self.cut.allowed]
        return [n for n in self.cut.values.nodes if n in found]

    def _constrain(self) -> None:
        for node in self.cut.values.nodes:
            if node in self.cut.values.needed:
                self._require(node, [], 1.0)
            if node in self.column:
                for operand in node.all_input_nodes:
                    if operand.op == "call_function" and not is_size(operand):
                        self._require(operand, [(self.column[node], -1.0)], 0.0)

    def _require(self, node: fx.Node, minus: list[tuple[int, float]], bound: float) -> None:
        """The value is there in the backward, if the nodes in `minus` run again (or in any case)."""
        values = self.cut.values
        if node in values.gathered or phase_of(node) != "body":
            return
        again = [(self.column[node], 1.0)] if node in self.column else []
        if again and (collective_kind(node) or isinstance(node.meta.get("local"), tuple)):
            self.rows.add([*again, *minus], bound)  # in flight, or several values: it is their parts that are saved
            return
        for storage in self.cut.storages.of[node]:
            column = self.storage_column.setdefault(storage, len(self.nodes) + len(self.storage_column))
            self.rows.add([*again, (column, 1.0), *minus], bound)

    def solution(self, recomputed: frozenset[fx.Node]) -> CutSolution:
        """What is saved, counted from the nodes and not from the program's variables."""
        saved: set[int] = set()
        seen: set[fx.Node] = set()
        todo = list(self.cut.values.needed)
        while todo:
            node = todo.pop()
            if node in seen or node.op != "call_function" or is_size(node) or node in self.cut.values.gathered:
                continue
            seen.add(node)
            if node in recomputed:
                todo += node.all_input_nodes
            else:
                saved.update(self.cut.storages.of[node])
        saved -= self.free
        again = frozenset(seen & recomputed)
        nbytes = sum(self.cut.storages.nbytes[s] for s in saved)
        return CutSolution(again, nbytes, sum(self.cut.work[n] for n in again))

    def solve(self, weights: np.ndarray, *, whole: bool, budget_bytes: int | None = None) -> CutSolution | None:
        width = len(self.nodes) + len(self.owned)
        if width == 0:
            return self.solution(frozenset())
        from scipy.optimize import Bounds, LinearConstraint, milp

        constraints = [LinearConstraint(self.rows.matrix(width), lb=np.array(self.rows.bounds))]
        if budget_bytes is not None:
            row = np.concatenate([np.zeros(len(self.nodes)), self.nbytes]) / max(1, budget_bytes)
            constraints.append(LinearConstraint(row[None, :], ub=1.0 - 1e-9))
        integral = np.concatenate([np.zeros(len(self.nodes)), np.full(len(self.owned), int(whole))])
        result = milp(weights, integrality=integral, bounds=Bounds(0, 1), constraints=constraints, options=_LIMITS)
        if result.x is None:
            return None
        again = result.x[: len(self.nodes)] > 0.5
        return self.solution(frozenset(n for n, r in zip(self.nodes, again, strict=True) if r))
