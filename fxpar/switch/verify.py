"""Is a plan right: each needed element written exactly once, from a rank that has it by then.

Who holds and who needs a slice is taken from the problem, that is from the layouts; the table of
slices is a grid without gaps by its construction in `boxes`.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from fxpar.errors import SwitchPlanError
from fxpar.switch.problem import SwitchProblem


def verify(problem: SwitchProblem, table: np.ndarray) -> None:
    """Raise SwitchPlanError for the first thing that is wrong with these transfers; it names tensor, box and rank."""
    _check_numbers(problem, table)
    slices = 1 + max((len(cls.nbytes) for cls in problem.classes), default=0)
    place = (table["tensor"].astype(np.int64) * slices + table["slice"]) * problem.world
    _check_arrivals(problem, table, place + table["dst"], slices)
    _check_sources(problem, table, place)


def _fail(problem: SwitchProblem, tensor: int, piece: int, rank: int, why: str) -> NoReturn:
    raise SwitchPlanError(problem.tensors[tensor], problem.box_text(tensor, piece), rank, why)


def _check_numbers(problem: SwitchProblem, table: np.ndarray) -> None:
    """Tensors, slices and ranks exist, and the sizes are those of the slices."""
    classes = problem.class_of
    for name, limit in (("tensor", len(problem.tensors)), ("src", problem.world), ("dst", problem.world)):
        bad = np.flatnonzero((table[name] < 0) | (table[name] >= limit))
        if len(bad):
            row = table[bad[0]]
            raise SwitchPlanError(f"tensor {row['tensor']}", "", int(row["dst"]), f"has {name} {row[name]} of {limit}")
    counts = np.array([len(cls.nbytes) for cls in problem.classes], np.int64)
    bad = np.flatnonzero((table["slice"] < 0) | (table["slice"] >= counts[classes[table["tensor"]]]))
    if len(bad):
        row = table[bad[0]]
        fqn = problem.tensors[row["tensor"]]
        raise SwitchPlanError(fqn, "", int(row["dst"]), f"has slice {row['slice']}, which does not exist")
    starts = np.cumsum(counts) - counts
    sizes = np.concatenate([cls.nbytes for cls in problem.classes]) if len(counts) else np.empty(0, np.int64)
    bad = np.flatnonzero(table["nbytes"] != sizes[starts[classes[table["tensor"]]] + table["slice"]])
    if len(bad):
        row = table[bad[0]]
        _fail(problem, row["tensor"], row["slice"], row["dst"], f"is said to have {row['nbytes']} bytes")


def _check_arrivals(problem: SwitchProblem, table: np.ndarray, arrivals: np.ndarray, slices: int) -> None:
    """Exactly the missing slices arrive, once each."""
    found, first, count = np.unique(arrivals, return_index=True, return_counts=True)
    twice = np.flatnonzero(count > 1)
    if len(twice):
        row = table[first[twice[0]]]
        _fail(problem, row["tensor"], row["slice"], row["dst"], f"is written {count[twice[0]]} times")
    wanted = _keys(problem, [cls.missing for cls in problem.classes], slices)
    if len(found) == len(wanted) and (found == wanted).all():
        return
    for keys, why in (
        (np.setdiff1d(wanted, found, assume_unique=True), "is never written"),
        (np.setdiff1d(found, wanted, assume_unique=True), "is written but held already, or not needed"),
    ):
        if len(keys):
            place, rank = divmod(int(keys[0]), problem.world)
            tensor, piece = divmod(place, slices)
            _fail(problem, tensor, piece, rank, why)


def _check_sources(problem: SwitchProblem, table: np.ndarray, place: np.ndarray) -> None:
    """Every source holds the slice from the start, or has received it in an earlier step."""
    held = _HeldTable(problem)
    relayed = np.flatnonzero(~held(table["tensor"], table["slice"], table["src"]))
    if not len(relayed):
        return
    order = (place + table["dst"]).argsort(kind="stable")
    arrived = (place + table["dst"])[order]
    asked = place[relayed] + table["src"][relayed]
    at = np.minimum(np.searchsorted(arrived, asked), len(arrived) - 1)
    in_time = (arrived[at] == asked) & (table["step"][order[at]] < table["step"][relayed])
    if not in_time.all():
        row = table[relayed[np.argmin(in_time)]]
        why = f"comes from rank {row['src']}, which does not hold it in step {row['step']}"
        _fail(problem, row["tensor"], row["slice"], row["dst"], why)


class _HeldTable:
    """Look up `held` of all classes at once."""

    def __init__(self, problem: SwitchProblem) -> None:
        counts = np.array([len(cls.nbytes) for cls in problem.classes], np.int64)
        self.starts = (np.cumsum(counts) - counts)[problem.class_of] if len(counts) else counts
        tables = [cls.held for cls in problem.classes]
        self.table = np.concatenate(tables) if tables else np.zeros((0, problem.world), bool)

    def __call__(self, tensors: np.ndarray, slices: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        return self.table[self.starts[tensors] + slices, ranks]


def _keys(problem: SwitchProblem, tables: list[np.ndarray], slices: int) -> np.ndarray:
    """(tensor, slice, rank) of every true entry, as sorted numbers."""
    keys = []
    for cls, table in zip(problem.classes, tables, strict=True):
        piece, rank = np.nonzero(table)
        keys.append(((cls.members[:, None] * slices + piece) * problem.world + rank).ravel())
    return np.sort(np.concatenate(keys)) if keys else np.empty(0, np.int64)
