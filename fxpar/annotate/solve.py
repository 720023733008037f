"""Choose one option per class at the least communication: a small 0/1 program, solved by HiGHS (scipy).

Variables: x[c, o], class c takes option o; z[v, p, q] >= 0, result v is made as placement p and also wanted as q. A
reshard is paid once per (result, wanted placement) however many users want it, as the lowered graph shares it. For
every user of v that may want q:  sum of its x wanting q <= sum over p of z[v, p, q];  and z[v, p, q] <= the x making p.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.annotate.contract import Alias, Result, expand, find_aliases, resolve_want
from fxpar.annotate.cost import LAUNCH_BYTES, Cost, reshard_bytes
from fxpar.annotate.problem import RECEIVED, AxisPolicy, AxisProblem, OpClass
from fxpar.errors import PlacementError
from fxpar.ir.dist_config import OuterShard, Placement, Shard
from fxpar.ir.node_meta import input_kind, tensor_metas
from fxpar.rules.option import Option

FORCED = 1000.0
_INFEASIBLE = 2  # a status of scipy's
NodeCost = Callable[[OpClass, Option], float]
Want = dict[Placement, list[int]]  # placement -> columns of one user that want it


@dataclass(frozen=True)
class Demand:
    """A graph result: `value` is wanted in one of `options`, each at a cost; tied to a class's own option.

    `options[i]` is only legal where class `tie` is placed as `ties[i]`.
    """

    value: Result
    options: tuple[Placement, ...]
    costs: tuple[float, ...]
    tie: int | None = None
    ties: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class AxisSolution:
    """The option of every class, and what they cost together."""

    options: dict[int, Option]
    cost: Cost


@functools.lru_cache(256)
def _solved(costs: bytes, low: bytes, integral: bytes, rows: tuple[bytes, ...]) -> tuple[np.ndarray | None, str]:
    """What HiGHS finds for a program, and what it says if that is nothing; None with "" if the rows do not allow it.

    Strategies with the same degree of an axis ask the same program, and solving takes most of a small search.
    """
    from scipy import sparse  # takes half a second, which reading a placed graph need not wait for
    from scipy.optimize import Bounds, LinearConstraint, milp

    cost, least = np.frombuffer(costs), np.frombuffer(low)
    data, columns, starts, low_rows, high_rows = (
        np.frombuffer(each, kind) for each, kind in zip(rows, (float, np.int32, np.int32, float, float), strict=True)
    )
    matrix = sparse.csr_matrix((data, columns, starts), shape=(len(low_rows), len(cost)), copy=True)
    matrix.sort_indices()
    result = milp(
        cost,
        integrality=np.frombuffer(integral, np.int8),
        bounds=Bounds(least, 1),
        constraints=LinearConstraint(matrix, low_rows, high_rows),
        options={"mip_rel_gap": 1e-9, "time_limit": 60.0},
    )
    if result.status == _INFEASIBLE:
        return None, ""
    if result.x is None:
        return None, result.message
    found = np.round(result.x)
    found.setflags(write=False)
    return found, ""


class _Program:
    """Rows and columns of the 0/1 program as they are found. `all_whole`: what needs not be told that it is 0 or 1 is
    told so too.
    """

    def __init__(self, all_whole: bool) -> None:
        self.all_whole = all_whole
        self.moved: list[float] = []
        self.penalty: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def column(self, moved: float, penalty: float, integral: bool) -> int:
        self.moved.append(moved)
        self.penalty.append(penalty)
        self.integral.append(int(integral or self.all_whole))
        return len(self.moved) - 1

    def row(self, entries: dict[int, float], low: float, high: float) -> None:
        self.rows.append((entries, low, high))

    def one_of(self, columns: list[int]) -> None:
        self.row(dict.fromkeys(columns, 1.0), 1, 1)

    @functools.cached_property
    def _packed_rows(self) -> tuple[bytes, ...]:
        """All rows as `_solved` takes them; no row is added after the first look."""
        data = [value for entries, _, _ in self.rows for value in entries.values()]
        columns = [column for entries, _, _ in self.rows for column in entries]
        starts = np.cumsum([0, *(len(entries) for entries, _, _ in self.rows)])
        low, high = ([row[i] for row in self.rows] for i in (1, 2))
        kinds = (np.float64, np.int32, np.int32, np.float64, np.float64)
        return tuple(np.array(v, k).tobytes() for v, k in zip((data, columns, starts, low, high), kinds, strict=True))

    def solve(self, fixed: Iterable[int] = ()) -> np.ndarray | None:
        """0 or 1 per column, with 1 for those of `fixed`; None if the rows do not allow it. Raises PlacementError."""
        if not self.moved:
            return np.zeros(0)
        low = np.zeros(len(self.moved))
        low[list(fixed)] = 1.0
        costs = (np.array(self.moved) + np.array(self.penalty)) / LAUNCH_BYTES
        integral = np.array(self.integral, np.int8).tobytes()
        found, why = _solved(costs.tobytes(), low.tobytes(), integral, self._packed_rows)
        if why:
            raise PlacementError(f"the placement search found no solution: {why}")
        return found

    def cost(self, solution: np.ndarray) -> Cost:
        return Cost(float(np.dot(self.moved, solution)), float(np.dot(self.penalty, solution)))


def is_weight(entry: OpClass) -> bool:
    """A parameter with at least two dims: the axis is about how these lie. Norm weights and biases may be sliced."""
    return input_kind(entry.nodes[0]) == "param" and len(entry.view.outputs[0]) > 1


class Search:
    """The program of one axis: which option each class takes, at the least communication.

    `aliases` are the classes without an option of their own (`fxpar.annotate.contract`). `of_rows`: values have rows
    and tokens, either of which may be cut. Then fractions of both come close to what a placement moves, and HiGHS finds
    the best one 7 to 15 times as fast where reshards, which are 0 or 1 in it anyway, are declared so.
    """

    def __init__(
        self, problem: AxisProblem, node_cost: NodeCost, demands: Sequence[Demand], of_rows: bool = False
    ) -> None:
        self.problem, self.node_cost, self.demands, self.of_rows = problem, node_cost, tuple(demands), of_rows
        self._program = _Program(all_whole=of_rows)
        possible: dict[Result, set[Placement]] = {}
        for demand in demands:
            possible.setdefault(demand.value, set()).update(demand.options)
        self.aliases: dict[int, Alias] = find_aliases(problem, possible)
        self._x: dict[int, list[int]] = {}
        self._wants: dict[Result, list[Want]] = {}
        self._demand_columns: list[list[int]] = []
        for entry in problem.classes:
            if entry.index not in self.aliases:
                count = len(entry.nodes)
                columns = [self._program.column(0.0, node_cost(entry, o) * count, True) for o in entry.options]
                self._x[entry.index] = columns
                self._program.one_of(columns)
        for index, columns in self._x.items():
            entry = problem.classes[index]
            for position, producers in enumerate(entry.operands):
                placements = [o.inputs[position] for o in entry.options]
                for value in producers:
                    self._want(value, placements, columns)
        for demand in demands:
            self._demand(demand)
        for index in self._x:
            for result in range(len(problem.classes[index].view.outputs)):
                self._reshards(problem.classes[index], result)

    def run(self) -> AxisSolution:
        """The best solution. Raises PlacementError."""
        solution = self.forced({})
        if solution is None:
            raise PlacementError("the placement search found no solution: no options of the ops fit together")
        return solution

    def forced(self, options: Mapping[int, Option]) -> AxisSolution | None:
        """The best solution in which these classes, no aliases, take these options; None if there is none.

        Raises PlacementError where the solver gives up.
        """
        fixed = [self._x[i][self.problem.classes[i].options.index(option)] for i, option in options.items()]
        solution = self._program.solve(fixed)
        if solution is None:
            return None
        chosen = {
            index: self.problem.classes[index].options[int(np.argmax([solution[j] for j in columns]))]
            for index, columns in self._x.items()
        }
        demanded: dict[Result, list[Placement]] = {}
        for demand, columns in zip(self.demands, self._demand_columns, strict=True):
            pick = demand.options[int(np.argmax([solution[j] for j in columns]))]
            demanded.setdefault(demand.value, []).append(pick)
        found = expand(self.problem, self.aliases, chosen, demanded)
        return AxisSolution(found, self._program.cost(solution))

    def with_demand(self, demand: Demand) -> Search:
        """The same search with one more thing wanted."""
        return Search(self.problem, self.node_cost, (*self.demands, demand), self.of_rows)

    def _want(self, value: Result, placements: list[Placement], columns: list[int]) -> None:
        """Note that the user behind `columns` wants `value` so, looking through aliases."""
        want: Want = {}
        behind = value
        for column, placement in zip(columns, placements, strict=True):
            behind, wanted = resolve_want(self.aliases, value, placement)
            want.setdefault(wanted, []).append(column)
        self._wants.setdefault(behind, []).append(want)

    def _demand(self, demand: Demand) -> None:
        columns = [self._program.column(cost, 0.0, True) for cost in demand.costs]
        self._demand_columns.append(columns)
        self._program.one_of(columns)
        self._want(demand.value, list(demand.options), columns)
        if demand.tie is None:
            return
        options = self.problem.classes[demand.tie].options
        for column, tied in zip(columns, demand.ties, strict=True):
            match = [c for c, o in zip(self._x[demand.tie], options, strict=True) if o.outputs[0] == tied]
            self._program.row({column: 1.0, **dict.fromkeys(match, -1.0)}, -1, 0)

    def _reshards(self, entry: OpClass, result: int) -> None:
        """Columns and rows for the placements in which one result is made and wanted."""
        meta = tensor_metas(entry.nodes[0])[result]
        wants = self._wants.get((entry.index, result), [])
        if meta is None or not wants:
            return
        makes: dict[Placement, list[int]] = {}
        for column, option in zip(self._x[entry.index], entry.options, strict=True):
            makes.setdefault(option.outputs[result], []).append(column)
        unique = {tuple(sorted((str(p), *c) for p, c in want.items())): want for want in wants}
        for placement in dict.fromkeys(p for want in wants for p in want):
            supply = self._supply(entry, self.problem.sizes.nbytes(meta), makes, placement)
            for want in unique.values():
                if placement in want:
                    row = {**dict.fromkeys(want[placement], 1.0), **dict.fromkeys(supply, -1.0)}
                    self._program.row(row, -np.inf, 0)

    def _supply(
        self, entry: OpClass, nbytes: int, makes: dict[Placement, list[int]], placement: Placement
    ) -> list[int]:
        """Columns of the ways to have a result in `placement`: as it is made, or through a reshard."""
        supply: list[int] = []
        for made, columns in makes.items():
            if made == placement:
                supply += columns
                continue
            price = reshard_bytes(nbytes, made, placement, self.problem.degree)
            if not np.isfinite(price):
                continue
            penalty = 0.0
            given = entry.view.target == "input" and input_kind(entry.nodes[0]) not in RECEIVED
            if given and not isinstance(placement, Shard | OuterShard):
                # Gathering an input again is for overrides only, where one cuts a weight as no op can work with it.
                # What another stage sends is an activation like any other.
                penalty = (FORCED - 1) * price
            elif is_weight(entry):
                continue  # a weight that is whole is whole for a reason
            count = len(entry.nodes)
            column = self._program.column(price * count, penalty * count, False)
            self._program.row({column: 1.0, **dict.fromkeys(columns, -1.0)}, -np.inf, 0)
            supply.append(column)
        return supply


@dataclass(frozen=True)
class AxisSearch:
    """What the search of one mesh axis knows: the problem, the program, the best solution."""

    axis: str
    policy: AxisPolicy
    search: Search
    solution: AxisSolution

    @property
    def problem(self) -> AxisProblem:
        return self.search.problem


__all__ = ["FORCED", "AxisSearch", "AxisSolution", "Demand", "Search", "is_weight"]
