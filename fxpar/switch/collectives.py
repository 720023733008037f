"""Transfers that are a collective: every member of a group sends what it has to all others, or one member does.

Recognised per step, from the plan alone. A transport may run such a set as one all-gather (a ring sends as many bytes
as the transfers do) or as pipelined broadcasts (the source then sends each byte once instead of once per receiver).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fxpar.switch.problem import SwitchProblem


@dataclass(frozen=True, eq=False)
class Collective:
    """`transfers` are row numbers of the plan; `nbytes` is their sum. `ranks` ascend."""

    kind: Literal["all_gather", "broadcast"]
    step: int
    ranks: tuple[int, ...]
    transfers: np.ndarray
    nbytes: int


def find_collectives(problem: SwitchProblem, table: np.ndarray) -> list[Collective]:
    """All groups of three or more ranks of which each sends equally much to all others, or one sends to all others.

    Transfers that are in no such group are left out. The groups come in the order of (step, ranks).
    """
    if not len(table):
        return []
    # Who receives a slice from a source, as a number: the sum of random weights of these ranks, modulo 2**64.
    weights = np.random.default_rng(0).integers(1, 2**63, problem.world, dtype=np.uint64)
    slices = int(table["slice"].max()) + 1
    tensor = table["step"].astype(np.int64) * len(problem.tensors) + table["tensor"]
    sender = (tensor * slices + table["slice"]) * problem.world + table["src"]
    _, sending, fan_out = np.unique(sender, return_inverse=True, return_counts=True)
    audience = np.zeros(len(fan_out), np.uint64)
    np.add.at(audience, sending, weights[table["dst"]])
    group = audience[sending] + weights[table["src"]]
    wide = np.flatnonzero(fan_out[sending] > 1)
    keys = np.stack([table["step"][wide].astype(np.uint64), group[wide]])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    order = which.argsort(kind="stable")
    found = []
    for rows in np.split(wide[order], np.flatnonzero(np.diff(which[order])) + 1):
        if len(rows):
            found += _collectives(table, rows)
    return sorted(found, key=lambda c: (c.step, c.ranks, int(c.transfers[0])))


def _collectives(table: np.ndarray, rows: np.ndarray) -> list[Collective]:
    """An all-gather or several broadcasts: every sender in `rows` sends all it sends to all other ranks in them."""
    source = table["src"][rows]
    sources = np.unique(source)
    ranks = np.union1d(sources, table["dst"][rows])
    sent = np.bincount(source, table["nbytes"][rows])[sources]
    if len(sources) == len(ranks) and (sent == sent[0]).all():
        return [_collective("all_gather", table, rows, ranks)]
    return [_collective("broadcast", table, rows[source == rank], ranks) for rank in sources]


def _collective(
    kind: Literal["all_gather", "broadcast"], table: np.ndarray, rows: np.ndarray, ranks: np.ndarray
) -> Collective:
    total = int(table["nbytes"][rows].sum())
    return Collective(kind, int(table["step"][rows[0]]), tuple(ranks.tolist()), rows, total)
